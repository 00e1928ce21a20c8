"""Attention output, router and experts: the second half of a layer."""

import functools
from typing import NamedTuple

import jax
from jax import ad_checkpoint
from jax import lax
import jax.numpy as jnp

from composer_jax import config
from composer_jax import trace
from composer_jax.model import params as params_lib
from composer_jax.model import sharding
from kernels_triton import grouped
from kernels_triton import matmul
from kernels_triton import rmsnorm
from kernels_triton import router
from kernels_triton import rows


class Routing(NamedTuple):
  """What the router did for n tokens of one layer; E = K = 0 if dense."""

  experts: jax.Array  # i32 [n K], used
  live: jax.Array  # i32 [n K], what the live router would have used
  logits: jax.Array  # f32 [n E]


def route(
    normed: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    recorded: jax.Array,
    cfg: config.ModelConfig,
) -> tuple[jax.Array, Routing]:
  """Chooses experts and gates; runs inside a row block.

  Args:
    normed: f32 [R D].
    w: router weights [D E].
    bias: [E] for the choice, or None.
    recorded: [R K] in the route dtype; blank rows take the live choice.
    cfg: the model.

  Returns:
    (gates f32 [R K], routing).
  """
  logits = matmul.matmul(normed, w, implementation=cfg.kernels)
  gates, experts, live = router.route(
      logits,
      bias,
      recorded,
      top_k=cfg.top_k,
      blank=trace.blank_route(trace.route_dtype(cfg.experts)),
      scores=cfg.router,
      renormalize=cfg.renormalize,
      scale=cfg.routed_scale,
      threshold=cfg.replay_threshold,
      groups=cfg.expert_groups,
      top_groups=cfg.top_groups,
      implementation=cfg.kernels,
  )
  return gates, Routing(experts, live, logits)


class _Weights(NamedTuple):
  """What a row block multiplies by: all of a layer's half but the experts."""

  v_up: jax.Array | None  # [N C V]
  wo: jax.Array  # [N*V D]
  norm: jax.Array  # [D]
  router: jax.Array | None  # [D E]
  bias: jax.Array | None  # [E]
  shared_in: jax.Array | None  # [D 2*F]
  shared_out: jax.Array | None  # [F D]
  shared_gate: jax.Array | None  # [D 1]


def _shared(normed, w, cfg):
  multiply = functools.partial(
      matmul.matmul, dtype=cfg.dtype, implementation=cfg.kernels
  )
  up = multiply(sharding.fan_out(normed), w.shared_in)
  gate, value = jnp.split(up, 2, axis=-1)
  out = sharding.fan_in(multiply(jax.nn.silu(gate) * value, w.shared_out))
  if cfg.shared_gate:
    out = jax.nn.sigmoid(multiply(normed, w.shared_gate)) * out
  return out


def _block(cfg, w, x, attended, recorded=None):
  if cfg.kv_latent:
    attended = matmul.heads(
        attended.reshape(-1, len(w.v_up), cfg.kv_latent),
        w.v_up,
        dtype=cfg.dtype,
        implementation=cfg.kernels,
    ).reshape(-1, len(w.wo))
  attended = matmul.matmul(
      attended, w.wo, dtype=cfg.dtype, implementation=cfg.kernels
  )
  x = x.astype(jnp.float32) + sharding.fan_in(attended)
  normed = rmsnorm.rms_norm(x, w.norm, cfg.norm_eps, implementation=cfg.kernels)
  if cfg.shared_experts:
    x = x + _shared(normed, w, cfg)
  if not cfg.experts:
    return x
  gates, routing = route(normed, w.router, w.bias, recorded, cfg)
  return x, normed.astype(cfg.dtype), gates, routing


