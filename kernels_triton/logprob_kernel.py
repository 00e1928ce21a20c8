"""Log-prob and entropy over a large vocabulary, block by block, on a GPU.

`tiles` multiplies one block of rows with one block of the vocabulary and keeps
four numbers per row of the product; `merge` adds them up over the blocks in
ascending order. The blocks are of a fixed size, so a row's bits depend on
nothing but the row. Decode runs the same `tiles` and keeps the logits too.
The backward recomputes the logits of a chunk of the vocabulary (`errors`);
its two products are plain matmuls.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels_triton import launch

_MASKED = tl.constexpr(-1e30)


def _config(rows: int, cols: int, depth: int, warps: int, stages: int):
  """Tiles of rows x columns of the vocabulary, depth at a time."""
  tiles = {'ROWS': rows, 'COLS': cols, 'DEPTH': depth}
  return launch.Config(tiles, warps, stages)


CONFIGS = {
    ('float32', 90): _config(64, 64, 32, warps=4, stages=2),
    ('bfloat16', 90): _config(128, 128, 64, warps=8, stages=3),
}
MERGE_CONFIGS = {('float32', 90): launch.Config({'ROWS': 128}, 4, 1)}


@triton.jit
def _logits(
    x,
    w,
    rows,
    cols,
    live_rows,
    live_cols,
    D: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
  """x [n D] @ w [D V] for a tile, f32 [ROWS COLS]; the one place it is done."""
  acc = tl.zeros((ROWS, COLS), tl.float32)
  x_at = rows.to(tl.int64)[:, None] * D
  for start in range(0, D, DEPTH):
    k = start + tl.arange(0, DEPTH)
    a = tl.load(
        x + x_at + k[None, :],
        mask=live_rows[:, None] & (k < D)[None, :],
        other=0.0,
    )
    b = tl.load(
        w + k.to(tl.int64)[:, None] * V + cols[None, :],
        mask=(k < D)[:, None] & live_cols[None, :],
        other=0.0,
    )
    acc = tl.dot(a, b, acc, input_precision='ieee')
  return acc


@triton.jit
def tiles_kernel(
    x,
    w,
    targets,
    count,
    parts,
    logits,
    KEEP: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
  """parts f32 [blocks 4 n]: max, sum e, sum e * (s - max), target logit.

  x [n D], w [D V], targets i32 [n], count i32 [1]: n; e = exp(s - max). Logits
  f32 [n V] are written if KEEP.
  """
  n = tl.load(count)
  rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
  block = tl.program_id(1)
  cols = block * COLS + tl.arange(0, COLS)
  live = rows < n
  known = cols < V
  s = _logits(x, w, rows, cols, live, known, D, V, ROWS, COLS, DEPTH)
  s = tl.where(known[None, :], s, _MASKED)
  peak = tl.max(s, 1)
  e = tl.where(known[None, :], tl.exp(s - peak[:, None]), 0.0)
  target = tl.load(targets + rows, mask=live, other=0)
  hit = tl.sum(tl.where(cols[None, :] == target[:, None], s, 0.0), 1)
  at = parts + block.to(tl.int64) * 4 * n + rows
  tl.store(at, peak, mask=live)
  tl.store(at + n, tl.sum(e, 1), mask=live)
  tl.store(at + 2 * n, tl.sum(e * (s - peak[:, None]), 1), mask=live)
  tl.store(at + 3 * n, hit, mask=live)
  if KEEP:
    to = logits + rows.to(tl.int64)[:, None] * V + cols[None, :]
    tl.store(to, s, mask=live[:, None] & known[None, :])


@triton.jit
def merge_kernel(
    parts,
    count,
    lse,
    entropy,
    hit,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
):
  """lse, entropy and target logit f32 [n] from parts, blocks ascending."""
  n = tl.load(count).to(tl.int64)
  rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
  live = rows < n
  peak = tl.full((ROWS,), _MASKED, tl.float32)
  total = tl.zeros((ROWS,), tl.float32)
  spread = tl.zeros((ROWS,), tl.float32)  # sum of e * (s - peak), never > 0
  logit = tl.zeros((ROWS,), tl.float32)
  for block in range(0, BLOCKS):
    at = parts + block * 4 * n + rows
    peak_b = tl.load(at, mask=live, other=0.0)
    total_b = tl.load(at + n, mask=live, other=1.0)
    spread_b = tl.load(at + 2 * n, mask=live, other=0.0)
    logit += tl.load(at + 3 * n, mask=live, other=0.0)
    new = tl.maximum(peak, peak_b)
    a = tl.exp(peak - new)
    b = tl.exp(peak_b - new)
    spread = a * (spread + total * (peak - new)) + b * (
        spread_b + total_b * (peak_b - new)
    )
    total = total * a + total_b * b
    peak = new
  tl.store(lse + rows, peak + tl.log(total), mask=live)
  tl.store(entropy + rows, tl.log(total) - spread / total, mask=live)
  tl.store(hit + rows, logit, mask=live)


@triton.jit
def errors_kernel(
    x,
    w,
    targets,
    lse,
    g,
    count,
    chunk,
    out,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
  """out [n WIDTH]: (onehot - softmax) * g of a chunk of the vocabulary.

  g f32 [n]: cotangent of the log-prob. chunk i32 [1]: its number; it starts at
  a multiple of CHUNK columns and has WIDTH of them.
  """
  n = tl.load(count)
  rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
  inner = tl.program_id(1) * COLS + tl.arange(0, COLS)
  cols = tl.load(chunk) * CHUNK + inner
  live = rows < n
  known = inner < WIDTH
  s = _logits(x, w, rows, cols, live, known, D, V, ROWS, COLS, DEPTH)
  norm = tl.load(lse + rows, mask=live, other=0.0)
  weight = tl.load(g + rows, mask=live, other=0.0)
  target = tl.load(targets + rows, mask=live, other=0)
  right = (cols[None, :] == target[:, None]).to(tl.float32)
  d = (right - tl.exp(s - norm[:, None])) * weight[:, None]
  to = out + rows.to(tl.int64)[:, None] * WIDTH + inner[None, :]
  tl.store(to, d.to(out.dtype.element_ty), mask=live[:, None] & known[None, :])


def _spec(shape, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(tuple(shape), dtype)


def statistics(
    normed: jax.Array,
    unembed: jax.Array,
    targets: jax.Array,
    implementation: str,
    keep: bool = False,
) -> tuple[jax.Array, ...]:
  """Logsumexp, entropy and target logit of every row of normed @ unembed.

  Args:
    normed: [n D].
    unembed: [D V], of the same type.
    targets: i32 [n].
    implementation: see `launch`.
    keep: also return the logits.

  Returns:
    Three f32 [n], and f32 [n V] (or [1 1] of no meaning).
  """
  n, depth = normed.shape
  vocab = unembed.shape[1]
  config = launch.config(CONFIGS, normed.dtype, implementation)
  blocks = -(-vocab // config.tiles['COLS'])
  parts, logits = launch.call(
      tiles_kernel,
      normed,
      unembed,
      targets,
      launch.size(n),
      out=(_spec((blocks, 4, n)), _spec((n, vocab) if keep else (1, 1))),
      grid=(-(-n // config.tiles['ROWS']), blocks),
      config=config,
      implementation=implementation,
      KEEP=keep,
      D=depth,
      V=vocab,
  )
  config = launch.config(MERGE_CONFIGS, jnp.float32, implementation)
  merged = launch.call(
      merge_kernel,
      parts,
      launch.size(n),
      out=(_spec((n,)),) * 3,
      grid=(-(-n // config.tiles['ROWS']),),
      config=config,
      implementation=implementation,
      BLOCKS=blocks,
  )
  return *merged, logits


def errors(
    normed: jax.Array,
    unembed: jax.Array,
    targets: jax.Array,
    lse: jax.Array,
    g: jax.Array,
    chunk: int,
    columns: int,
    implementation: str,
) -> jax.Array:
  """(onehot - softmax) * g for the chunk-th `columns` of the vocabulary."""
  n, depth = normed.shape
  vocab = unembed.shape[1]
  config = launch.config(CONFIGS, normed.dtype, implementation)
  width = min(columns, vocab - chunk * columns)
  (out,) = launch.call(
      errors_kernel,
      normed,
      unembed,
      targets,
      lse,
      g,
      launch.size(n),
      launch.size(chunk),  # an operand: all chunks but the last share a program
      out=(_spec((n, width), normed.dtype),),
      grid=(-(-n // config.tiles['ROWS']), -(-width // config.tiles['COLS'])),
      config=config,
      implementation=implementation,
      CHUNK=columns,
      WIDTH=width,
      D=depth,
      V=vocab,
  )
  return out
