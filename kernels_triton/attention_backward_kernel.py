"""Backward of segment attention on a GPU, from recomputed scores.

One program owns a tile of dq, another a block of dk and dv with all G heads of
its kv head. Each sums in ascending order, so a run repeats its bits.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels_triton import attention_kernel as kernel
from kernels_triton import launch

QUERY_CONFIGS = {
    ('float32', 90): launch.Config({'ROWS': 16, 'KEYS': 16}, 4, 1),
    ('bfloat16', 90): launch.Config({'ROWS': 128, 'KEYS': 64}, 8, 2),
}
KEY_CONFIGS = {
    ('float32', 90): launch.Config({'ROWS': 16, 'KEYS': 16}, 4, 1),
    ('bfloat16', 90): launch.Config({'ROWS': 64, 'KEYS': 64}, 8, 2),
}
WIDE_QUERY_CONFIGS = {
    ('bfloat16', 90): launch.Config({'ROWS': 32, 'KEYS': 32}, 8, 1),
}
WIDE_KEY_CONFIGS = {
    ('bfloat16', 90): launch.Config({'ROWS': 16, 'KEYS': 16}, 8, 1),
}


@triton.jit
def backward_q_kernel(
    q,
    k,
    v,
    out,
    lse,
    g,
    starts,
    length,
    dq,
    delta,
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
):
  """dq of one tile, and delta [B T N]: the sum over H of g * out."""
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
  x = kernel.load_rows(q, row, live, d, V, V + W)
  x_tail = x
  if W > 0:
    x_tail = kernel.load_rows(q + V, row, live, tail, W, V + W)
  gx = kernel.load_rows(g, row, live, d, V, V)
  norm = tl.load(lse + row, mask=live, other=0.0)
  dx = tl.sum(gx * kernel.load_rows(out, row, live, d, V, V), 1)
  tl.store(delta + row, dx, mask=live)
  gx = gx.to(x.dtype)
  acc = tl.zeros((ROWS, BV), tl.float32)
  acc_tail = tl.zeros((ROWS, BW), tl.float32)
  for j in range(start, end, KEYS):
    key = j + tl.arange(0, KEYS)
    at = (b * tokens_per_row + key) * (M // SHARE) + m // SHARE
    kj = kernel.load_rows(k, at, key < end, d, V, V + W)
    kj_tail = kj
    if W > 0:
      kj_tail = kernel.load_rows(k + V, at, key < end, tail, W, V + W)
    vj = kernel.load_rows(v, at, key < end, d, V, V)
    s = kernel.scores(x, x_tail, kj, kj_tail, W)
    seen = (key[None, :] <= token[:, None]) & live[:, None]
    p = tl.where(seen, tl.exp(s - norm[:, None]), 0.0)
    ds = p * (tl.dot(gx, tl.trans(vj), input_precision='ieee') - dx[:, None])
    ds = ds.to(kj.dtype)
    acc = tl.dot(ds, kj, acc, input_precision='ieee')
    if W > 0:
      acc_tail = tl.dot(ds, kj_tail, acc_tail, input_precision='ieee')
  kernel.store_rows(dq, row, live, d, acc, V, V + W)
  if W > 0:
    kernel.store_rows(dq + V, row, live, tail, acc_tail, W, V + W)


@triton.jit
def backward_kv_kernel(
    q,
    k,
    v,
    lse,
    delta,
    g,
    starts,
    ends,
    length,
    dk,
    dv,
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
):
  """dk and dv of one block of keys of one kv head, all its query heads.

  ends i32 [B blocks]: the tile after the last one that sees the block.
  """
  tokens_per_row = tl.load(length)
  keys = tl.program_id(0)
  m = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  r = tl.arange(0, ROWS)
  d = tl.arange(0, BV)
  tail = tl.arange(0, BW)
  key = keys * KEYS + tl.arange(0, KEYS)
  inside = key < tokens_per_row
  at = (b * tokens_per_row + key) * (M // SHARE) + m
  kj = kernel.load_rows(k, at, inside, d, V, V + W)
  kj_tail = kj
  if W > 0:
    kj_tail = kernel.load_rows(k + V, at, inside, tail, W, V + W)
  vj = kernel.load_rows(v, at, inside, d, V, V)
  acc_k = tl.zeros((KEYS, BV), tl.float32)
  acc_tail = tl.zeros((KEYS, BW), tl.float32)
  acc_v = tl.zeros((KEYS, BV), tl.float32)
  end = tl.load(ends + b * tl.num_programs(0) + keys)
  for tile in range(keys * KEYS // TOKENS, end):
    start = tl.load(starts + b * (tokens_per_row // TOKENS) + tile)
    token = tile * TOKENS + r // G
    live = r < TOKENS * G
    seen = (key[:, None] >= start) & (key[:, None] <= token[None, :])
    seen = seen & live[None, :]
    for part in range(SHARE):
      head = (m * SHARE + part) * G + r % G
      row = (b * tokens_per_row + token) * (M * G) + head
      x = kernel.load_rows(q, row, live, d, V, V + W)
      x_tail = x
      if W > 0:
        x_tail = kernel.load_rows(q + V, row, live, tail, W, V + W)
      gx = kernel.load_rows(g, row, live, d, V, V).to(x.dtype)
      norm = tl.load(lse + row, mask=live, other=0.0)
      dx = tl.load(delta + row, mask=live, other=0.0)
      s = kernel.scores(kj, kj_tail, x, x_tail, W)
      p = tl.where(seen, tl.exp(s - norm[None, :]), 0.0)
      acc_v = tl.dot(p.to(x.dtype), gx, acc_v, input_precision='ieee')
      ds = tl.dot(vj, tl.trans(gx), input_precision='ieee') - dx[None, :]
      ds = (p * ds).to(x.dtype)
      acc_k = tl.dot(ds, x, acc_k, input_precision='ieee')
      if W > 0:
        acc_tail = tl.dot(ds, x_tail, acc_tail, input_precision='ieee')
  kernel.store_rows(dk, at, inside, d, acc_k, V, V + W)
  if W > 0:
    kernel.store_rows(dk + V, at, inside, tail, acc_tail, W, V + W)
  kernel.store_rows(dv, at, inside, d, acc_v, V, V)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    g: jax.Array,
    implementation: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Cotangents of q, k and v; out and lse are from `forward`, g of out."""
  b, t, _, _ = q.shape
  heads, width = k.shape[2], v.shape[3]
  tables = QUERY_CONFIGS, WIDE_QUERY_CONFIGS
  shape, config = kernel.Shape.of(q, heads, width, tables, implementation)
  tokens = shape.tokens(config)
  dq, delta = launch.call(
      backward_q_kernel,
      q,
      k,
      v,
      out,
      lse,
      g,
      kernel.starts(positions, tokens),
      launch.size(t),
      out=(kernel.spec(q.shape, q.dtype), kernel.spec(lse.shape)),
      grid=(t // tokens, shape.heads, b),
      config=config,
      implementation=implementation,
      TOKENS=tokens,
      **shape.constants(),
  )
  tables = KEY_CONFIGS, WIDE_KEY_CONFIGS
  shape, config = kernel.Shape.of(q, heads, width, tables, implementation)
  tokens = shape.tokens(config)
  starts = kernel.starts(positions, tokens)
  keys = config.tiles['KEYS']
  blocks = -(-t // keys)
  # Tiles that start before the block ends: starts do not decrease.
  after = jnp.arange(1, blocks + 1, dtype=jnp.int32) * keys
  ends = jax.vmap(lambda s: jnp.searchsorted(s, after))(starts)
  dk, dv = launch.call(
      backward_kv_kernel,
      q,
      k,
      v,
      lse,
      delta,
      g,
      starts,
      ends.astype(jnp.int32),
      launch.size(t),
      out=(kernel.spec(k.shape, k.dtype), kernel.spec(v.shape, v.dtype)),
      grid=(blocks, heads, b),
      config=config,
      implementation=implementation,
      TOKENS=tokens,
      **shape.constants(),
  )
  return dq, dk, dv
