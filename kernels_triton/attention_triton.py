"""Calls of the attention kernels; import it only where Triton is installed."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_triton import attention_backward_kernel as backward_kernel
from kernels_triton import attention_kernel as kernel
from kernels_triton import contract
from kernels_triton import launch


class _Shape(NamedTuple):
  """What every kernel of a call shares."""

  heads: int  # M, kv heads
  group: int  # G, query heads of each
  width: int  # H

  @classmethod
  def of(cls, q: jax.Array, kv_heads: int) -> '_Shape':
    return cls(kv_heads, q.shape[-2] // kv_heads, q.shape[-1])

  def constants(self) -> dict[str, Any]:
    padded = max(16, _power_of_two(self.width))  # tl.dot takes no less
    return {'M': self.heads, 'G': self.group, 'H': self.width, 'BH': padded}

  def tokens(self, config: launch.Config) -> int:
    """Query tokens of a tile: a power of two that divides the key block."""
    tokens = config.tiles['ROWS'] // self.group
    if not tokens:
      raise ValueError(
          f'{self.group} query heads per kv head: at most'
          f' {config.tiles["ROWS"]} fit a tile'
      )
    return min(contract.KEY_BLOCK, _power_of_two(tokens + 1) // 2)


def _power_of_two(n: int) -> int:
  return 1 << (n - 1).bit_length()


def _spec(shape, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _starts(positions: jax.Array, tokens: int) -> jax.Array:
  """Where the segment of each tile of `tokens` starts in its row, i32."""
  ids = jnp.arange(positions.shape[1], dtype=jnp.int32)[None]
  return (ids - positions.astype(jnp.int32))[:, ::tokens]


def _forward(q, k, v, positions, implementation):
  b, t, n, _ = q.shape
  if t % contract.KEY_BLOCK:
    raise ValueError(
        f'rows of {t} tokens: must be a multiple of {contract.KEY_BLOCK}'
    )
  shape = _Shape.of(q, k.shape[2])
  config = launch.config(kernel.CONFIGS, q.dtype, implementation)
  tokens = shape.tokens(config)
  out, lse = launch.call(
      kernel.forward,
      q,
      k,
      v,
      _starts(positions, tokens),
      launch.size(t),
      out=(_spec(q.shape), _spec((b, t, n))),
      grid=(t // tokens, shape.heads, b),
      config=config,
      implementation=implementation,
      TOKENS=tokens,
      **shape.constants(),
  )
  return out, (q, k, v, positions, out, lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def segment_attention(q, k, v, positions, implementation):
  """See `attention.segment_attention`; the segments follow from positions."""
  return _forward(q, k, v, positions, implementation)[0]


def _backward(implementation, residuals, g):
  q, k, v, positions, out, lse = residuals
  b, t, _, _ = q.shape
  shape = _Shape.of(q, k.shape[2])
  config = launch.config(
      backward_kernel.QUERY_CONFIGS, q.dtype, implementation
  )
  tokens = shape.tokens(config)
  dq, delta = launch.call(
      backward_kernel.backward_q,
      q,
      k,
      v,
      out,
      lse,
      g,
      _starts(positions, tokens),
      launch.size(t),
      out=(_spec(q.shape, q.dtype), _spec(lse.shape)),
      grid=(t // tokens, shape.heads, b),
      config=config,
      implementation=implementation,
      TOKENS=tokens,
      **shape.constants(),
  )
  config = launch.config(backward_kernel.KEY_CONFIGS, q.dtype, implementation)
  tokens = shape.tokens(config)
  starts = _starts(positions, tokens)
  keys = config.tiles['KEYS']
  blocks = -(-t // keys)
  # Tiles that start before the block ends: starts do not decrease.
  after = jnp.arange(1, blocks + 1, dtype=jnp.int32) * keys
  ends = jax.vmap(lambda s: jnp.searchsorted(s, after))(starts)
  dk, dv = launch.call(
      backward_kernel.backward_kv,
      q,
      k,
      v,
      lse,
      delta,
      g,
      starts,
      ends.astype(jnp.int32),
      launch.size(t),
      out=(_spec(k.shape, k.dtype), _spec(v.shape, v.dtype)),
      grid=(blocks, shape.heads, b),
      config=config,
      implementation=implementation,
      TOKENS=tokens,
      **shape.constants(),
  )
  return dq, dk, dv, None


segment_attention.defvjp(_forward, _backward)


def paged_attention(q, k_pages, v_pages, table, positions, implementation):
  """See `attention.paged_attention`."""
  b, tokens = positions.shape
  shape = _Shape.of(q, k_pages.shape[1])
  config = launch.config(kernel.CONFIGS, q.dtype, implementation)
  if tokens > shape.tokens(config):
    raise ValueError(
        f'{tokens} new tokens per sequence: at most {shape.tokens(config)} fit'
        ' a tile'
    )
  size = config.tiles['SPLIT']
  splits = -(-table.shape[1] * contract.KEY_BLOCK // size)
  rows = tokens * shape.group
  state = (b, shape.heads, splits, rows)
  positions = jnp.maximum(positions.astype(jnp.int32), 0)
  partial = launch.call(
      kernel.paged_split,
      q,
      k_pages,
      v_pages,
      table.astype(jnp.int32),
      positions,
      launch.size(table.shape[1]),
      out=(_spec(state), _spec(state), _spec((*state, shape.width))),
      grid=(splits, shape.heads, b),
      config=config,
      implementation=implementation,
      Q=tokens,
      PAGE=contract.KEY_BLOCK,
      **shape.constants(),
  )
  (out,) = launch.call(
      kernel.paged_merge,
      positions,
      *partial,
      launch.size(splits),
      out=(_spec(q.shape),),
      grid=(shape.heads, b),
      config=launch.config(kernel.MERGE_CONFIGS, q.dtype, implementation),
      implementation=implementation,
      Q=tokens,
      ROWS=_power_of_two(rows),
      SPLIT=size,
      **shape.constants(),
  )
  return out
