"""Triton kernels of the grouped matmul: forward and dX are one, dW is another.

Rows stand in order of their group, without padding; a tile of BM rows belongs
to one group. Products are summed in f32 over ascending blocks of the
contraction, by one program: an element's bits depend on its row and its group's
weights alone.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels_triton import launch

# f32 stays f32 ("ieee"): tf32 would lose 13 bits. 64 rows are the least that
# wgmma takes, and decode has few rows per expert.
CONFIGS = {
    ('float32', 90): launch.Config({'BM': 64, 'BN': 64, 'BK': 32}, 4, 2),
    ('bfloat16', 90): launch.Config({'BM': 64, 'BN': 128, 'BK': 64}, 4, 4),
}
WEIGHT_CONFIGS = {
    ('float32', 90): launch.Config({'BR': 32, 'BI': 64, 'BJ': 64}, 4, 2),
    ('bfloat16', 90): launch.Config({'BR': 64, 'BI': 128, 'BJ': 128}, 8, 3),
}


@triton.jit
def grouped_rows(
    x,
    w,
    tiles,
    y,
    K: tl.constexpr,
    N: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
  """y[r] = x[r] @ w[group of r]; strides say how w [K N] lies in memory."""
  tile = tl.program_id(0)
  group = tl.load(tiles + tile * 3)
  start = tl.load(tiles + tile * 3 + 1)
  end = tl.load(tiles + tile * 3 + 2)
  if group >= 0:
    m = start + tl.arange(0, BM)[:, None]
    n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    rows = m.to(tl.int64)
    weights = w + group.to(tl.int64) * K * N
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
      across = k + tl.arange(0, BK)[None, :]
      down = k + tl.arange(0, BK)[:, None]
      a_mask = (m < end) & (across < K)
      b_mask = (down < K) & (n < N)
      a = tl.load(x + rows * K + across, mask=a_mask, other=0.0)
      b_at = weights + down * STRIDE_K + n * STRIDE_N
      b = tl.load(b_at, mask=b_mask, other=0.0)
      total = tl.dot(a, b, total, input_precision='ieee')
    tl.store(y + rows * N + n, total, mask=(m < end) & (n < N))


@triton.jit
def grouped_weights(
    x,
    dy,
    ends,
    dw,
    K: tl.constexpr,
    N: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
):
  """dw[e] = sum over the rows of e, ascending, of x[r] dy[r]; 0 if none."""
  group = tl.program_id(0)
  start = tl.load(ends + group - 1, mask=group > 0, other=0)
  end = tl.load(ends + group)
  i = tl.program_id(1) * BI + tl.arange(0, BI)
  j = tl.program_id(2) * BJ + tl.arange(0, BJ)[None, :]
  total = tl.zeros((BI, BJ), tl.float32)
  for row in range(start, end, BR):
    r = (row + tl.arange(0, BR))[:, None]
    rows = r.to(tl.int64)
    a_mask = (r < end) & (i[None, :] < K)
    a = tl.load(x + rows * K + i[None, :], mask=a_mask, other=0.0)
    b = tl.load(dy + rows * N + j, mask=(r < end) & (j < N), other=0.0)
    total = tl.dot(tl.trans(a), b, total, input_precision='ieee')
  at = dw + (group.to(tl.int64) * K + i[:, None]) * N + j
  tl.store(at, total, mask=(i[:, None] < K) & (j < N))


def _tiles(sizes, rows, size):
  """i32 [tiles 3]: group or -1, first row, end of the group's rows."""
  ends = jnp.cumsum(sizes)
  counts = -(-sizes // size)
  last = jnp.cumsum(counts)
  # No assignment makes more tiles than this.
  numbers = jnp.arange(min(rows // size + len(sizes), rows), dtype=jnp.int32)
  owners = jnp.sum((last[None, :] <= numbers[:, None]).astype(jnp.int32), 1)
  used = owners < len(sizes)
  owners = jnp.minimum(owners, len(sizes) - 1)
  before = numbers - (last - counts)[owners]
  starts = (ends - sizes)[owners] + before * size
  groups = jnp.where(used, owners, -1)
  return jnp.stack([groups, starts, ends[owners]], axis=1).astype(jnp.int32)


def rows_matmul(x, w, sizes, *, transposed: bool, implementation: str):
  """f32 [n N] of x [n K] and w [E K N], or w [E N K] if transposed."""
  n, k = x.shape
  width = w.shape[1] if transposed else w.shape[2]
  config = launch.config(CONFIGS, x.dtype, implementation)
  tiles = _tiles(sizes, n, config.tiles['BM'])
  (y,) = launch.call(
      grouped_rows,
      x,
      w,
      tiles,
      out=[jax.ShapeDtypeStruct((n, width), jnp.float32)],
      grid=(len(tiles), triton.cdiv(width, config.tiles['BN'])),
      config=config,
      implementation=implementation,
      K=k,
      N=width,
      STRIDE_K=1 if transposed else width,
      STRIDE_N=k if transposed else 1,
  )
  return y


def weights_matmul(x, dy, sizes, *, implementation: str):
  """f32 [E K N] of x [n K] and dy [n N]."""
  k, n = x.shape[1], dy.shape[1]
  config = launch.config(WEIGHT_CONFIGS, x.dtype, implementation)
  groups = len(sizes)
  (dw,) = launch.call(
      grouped_weights,
      x,
      dy,
      jnp.cumsum(sizes).astype(jnp.int32),
      out=[jax.ShapeDtypeStruct((groups, k, n), jnp.float32)],
      grid=(
          groups,
          triton.cdiv(k, config.tiles['BI']),
          triton.cdiv(n, config.tiles['BJ']),
      ),
      config=config,
      implementation=implementation,
      K=k,
      N=n,
  )
  return dw
