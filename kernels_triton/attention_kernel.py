"""Segment attention and paged decode attention on a GPU, with the same bits.

Invariant: a query row meets its keys in blocks of `keys` that are counted from
the start of its own segment, in splits of `split` keys; within a split one
online softmax runs over the blocks in ascending order, then the splits are
merged in ascending order. Both kernels run these steps through the same two
functions (`_block`, `_merge`) on tiles of the same `rows` x `keys`, so that
they compile to the same instructions:

  prefill: one program does all splits of `tokens` queries x G heads;
  paged: one program per split, Q x G live rows of a tile, then one merge.

A tile's queries lie in one segment and in one key block, because segments
start at multiples of the page and `tokens` divides the page, which divides
`keys`, which divides `split`. So all rows of a tile visit the same blocks, and
the only masked keys stand in the last one. There a masked weight is an exact
zero times a finite value, or times the zero of a key past the end: nothing is
added. (A paged tile may hold tokens of several blocks; the blocks past a row's
position multiply its sums by one and add zero.)
"""

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
MERGE_CONFIGS = {
    (dtype, 90): launch.Config({}, warps=4, stages=1)
    for dtype in ('float32', 'bfloat16')
}


@triton.jit
def load_rows(ptr, index, live, d, H: tl.constexpr):
  """Rows ptr[index, :H] as [rows, d]; zeros where not live."""
  at = index.to(tl.int64)[:, None] * H + d[None, :]
  return tl.load(ptr + at, mask=live[:, None] & (d < H)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, index, live, d, value, H: tl.constexpr):
  at = index.to(tl.int64)[:, None] * H + d[None, :]
  mask = live[:, None] & (d < H)[None, :]
  tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _block(q, k, v, visible, peak, total, acc):
  """One key block of an online softmax; peak, total [rows], acc [rows H]."""
  s = tl.dot(q, tl.trans(k), input_precision='ieee')
  s = tl.where(visible, s, _MASKED)
  new = tl.maximum(peak, tl.max(s, 1))
  shrink = tl.exp(peak - new)
  e = tl.where(visible, tl.exp(s - new[:, None]), 0.0)
  total = total * shrink + tl.sum(e, 1)
  acc = tl.dot(e.to(v.dtype), v, acc * shrink[:, None], input_precision='ieee')
  return new, total, acc


