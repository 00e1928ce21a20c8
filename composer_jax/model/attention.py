"""Projections around the attention kernel: norm, q/k/v, rotary positions."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax.model import params as params_lib
from composer_jax.model import sharding
from kernels_triton import matmul
from kernels_triton import rmsnorm
from kernels_triton import rows

_LATENT_EPS = 1e-6  # of norms inside a projection, whatever `norm_eps` is


def rope_table(cfg: config.ModelConfig, length: int) -> np.ndarray:
  """Rotary angles (Su et al., arXiv 2104.09864), computed on the host.

  Args:
    cfg: gives theta, scaling, and R: how many dimensions of a head rotate.
    length: positions covered.

  Returns:
    f32 [length 2 R/2]: cosines, then sines.
  """
  dims, amplitude = cfg.rope_dim or cfg.head_dim, 1.0
  if cfg.rope_scaling is None:
    half = np.arange(0, dims, 2, dtype=np.float64) / dims
    speeds = cfg.rope_theta**-half
  else:
    speeds = np.array(cfg.rope_scaling.frequencies(cfg.rope_theta, dims))
    amplitude = cfg.rope_scaling.amplitude
  angles = np.arange(length)[:, None] * speeds[None, :]
  table = np.stack([np.cos(angles), np.sin(angles)], 1) * amplitude
  return table.astype(np.float32)


def _rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
  cos, sin = angles[:, None, 0], angles[:, None, 1]
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class _Grouped(NamedTuple):
  """What a row block of grouped-query attention multiplies by."""

  norm: jax.Array  # [D]
  qkv: jax.Array  # [D (N+2*M)*H]
  bias: jax.Array | None  # [(N+2*M)*H]
  q_norm: jax.Array | None  # [H]
  k_norm: jax.Array | None  # [H]


def _block(cfg, w, x, angles):
  h = cfg.head_dim
  n, m = sharding.heads(cfg.q_heads), sharding.heads(cfg.kv_heads)
  x = rmsnorm.rms_norm(x, w.norm, cfg.norm_eps, implementation=cfg.kernels)
  x, q_norm, k_norm = sharding.fan_out((x, w.q_norm, w.k_norm))
  qkv = matmul.matmul(x, w.qkv, dtype=cfg.dtype, implementation=cfg.kernels)
  if cfg.qkv_bias:
    qkv = qkv + w.bias[None, :]
  q, k, v = jnp.split(qkv.reshape(-1, n + 2 * m, h), [n, n + m], axis=1)
  if cfg.qk_norm:
    q, k = _norm(q, q_norm, cfg), _norm(k, k_norm, cfg)
  q, k = _rotate(q, angles) * h**-0.5, _rotate(k, angles)
  return tuple(t.astype(cfg.dtype) for t in (q, k, v))


def _norm(x, scale, cfg):
  """Normalises each head; x [R N H], scale [H]."""
  flat = x.reshape(-1, cfg.head_dim)
  out = rmsnorm.rms_norm(flat, scale, cfg.norm_eps, implementation=cfg.kernels)
  return out.reshape(x.shape)


class _Latent(NamedTuple):
  """What a row block of latent attention multiplies by."""

  norm: jax.Array  # [D]
  q_down: jax.Array | None  # [D Q]
  q_norm: jax.Array | None  # [Q]
  q_up: jax.Array  # [Q N*(H+R)]; from D where queries have no latent
  k_up: jax.Array  # [N H C]
  kv_down: jax.Array  # [D C+R]
  kv_norm: jax.Array  # [C]


def _latent_block(cfg, w, x, angles):
  multiply, by_head = (
      functools.partial(f, dtype=cfg.dtype, implementation=cfg.kernels)
      for f in (matmul.matmul, matmul.heads)
  )
  norms = functools.partial(rmsnorm.rms_norm, implementation=cfg.kernels)
  x = norms(x, w.norm, cfg.norm_eps)
  latent, k = jnp.split(multiply(x, w.kv_down), [cfg.kv_latent], axis=1)
  latent = norms(latent, w.kv_norm, _LATENT_EPS)
  if cfg.q_latent:
    x = norms(multiply(x, w.q_down), w.q_norm, _LATENT_EPS)
  q = multiply(sharding.fan_out(x), w.q_up)
  q = q.reshape(-1, sharding.heads(cfg.q_heads), cfg.head_dim + cfg.rope_dim)
  q, turned = jnp.split(q, [cfg.head_dim], axis=2)
  q = by_head(q, w.k_up)
  q = jnp.concatenate([q, _rotate(turned, angles)], axis=2)
  k = jnp.concatenate([latent[:, None], _rotate(k[:, None], angles)], axis=2)
  k = sharding.fan_out(k)
  return (q * score_scale(cfg)).astype(cfg.dtype), k.astype(cfg.dtype)


def score_scale(cfg: config.ModelConfig) -> float:
  """Factor of a query's dot products with keys, in latent attention."""
  scale = (cfg.head_dim + cfg.rope_dim) ** -0.5
  rope = cfg.rope_scaling
  return scale if rope is None else scale * rope.score_scale


def _project_latent(x, weights, angles, cfg):
  """The absorbed form: the keys' up-projection is part of the query.

  So all heads read one key and value per token, both roles multiply the same
  numbers, and no cache holds more than these. Training pays for it with wider
  dot products than those of expanded keys.
  """
  wide = lambda w: None if w is None else w.astype(jnp.float32)
  q_up = weights.wq if weights.q_up is None else weights.q_up
  small = _Latent(
      norm=weights.norm,
      q_down=wide(weights.q_down),
      q_norm=weights.q_latent_norm,
      q_up=wide(q_up.reshape(len(q_up), -1)),
      k_up=wide(weights.kv_up[..., : cfg.head_dim].transpose(1, 2, 0)),
      kv_down=wide(weights.kv_down),
      kv_norm=weights.kv_latent_norm,
  )
  block = rows.rowwise(functools.partial(_latent_block, cfg), cfg.kernels)
  q, k = block(small, x, angles)
  return q, k, k[:, :, : cfg.kv_latent]


def project(
    x: jax.Array,
    weights: params_lib.Attention,
    angles: jax.Array,
    cfg: config.ModelConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Norm, q/k/v projections and rotary positions, in row blocks.

  Args:
    x: [n D], residual stream.
    weights: of one layer (no leading L).
    angles: f32 [n 2 R/2], rows of `rope_table`.
    cfg: the model.

  Returns:
    q [n N H] scaled by H^-1/2, k [n M H], v [n M H]; of the device's heads. In
    latent attention H is the latent and what rotates, M is 1, and v [n 1 C] are
    the first columns of k.
  """
  if cfg.kv_latent:
    return _project_latent(x, weights, angles, cfg)
  flat = [
      w.reshape(w.shape[0], -1) for w in (weights.wq, weights.wk, weights.wv)
  ]
  qkv = jnp.concatenate(flat, axis=1).astype(jnp.float32)
  bias = None
  if cfg.qkv_bias:
    parts = [b.reshape(-1) for b in (weights.bq, weights.bk, weights.bv)]
    bias = jnp.concatenate(parts).astype(jnp.float32)
  small = _Grouped(
      norm=weights.norm,
      qkv=qkv,
      bias=bias,
      q_norm=weights.q_norm,
      k_norm=weights.k_norm,
  )
  block = rows.rowwise(functools.partial(_block, cfg), cfg.kernels)
  return block(small, x, angles)
