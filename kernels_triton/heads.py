"""Layouts of heads that the reference of attention computes in."""

import jax


def fold(q: jax.Array, kv_heads: int) -> jax.Array:
  """[B T N H] -> [B M T*G H]: the G query heads of a kv head are rows."""
  b, t, n, h = q.shape
  q = q.reshape(b, t, kv_heads, n // kv_heads, h)
  return q.transpose(0, 2, 1, 3, 4).reshape(b, kv_heads, -1, h)


def unfold(x: jax.Array, q_heads: int) -> jax.Array:
  """Inverse of `fold`: [B M T*G H] -> [B T N H]."""
  b, m, rows, h = x.shape
  g = q_heads // m
  x = x.reshape(b, m, rows // g, g, h).transpose(0, 2, 1, 3, 4)
  return x.reshape(b, rows // g, q_heads, h)


def heads_first(x: jax.Array) -> jax.Array:
  """[B T M H] -> [B M T H], the layout of keys and values here."""
  return x.transpose(0, 2, 1, 3)
