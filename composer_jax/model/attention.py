"""Projections around the attention kernel: norm, q/k/v, rotary positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax.model import params as params_lib
from composer_jax.model import sharding
from kernels_triton import matmul
from kernels_triton import rmsnorm
from kernels_triton import rows


def rope_table(cfg: config.ModelConfig, length: int) -> np.ndarray:
  """Rotary angles (Su et al., arXiv 2104.09864), computed on the host.

  Args:
    cfg: gives head_dim H and theta.
    length: positions covered.

  Returns:
    f32 [length 2 H/2]: cosines, then sines.
  """
  half = np.arange(0, cfg.head_dim, 2, dtype=np.float64) / cfg.head_dim
  angles = np.arange(length)[:, None] * cfg.rope_theta ** -half[None, :]
  return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def _rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
  cos, sin = angles[:, None, 0], angles[:, None, 1]
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _block(cfg, weights, x, angles):
  norm, w, bias, scales = weights
  h = cfg.head_dim
  n = cfg.q_heads // sharding.size(sharding.TENSOR)
  m = cfg.kv_heads // sharding.size(sharding.TENSOR)
  x = rmsnorm.rms_norm(x, norm, cfg.norm_eps, implementation=cfg.kernels)
  x, scales = sharding.fan_out((x, scales))
  qkv = matmul.matmul(x, w, dtype=cfg.dtype, implementation=cfg.kernels)
  if cfg.qkv_bias:
    qkv = qkv + bias[None, :]
  q, k, v = jnp.split(qkv.reshape(-1, n + 2 * m, h), [n, n + m], axis=1)
  if cfg.qk_norm:
    q, k = (_norm(x, w, cfg) for x, w in zip((q, k), scales, strict=True))
  q, k = _rotate(q, angles) * h**-0.5, _rotate(k, angles)
  return tuple(t.astype(cfg.dtype) for t in (q, k, v))


def _norm(x, scale, cfg):
  """Normalises each head; x [R N H], scale [H]."""
  flat = x.reshape(-1, cfg.head_dim)
  out = rmsnorm.rms_norm(flat, scale, cfg.norm_eps, implementation=cfg.kernels)
  return out.reshape(x.shape)


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
    angles: f32 [n 2 H/2], rows of `rope_table`.
    cfg: the model.

  Returns:
    q [n N H] scaled by H^-1/2, k [n M H], v [n M H]; of the device's heads.
  """
  flat = [
      w.reshape(w.shape[0], -1) for w in (weights.wq, weights.wk, weights.wv)
  ]
  w = jnp.concatenate(flat, axis=1).astype(jnp.float32)
  bias = None
  if cfg.qkv_bias:
    parts = [b.reshape(-1) for b in (weights.bq, weights.bk, weights.bv)]
    bias = jnp.concatenate(parts).astype(jnp.float32)
  scales = weights.q_norm, weights.k_norm
  block = rows.rowwise(functools.partial(_block, cfg), cfg.kernels)
  return block((weights.norm, w, bias, scales), x, angles)
