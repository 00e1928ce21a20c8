"""Attention output, router and experts: the second half of a layer."""

import functools
from typing import NamedTuple

import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from composer_jax import config
from composer_jax import trace
from composer_jax.model import params as params_lib
from kernels_triton import grouped
from kernels_triton import rmsnorm
from kernels_triton import router
from kernels_triton import rows


class Routing(NamedTuple):
  """What the router did for n tokens of one layer."""

  experts: jax.Array  # i32 [n K], used
  live: jax.Array  # i32 [n K], what the live router would have used
  logits: jax.Array  # f32 [n E]


def route(
    normed: jax.Array,
    w: jax.Array,
    recorded: jax.Array,
    cfg: config.ModelConfig,
) -> tuple[jax.Array, Routing]:
  """Chooses experts and gates; runs inside a row block.

  Args:
    normed: f32 [R D].
    w: router weights [D E].
    recorded: [R K] in the route dtype; blank rows take the live choice.
    cfg: the model.

  Returns:
    (gates f32 [R K], routing).
  """
  logits = normed @ w.astype(jnp.float32)
  live = router.select(logits, cfg.top_k)
  blank = trace.blank_route(trace.route_dtype(cfg.experts))
  experts = router.replayed(live, recorded, blank)
  gates = router.gates(logits, experts)
  return gates, Routing(experts, live, logits)


def _block(cfg, weights, x, attended, recorded):
  wo, norm, w_router = weights
  x = x.astype(jnp.float32) + attended @ wo
  normed = rmsnorm.rms_norm(x, norm, cfg.norm_eps)
  gates, routing = route(normed, w_router, recorded, cfg)
  return x, normed.astype(cfg.dtype), gates, routing


def layer(
    x: jax.Array,
    attended: jax.Array,
    recorded: jax.Array,
    attention: params_lib.Attention,
    weights: params_lib.Moe,
    cfg: config.ModelConfig,
) -> tuple[jax.Array, Routing]:
  """x + attention, then + experts.

  Args:
    x: [n D], residual stream.
    attended: f32 [n N H], from the attention kernel.
    recorded: [n K] routes to replay, blank where none.
    attention: gives the output projection.
    weights: of one layer (no leading L).
    cfg: the model.

  Returns:
    (residual stream [n D], routing).
  """
  n, d = x.shape
  wo = attention.wo.reshape(-1, d).astype(jnp.float32)
  block = rows.rowwise(functools.partial(_block, cfg))
  x, normed, gates, routing = block(
      (wo, weights.norm, weights.router), x, attended.reshape(n, -1), recorded
  )
  name = ad_checkpoint.checkpoint_name
  x = name(x, 'residual')
  routing = Routing(
      name(routing.experts, 'experts'),
      routing.live,
      name(routing.logits, 'router logits'),
  )
  gates = name(gates, 'gates')
  w_in = weights.w_in.reshape(*weights.w_in.shape[:2], -1)
  y = grouped.expert_ffn(
      normed.astype(jnp.float32), gates, routing.experts, w_in, weights.w_out
  )
  y = name(y, 'expert output')
  return (x + y).astype(cfg.dtype), routing