@triton.jit
def _merge(peak, total, acc, peak_s, total_s, acc_s):
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
    H: tl.constexpr,
    BH: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
  """out [B T N H] and lse [B T N] of one tile of one kv head.

  q [B T N H], k and v [B T M H], starts i32 [B T/TOKENS]: the index in its row
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
  d = tl.arange(0, BH)
  token = first + r // G
  live = r < TOKENS * G
  row = (b * tokens_per_row + token) * (M * G) + m * G + r % G
  x = load_rows(q, row, live, d, H)
  peak = tl.full((ROWS,), _MASKED, tl.float32)
  total = tl.zeros((ROWS,), tl.float32)
  acc = tl.zeros((ROWS, BH), tl.float32)
  for s in range(start, end, SPLIT):
    peak_s = tl.full((ROWS,), _MASKED, tl.float32)
    total_s = tl.zeros((ROWS,), tl.float32)
    acc_s = tl.zeros((ROWS, BH), tl.float32)
    for j in range(s, tl.minimum(s + SPLIT, end), KEYS):
      key = j + tl.arange(0, KEYS)
      at = (b * tokens_per_row + key) * M + m
      peak_s, total_s, acc_s = _block(
          x,
          load_rows(k, at, key < end, d, H),
          load_rows(v, at, key < end, d, H),
          key[None, :] <= token[:, None],
          peak_s,
          total_s,
          acc_s,
      )
    peak, total, acc = _merge(peak, total, acc, peak_s, total_s, acc_s)
  store_rows(out, row, live, d, acc / total[:, None], H)
  tl.store(lse + row, peak + tl.log(total), mask=live)


@triton.jit
def paged_split_kernel(
    q,
    k_pages,
    v_pages,
    table,
    positions,
    pages_per_row,
    peaks,
    totals,
    accs,
    Q: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
  """Softmax state of one split of one sequence and kv head.

  q [B Q N H], k_pages and v_pages [P M PAGE H], table i32 [B S/PAGE], positions
  i32 [B Q], pages_per_row i32 [1]; peaks and totals [B M splits Q*G], accs
  [B M splits Q*G H]. A split past the last position is neither written nor,
  by the merge, read.
  """
  pages = tl.load(pages_per_row)
  split = tl.program_id(0)
  m = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  r = tl.arange(0, ROWS)
  live = r < Q * G
  token = tl.load(positions + b * Q + r // G, mask=live, other=0)
  last = tl.max(token, 0)
  first = split * SPLIT
  if first <= last:
    d = tl.arange(0, BH)
    x = load_rows(q, (b * Q + r // G) * (M * G) + m * G + r % G, live, d, H)
    peak = tl.full((ROWS,), _MASKED, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BH), tl.float32)
    for j in range(first, tl.minimum(first + SPLIT, last + 1), KEYS):
      key = j + tl.arange(0, KEYS)
      inside = key <= last
      page = tl.load(table + b * pages + key // PAGE, mask=inside, other=0)
      at = (page.to(tl.int64) * M + m) * PAGE + key % PAGE
      peak, total, acc = _block(
          x,
          load_rows(k_pages, at, inside, d, H),
          load_rows(v_pages, at, inside, d, H),
          key[None, :] <= token[:, None],
          peak,
          total,
          acc,
      )
    state = ((b * M + m) * tl.num_programs(0) + split) * (Q * G) + r
    tl.store(peaks + state, peak, mask=live)
    tl.store(totals + state, total, mask=live)
    store_rows(accs, state, live, d, acc, H)


@triton.jit
def paged_merge_kernel(
    positions,
    peaks,
    totals,
    accs,
    splits_per_row,
    out,
    Q: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
):
  """out [B Q N H] from the splits of one sequence and kv head, ascending."""
  splits = tl.load(splits_per_row)
  m = tl.program_id(0)
  b = tl.program_id(1).to(tl.int64)
  r = tl.arange(0, ROWS)
  d = tl.arange(0, BH)
  live = r < Q * G
  last = tl.max(tl.load(positions + b * Q + r // G, mask=live, other=0), 0)
  peak = tl.full((ROWS,), _MASKED, tl.float32)
  total = tl.zeros((ROWS,), tl.float32)
  acc = tl.zeros((ROWS, BH), tl.float32)
  for s in range(0, last // SPLIT + 1):
    state = ((b * M + m) * splits + s) * (Q * G) + r
    peak, total, acc = _merge(
        peak,
        total,
        acc,
        tl.load(peaks + state, mask=live, other=0.0),
        tl.load(totals + state, mask=live, other=1.0),
        load_rows(accs, state, live, d, H),
    )
  row = (b * Q + r // G) * (M * G) + m * G + r % G
  store_rows(out, row, live, d, acc / total[:, None], H)


class Shape(NamedTuple):
  """What every kernel of a call shares."""

  heads: int  # M, kv heads
  group: int  # G, query heads of each
  width: int  # H

  @classmethod
  def of(cls, q: jax.Array, kv_heads: int) -> 'Shape':
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
  """Attention f32 [B T N H], and the log of its softmax sums f32 [B T N]."""
  b, t, n, _ = q.shape
  shape = Shape.of(q, k.shape[2])
  config = launch.config(CONFIGS, q.dtype, implementation)
  tokens = shape.tokens(config)
  return launch.call(
      forward_kernel,
      q,
      k,
      v,
      starts(positions, tokens),
      launch.size(t),
      out=(spec(q.shape), spec((b, t, n))),
      grid=(t // tokens, shape.heads, b),
      config=config,
      implementation=implementation,
      TOKENS=tokens,
      **shape.constants(),
  )


def paged(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    implementation: str,
) -> jax.Array:
  """See `attention.paged_attention`."""
  b, tokens = positions.shape
  shape = Shape.of(q, k_pages.shape[1])
  config = launch.config(CONFIGS, q.dtype, implementation)
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
      paged_split_kernel,
      q,
      k_pages,
      v_pages,
      # A row that is not used may name pages that there are not.
      jnp.clip(table.astype(jnp.int32), 0, k_pages.shape[0] - 1),
      positions,
      launch.size(table.shape[1]),
      out=(spec(state), spec(state), spec((*state, shape.width))),
      grid=(splits, shape.heads, b),
      config=config,
      implementation=implementation,
      Q=tokens,
      PAGE=contract.KEY_BLOCK,
      **shape.constants(),
  )
  (out,) = launch.call(
      paged_merge_kernel,
      positions,
      *partial,
      launch.size(splits),
      out=(spec(q.shape),),
      grid=(shape.heads, b),
      config=launch.config(MERGE_CONFIGS, q.dtype, implementation),
      implementation=implementation,
      Q=tokens,
      ROWS=_power_of_two(rows),
      SPLIT=size,
      **shape.constants(),
  )
  return out
