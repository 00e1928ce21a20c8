"""Attention to the pages of a cache on a GPU; see `attention_kernel`."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels_triton import attention_kernel as kernel
from kernels_triton import contract
from kernels_triton import launch

_MASKED = tl.constexpr(-1e30)

MERGE_CONFIGS = {
    (dtype, 90): launch.Config({}, warps=4, stages=1)
    for dtype in ('float32', 'bfloat16')
}
WIDE_MERGE_CONFIGS = {('bfloat16', 90): launch.Config({}, warps=8, stages=1)}


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
    SHARE: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
  """Softmax state of one split of one sequence and kv head.

  q [B Q N V+W], k_pages [P M/SHARE PAGE V+W], v_pages [P M/SHARE PAGE STRIDE],
  table i32 [B S/PAGE], positions i32 [B Q], pages_per_row i32 [1]; peaks and
  totals [B M splits Q*G], accs [B M splits Q*G V]. A split past the last
  position is neither written nor, by the merge, read.
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
    d = tl.arange(0, BV)
    tail = tl.arange(0, BW)
    row = (b * Q + r // G) * (M * G) + m * G + r % G
    x = kernel.load_rows(q, row, live, d, V, V + W)
    x_tail = x
    if W > 0:
      x_tail = kernel.load_rows(q + V, row, live, tail, W, V + W)
    peak = tl.full((ROWS,), _MASKED, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BV), tl.float32)
    for j in range(first, tl.minimum(first + SPLIT, last + 1), KEYS):
      key = j + tl.arange(0, KEYS)
      inside = key <= last
      page = tl.load(table + b * pages + key // PAGE, mask=inside, other=0)
      at = page.to(tl.int64) * (M // SHARE) + m // SHARE
      at = at * PAGE + key % PAGE
      kj = kernel.load_rows(k_pages, at, inside, d, V, V + W)
      kj_tail = kj
      if W > 0:
        kj_tail = kernel.load_rows(k_pages + V, at, inside, tail, W, V + W)
      peak, total, acc = kernel.block(
          x,
          x_tail,
          kj,
          kj_tail,
          kernel.load_rows(v_pages, at, inside, d, V, STRIDE),
          key[None, :] <= token[:, None],
          peak,
          total,
          acc,
          W,
      )
    state = ((b * M + m) * tl.num_programs(0) + split) * (Q * G) + r
    tl.store(peaks + state, peak, mask=live)
    tl.store(totals + state, total, mask=live)
    kernel.store_rows(accs, state, live, d, acc, V, V)


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
    SHARE: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
):
  """out [B Q N V] from the splits of one sequence and kv head, ascending."""
  splits = tl.load(splits_per_row)
  m = tl.program_id(0)
  b = tl.program_id(1).to(tl.int64)
  r = tl.arange(0, ROWS)
  d = tl.arange(0, BV)
  live = r < Q * G
  last = tl.max(tl.load(positions + b * Q + r // G, mask=live, other=0), 0)
  peak = tl.full((ROWS,), _MASKED, tl.float32)
  total = tl.zeros((ROWS,), tl.float32)
  acc = tl.zeros((ROWS, BV), tl.float32)
  for s in range(0, last // SPLIT + 1):
    state = ((b * M + m) * splits + s) * (Q * G) + r
    peak, total, acc = kernel.merge(
        peak,
        total,
        acc,
        tl.load(peaks + state, mask=live, other=0.0),
        tl.load(totals + state, mask=live, other=1.0),
        kernel.load_rows(accs, state, live, d, V, V),
    )
  row = (b * Q + r // G) * (M * G) + m * G + r % G
  kernel.store_rows(out, row, live, d, acc / total[:, None], V, V)


def paged(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    width: int,
    implementation: str,
) -> jax.Array:
  """See `attention.paged_attention`."""
  b, tokens = positions.shape
  tables = kernel.CONFIGS, kernel.WIDE_CONFIGS
  shape, config = kernel.Shape.of(
      q, k_pages.shape[1], width, tables, implementation
  )
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
      out=(
          kernel.spec(state),
          kernel.spec(state),
          kernel.spec((*state, width)),
      ),
      grid=(splits, shape.heads, b),
      config=config,
      implementation=implementation,
      Q=tokens,
      STRIDE=v_pages.shape[3],
      PAGE=contract.KEY_BLOCK,
      **shape.constants(),
  )
  merges = WIDE_MERGE_CONFIGS if shape.wide else MERGE_CONFIGS
  (out,) = launch.call(
      paged_merge_kernel,
      positions,
      *partial,
      launch.size(splits),
      out=(kernel.spec((*q.shape[:-1], width)),),
      grid=(shape.heads, b),
      config=launch.config(merges, q.dtype, implementation),
      implementation=implementation,
      Q=tokens,
      ROWS=triton.next_power_of_2(rows),
      SPLIT=size,
      **shape.constants(),
  )
  return out