def _experts(normed, gates, experts, weights, cfg):
  """Sum of gate x expert over each row's choices, f32 [n D].

  Where devices share the experts, rows travel around the ring of them and come
  home with what each device's experts have added. A choice is one device's, so
  its term is exact in any order, and the terms are then summed in the order of
  a single device. No choice is dropped and no buffer grows with the devices,
  however uneven the load is.
  """
  how = dict(dtype=cfg.dtype, implementation=cfg.kernels)
  normed, gates = sharding.fan_out((normed, gates))
  devices = sharding.size(sharding.EXPERT)
  if devices == 1:
    y = grouped.expert_ffn(
        normed.astype(jnp.float32),
        gates,
        experts,
        weights.w_in,
        weights.w_out,
        **how,
    )
    return sharding.fan_in(y)
  first = lax.axis_index(sharding.EXPERT) * len(weights.w_in)

  # Weights stay, rows travel. `passed_on` turns the ring by one place: after as
  # many visits as devices each row has met every expert, and is home.
  # What a visit computes is computed again in the backward pass: kept, the
  # room for the most uneven load would add up over the devices.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def visit(carried, _):
    normed, gates, experts, terms = carried
    # Choices of other devices' experts are out of range here and add zeros, so
    # only one of all visits changes a term.
    terms = terms + grouped.expert_choices(
        normed.astype(jnp.float32),
        gates,
        experts - first,
        weights.w_in,
        weights.w_out,
        **how,
    )
    return sharding.passed_on((normed, gates, experts, terms)), None

  terms = jnp.zeros((*experts.shape, normed.shape[-1]), jnp.float32)
  carried = normed, gates, experts, terms
  (*_, terms), _ = lax.scan(visit, carried, length=devices)
  # Only now, at home: a sum of each device's own choices would be rounded by
  # where the experts lie.
  y = terms[:, 0]
  for k in range(1, cfg.top_k):
    y = y + terms[:, k]
  return sharding.fan_in(y)


def layer(
    x: jax.Array,
    attended: jax.Array,
    recorded: jax.Array,
    attention: params_lib.Attention,
    weights: params_lib.Moe,
    cfg: config.ModelConfig,
) -> tuple[jax.Array, Routing]:
  """x + attention, then + shared experts, then + routed experts.

  Args:
    x: [n D], residual stream.
    attended: f32 [n N H], from the attention kernel.
    recorded: [n K] routes to replay, blank where none.
    attention: gives the output projection, of latent values after their heads'
      own projection.
    weights: of one layer (no leading L).
    cfg: the model.

  Returns:
    (residual stream [n D], routing).
  """
  n, d = x.shape
  wide = lambda w: None if w is None else w.astype(jnp.float32)
  shared_in = weights.shared_in
  if shared_in is not None:
    shared_in = shared_in.reshape(d, -1)
  v_up = attention.kv_up
  if v_up is not None:
    v_up = v_up[..., cfg.head_dim :].transpose(1, 0, 2)
  small = _Weights(
      v_up=wide(v_up),
      wo=wide(attention.wo.reshape(-1, d)),
      norm=weights.norm,
      router=weights.router,
      bias=wide(weights.bias),
      shared_in=wide(shared_in),
      shared_out=wide(weights.shared_out),
      shared_gate=wide(weights.shared_gate),
  )
  block = rows.rowwise(functools.partial(_block, cfg), cfg.kernels)
  name = ad_checkpoint.checkpoint_name
  attended = attended.reshape(n, -1)
  if not cfg.experts:
    none = jnp.zeros((n, 0), jnp.int32)
    x = name(block(small, x, attended), 'residual').astype(cfg.dtype)
    return x, Routing(none, none, none.astype(jnp.float32))
  x, normed, gates, routing = block(small, x, attended, recorded)
  x = name(x, 'residual')
  routing = Routing(
      name(routing.experts, 'experts'),
      routing.live,
      name(routing.logits, 'router logits'),
  )
  gates = name(gates, 'gates')
  y = name(
      _experts(normed, gates, routing.experts, weights, cfg), 'expert output'
  )
  return (x + y).astype(cfg.dtype), routing
