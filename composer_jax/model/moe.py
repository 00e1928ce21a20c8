"""Attention output, router and experts: the second half of a layer."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax import config
from composer_jax import trace
from composer_jax.model import params as params_lib
from kernels_triton import grouped
from kernels_triton import matmul
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
  logits = matmul.matmul(normed, w, implementation=cfg.kernels)
  gates, experts, live = router.route(
      logits,
      None,
      recorded,
      top_k=cfg.top_k,
      blank=trace.blank_route(trace.route_dtype(cfg.experts)),
      implementation=cfg.kernels,
  )
  return gates, Routing(experts, live, logits)


def _block(cfg, weights, x, attended, recorded):
  wo, norm, w_router = weights
  x = x.astype(jnp.float32) + matmul.matmul(
      attended, wo, dtype=cfg.dtype, implementation=cfg.kernels
  )
  normed = rmsnorm.rms_norm(x, norm, cfg.norm_eps, implementation=cfg.kernels)
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
  block = rows.rowwise(functools.partial(_block, cfg), cfg.kernels)
  x, normed, gates, routing = block(
      (wo, weights.norm, weights.router), x, attended.reshape(n, -1), recorded
  )
  w_in = weights.w_in.reshape(*weights.w_in.shape[:2], -1)
  y = grouped.expert_ffn(
      normed.astype(jnp.float32),
      gates,
      routing.experts,
      w_in,
      weights.w_out,
      dtype=cfg.dtype,
      implementation=cfg.kernels,
  )
  return (x + y).astype(cfg.dtype), routing
