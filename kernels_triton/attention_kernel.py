"""Segment attention on a GPU, and what its paged twin has in common with it.

Invariant: a query row meets its keys in blocks of `keys` that are counted from
the start of its own segment, in splits of `split` keys; within a split one
online softmax runs over the blocks in ascending order, then the splits are
merged in ascending order. Both kernels run these steps through the same two
functions (`block`, `merge`) on tiles of the same `rows` x `keys`, so that
they compile to the same instructions:

  prefill: one program does all splits of `tokens` queries x G heads;
  paged: one program per split, Q x G live rows of a tile, then one merge.

A kv head with more query heads than fit a tile is read by SHARE programs, each
with G of them; M counts these programs. A key may be longer than a value, as
in latent attention: its V columns and the W after them are two tiles, for tile
sizes are powers of two.

A tile's queries lie in one segment and in one key block, because segments
start at multiples of the page and `tokens` divides the page, which divides
`keys`, which divides `split`. So all rows of a tile visit the same blocks, and
the only masked keys stand in the last one. There a masked weight is an exact
zero times a finite value, or times the zero of a key past the end: nothing is
added. (A paged tile may hold tokens of several blocks; the blocks past a row's
position multiply its sums by one and add zero.)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels_triton import contract
from kernels_triton import launch

_MASKED = tl.constexpr(-1e30)


def _config(rows: int, keys: int, split: int, warps: int, stages: int):
  """Rows are query tokens x heads; a split is a program of the cache."""
  tiles = {'ROWS': rows, 'KEYS': keys, 'SPLIT': split}
  return launch.Config(tiles, warps, stages)


CONFIGS = {
    ('float32', 90): _config(16, 16, 512, warps=4, stages=1),
    ('bfloat16', 90): _config(128, 64, 512, warps=8, stages=2),
}
WIDE_CONFIGS = {
    ('bfloat16', 90): _config(16, 32, 512, warps=8, stages=1),
}
_WIDE = 256  # columns of a value above which a tile has fewer rows
_WIDEST = 512, 64  # columns of a value, and of a key after them


@triton.jit
def load_rows(ptr, index, live, d, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
  """The first columns of rows of ptr, [rows d]; zeros where not live."""
  at = index.to(tl.int64)[:, None] * STRIDE + d[None, :]
  mask = live[:, None] & (d < WIDTH)[None, :]
  return tl.load(ptr + at, mask=mask, other=0.0)


@triton.jit
def store_rows(
    ptr, index, live, d, value, WIDTH: tl.constexpr, STRIDE: tl.constexpr
):
  at = index.to(tl.int64)[:, None] * STRIDE + d[None, :]
  mask = live[:, None] & (d < WIDTH)[None, :]
  tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def scores(a, a_tail, b, b_tail, W: tl.constexpr):
  """Products of the rows of a and b; the tails count only if W is not 0."""
  s = tl.dot(a, tl.trans(b), input_precision='ieee')
  if W > 0:
    s = tl.dot(a_tail, tl.trans(b_tail), s, input_precision='ieee')
  return s


@triton.jit
def block(q, q_tail, k, k_tail, v, visible, peak, total, acc, W: tl.constexpr):
  """One key block of an online softmax; peak, total [rows], acc [rows V]."""
  s = scores(q, q_tail, k, k_tail, W)
  s = tl.where(visible, s, _MASKED)
  new = tl.maximum(peak, tl.max(s, 1))
  shrink = tl.exp(peak - new)
  e = tl.where(visible, tl.exp(s - new[:, None]), 0.0)
  total = total * shrink + tl.sum(e, 1)
  acc = tl.dot(e.to(v.dtype), v, acc * shrink[:, None], input_precision='ieee')
  return new, total, acc


@triton.jit
def merge(peak, total, acc, peak_s, total_s, acc_s):
  """Adds one split's state to that of the splits before it."""
  new = tl.maximum(peak, peak_s)
  a = tl.exp(peak - new)
  b = tl.exp(peak_s - new)
  total = total * a + total_s * b
  acc = acc * a[:, None] + acc_s * b[:, None]
  return new, total, acc


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    starts,
    length,
    out,
    lse,
    M: tl.constexpr,
    G: tl.constexpr,
    SHARE: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
  """out [B T N H] and lse [B T N] of one tile of one kv head.

  q [B T N V+W], k [B T M/SHARE V+W], v [B T M/SHARE V], starts i32 [B T/TOKENS]: the index in its row
  where the segment of each tile starts; length i32 [1]: T.
  """
  tokens_per_row = tl.load(length)
  tile = tl.program_id(0)
  m = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  first = tile * TOKENS
  end = first + TOKENS
  start = tl.load(starts + b * (tokens_per_row // TOKENS) + tile)
  r = tl.arange(0, ROWS)
  d = tl.arange(0, BV)
  tail = tl.arange(0, BW)
  token = first + r // G
  live = r < TOKENS * G
  row = (b * tokens_per_row + token) * (M * G) + m * G + r % G
  x = load_rows(q, row, live, d, V, V + W)
  x_tail = x
  if W > 0:
    x_tail = load_rows(q + V, row, live, tail, W, V + W)
  peak = tl.full((ROWS,), _MASKED, tl.float32)
  total = tl.zeros((ROWS,), tl.float32)
  acc = tl.zeros((ROWS, BV), tl.float32)
  for s in range(start, end, SPLIT):
    peak_s = tl.full((ROWS,), _MASKED, tl.float32)
    total_s = tl.zeros((ROWS,), tl.float32)
    acc_s = tl.zeros((ROWS, BV), tl.float32)
    for j in range(s, tl.minimum(s + SPLIT, end), KEYS):
      key = j + tl.arange(0, KEYS)
      at = (b * tokens_per_row + key) * (M // SHARE) + m // SHARE
      kj = load_rows(k, at, key < end, d, V, V + W)
      kj_tail = kj
      if W > 0:
        kj_tail = load_rows(k + V, at, key < end, tail, W, V + W)
      peak_s, total_s, acc_s = block(
          x,
          x_tail,
          kj,
          kj_tail,
          load_rows(v, at, key < end, d, V, V),
          key[None, :] <= token[:, None],
          peak_s,
          total_s,
          acc_s,
          W,
      )
    peak, total, acc = merge(peak, total, acc, peak_s, total_s, acc_s)
  store_rows(out, row, live, d, acc / total[:, None], V, V)
  tl.store(lse + row, peak + tl.log(total), mask=live)


class Shape(NamedTuple):
  """What every kernel of a call shares."""

  heads: int  # M, tiles that the query heads of a token are cut into
  group: int  # G, query heads of each
  share: int  # tiles that read one kv head
  width: int  # V, of a value
  tail: int  # W, what a key has beyond that

  @classmethod
  def of(
      cls,
      q: jax.Array,
      kv_heads: int,
      width: int,
      tables: Sequence[launch.Table],
      implementation: str,
  ) -> tuple['Shape', launch.Config]:
    """The shape, and how it is compiled.

    Args:
      q: [.. N H].
      kv_heads: M.
      width: of a value.
      tables: for values of usual width, and for wide ones.
      implementation: 'triton' or 'interpret'.

    Raises:
      ValueError: no tile has room for such heads.
    """
    tail = q.shape[-1] - width
    if width > _WIDEST[0] or not 0 <= tail <= _WIDEST[1]:
      raise ValueError(
          f'attention: keys of {q.shape[-1]} and values of {width} columns: at'
          f' most {_WIDEST[0]} and {_WIDEST[1]} beyond those fit a tile; use'
          f' {launch.REFERENCE!r}'
      )
    table = tables[width > _WIDE]
    config = launch.config(table, q.dtype, implementation)
    most = config.tiles['ROWS'] // contract.QUERY_ROWS
    group = q.shape[-2] // kv_heads
    fit = next(g for g in range(min(group, most), 0, -1) if group % g == 0)
    share = group // fit
    return cls(kv_heads * share, fit, share, width, tail), config

  @property
  def wide(self) -> bool:
    """Values are so wide that a tile has fewer rows."""
    return self.width > _WIDE

  def constants(self) -> dict[str, Any]:
    return {
        'M': self.heads,
        'G': self.group,
        'SHARE': self.share,
        'V': self.width,
        'BV': max(16, _power_of_two(self.width)),  # tl.dot takes no less
        'W': self.tail,
        'BW': max(16, _power_of_two(self.tail)),
    }

  def tokens(self, config: launch.Config) -> int:
    """Query tokens of a tile: a power of two that divides the key block."""
    tokens = config.tiles['ROWS'] // self.group
    return min(contract.KEY_BLOCK, _power_of_two(tokens + 1) // 2)


def _power_of_two(n: int) -> int:
  return 1 << (n - 1).bit_length()


def spec(shape, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(tuple(shape), dtype)


def starts(positions: jax.Array, tokens: int) -> jax.Array:
  """Where the segment of each tile of `tokens` starts in its row, i32."""
  ids = jnp.arange(positions.shape[1], dtype=jnp.int32)[None]
  return (ids - positions.astype(jnp.int32))[:, ::tokens]


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    implementation: str,
) -> tuple[jax.Array, jax.Array]:
  """Attention f32 [B T N V], and the log of its softmax sums f32 [B T N]."""
  b, t, n, _ = q.shape
  tables = CONFIGS, WIDE_CONFIGS
  shape, config = Shape.of(q, k.shape[2], v.shape[3], tables, implementation)
  tokens = shape.tokens(config)
  return launch.call(
      forward_kernel,
      q,
      k,
      v,
      starts(positions, tokens),
      launch.size(t),
      out=(spec((b, t, n, shape.width)), spec((b, t, n))),
      grid=(t // tokens, shape.heads, b),
      config=config,
      implementation=implementation,
      TOKENS=tokens,
      **shape.constants(),
  )
