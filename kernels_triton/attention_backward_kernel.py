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
    H: tl.constexpr,
    BH: tl.constexpr,
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
  d = tl.arange(0, BH)
  token = first + r // G
  live = r < TOKENS * G
  row = (b * tokens_per_row + token) * (M * G) + m * G + r % G
  x = kernel.load_rows(q, row, live, d, H)
  gx = kernel.load_rows(g, row, live, d, H)
  norm = tl.load(lse + row, mask=live, other=0.0)
  dx = tl.sum(gx * kernel.load_rows(out, row, live, d, H), 1)
  tl.store(delta + row, dx, mask=live)
  gx = gx.to(x.dtype)
  acc = tl.zeros((ROWS, BH), tl.float32)
  for j in range(start, end, KEYS):
    key = j + tl.arange(0, KEYS)
    at = (b * tokens_per_row + key) * M + m
    kj = kernel.load_rows(k, at, key < end, d, H)
    vj = kernel.load_rows(v, at, key < end, d, H)
    s = tl.dot(x, tl.trans(kj), input_precision='ieee')
    seen = (key[None, :] <= token[:, None]) & live[:, None]
    p = tl.where(seen, tl.exp(s - norm[:, None]), 0.0)
    ds = p * (tl.dot(gx, tl.trans(vj), input_precision='ieee') - dx[:, None])
    acc = tl.dot(ds.to(kj.dtype), kj, acc, input_precision='ieee')
  kernel.store_rows(dq, row, live, d, acc, H)


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
    H: tl.constexpr,
    BH: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
  """dk and dv of one block of keys of one kv head, all its G query heads.

  ends i32 [B blocks]: the tile after the last one that sees the block.
  """
  tokens_per_row = tl.load(length)
  block = tl.program_id(0)
  m = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  r = tl.arange(0, ROWS)
  d = tl.arange(0, BH)
  key = block * KEYS + tl.arange(0, KEYS)
  inside = key < tokens_per_row
  at = (b * tokens_per_row + key) * M + m
  kj = kernel.load_rows(k, at, inside, d, H)
  vj = kernel.load_rows(v, at, inside, d, H)
  acc_k = tl.zeros((KEYS, BH), tl.float32)
  acc_v = tl.zeros((KEYS, BH), tl.float32)
  end = tl.load(ends + b * tl.num_programs(0) + block)
  for tile in range(block * KEYS // TOKENS, end):
    start = tl.load(starts + b * (tokens_per_row // TOKENS) + tile)
    token = tile * TOKENS + r // G
    live = r < TOKENS * G
    row = (b * tokens_per_row + token) * (M * G) + m * G + r % G
    x = kernel.load_rows(q, row, live, d, H)
    gx = kernel.load_rows(g, row, live, d, H).to(x.dtype)
    norm = tl.load(lse + row, mask=live, other=0.0)
    dx = tl.load(delta + row, mask=live, other=0.0)
    s = tl.dot(kj, tl.trans(x), input_precision='ieee')
    seen = (key[:, None] >= start) & (key[:, None] <= token[None, :])
    seen = seen & live[None, :]
    p = tl.where(seen, tl.exp(s - norm[None, :]), 0.0)
    acc_v = tl.dot(p.to(x.dtype), gx, acc_v, input_precision='ieee')
    ds = p * (tl.dot(vj, tl.trans(gx), input_precision='ieee') - dx[None, :])
    acc_k = tl.dot(ds.to(x.dtype), x, acc_k, input_precision='ieee')
  kernel.store_rows(dk, at, inside, d, acc_k, H)
  kernel.store_rows(dv, at, inside, d, acc_v, H)


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
  shape = kernel.Shape.of(q, k.shape[2])
  config = launch.config(QUERY_CONFIGS, q.dtype, implementation)
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
  config = launch.config(KEY_CONFIGS, q.dtype, implementation)
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
      grid=(blocks, shape.heads, b),
      config=config,
      implementation=implementation,
      TOKENS=tokens,
      **shape.constants(),
  )
  return dq, dk, dv
