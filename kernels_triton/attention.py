"""Causal segment attention and its paged twin, with the same bits.

Both call one tile: QUERY_ROWS query tokens (times the query heads of one
key-value head) against key blocks of KEY_BLOCK keys in ascending order; a page
of the cache is one such block, wherever it lies. The softmax is two-pass: the
maximum over every score, then exp(s - max) @ [v | 1] summed block by block, one
division at the end. Nothing is rescaled, so a wholly masked block adds exact
zeros and may be skipped or not without changing a bit; that is what makes
packed rows, short caches and long caches agree. Segments must start at
multiples of KEY_BLOCK, or the blocks of the two roles would cut the keys in
different places. The Triton kernels have an invariant of their own, see
`attention_kernel`.
"""

from collections.abc import Callable
import functools

import jax
from jax import lax
import jax.numpy as jnp

from kernels_triton import contract
from kernels_triton import gradients
from kernels_triton import heads
from kernels_triton import launch

_MASKED = -1e30
_GROUP = 16  # query tiles of a prefill that run together; leaves the bits
_ONES = 8  # columns of ones next to v: their product is the softmax sum


def _block(x: jax.Array, start, size: int, axis: int) -> jax.Array:
  return lax.dynamic_slice_in_dim(x, start, size, axis)


def _add_block(x: jax.Array, value: jax.Array, start, axis: int) -> jax.Array:
  size = value.shape[axis]
  total = _block(x, start, size, axis) + value
  return lax.dynamic_update_slice_in_dim(x, total, start, axis)


def _nt(a: jax.Array, b: jax.Array) -> jax.Array:
  """a [.. m d] times b [.. n d] transposed."""
  return jnp.einsum('bkmd,bknd->bkmn', a, b)


def _tile(
    q: jax.Array,
    keys: Callable[[jax.Array], jax.Array],
    values: Callable[[jax.Array], jax.Array],
    length: int,
    width: int,
    blocks,
    visible: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """One query tile on key blocks [0, blocks).

  Args:
    q: [B M R H], scaled.
    keys: number of a block -> its keys f32 [B M KEY_BLOCK H].
    values: the same for its values and ones, f32 [B M KEY_BLOCK V+_ONES].
    length: most keys there can be, a multiple of KEY_BLOCK.
    width: V, of a value.
    blocks: i32 [], how many key blocks to visit.
    visible: start of a block -> bool broadcastable to [B M R KEY_BLOCK].

  Returns:
    (out [B M R V], max [B M R 1], sum [B M R 1]), f32.
  """
  size = contract.KEY_BLOCK
  # The barriers, here and below, keep the products apart from what surrounds
  # them: fused with it, their code would depend on the caller, and so the bits.
  q = lax.optimization_barrier(q)

  # First all scores and their maximum, which is exact in any order; a wholly
  # masked block leaves it alone, visited or not.
  def score(j, carry):
    scores, peak = carry
    start = j * size
    s = _nt(q, keys(j))
    s = lax.optimization_barrier(jnp.where(visible(start), s, _MASKED))
    scores = lax.dynamic_update_slice_in_dim(scores, s, start, 3)
    return scores, jnp.maximum(peak, jnp.max(s, axis=-1, keepdims=True))

  scores = jnp.zeros((*q.shape[:3], length), jnp.float32)
  peak = jnp.full((*q.shape[:3], 1), _MASKED, jnp.float32)
  scores, peak = lax.fori_loop(0, blocks, score, (scores, peak))

  # Then the sums, block after block in ascending order. The maximum is final:
  # nothing is rescaled, and a masked key adds exp(_MASKED - peak), which is 0.
  # The ones next to v make the denominator a column of the same product, so it
  # is summed in the same order.
  def accumulate(j, out):
    start = j * size
    e = jnp.exp(_block(scores, start, size, 3) - peak)
    part = jnp.einsum('bkms,bksd->bkmd', lax.optimization_barrier(e), values(j))
    return out + lax.optimization_barrier(part)

  out = jnp.zeros((*q.shape[:3], width + _ONES), jnp.float32)
  out = lax.fori_loop(0, blocks, accumulate, out)
  total = out[..., width : width + 1]
  return out[..., :width] / total, peak, total


def _with_ones(values):
  ones = jnp.ones((*values.shape[:-1], _ONES), values.dtype)
  return jnp.concatenate([values, ones], axis=-1)


def _visible(q_segments, q_positions, k_segments, k_positions):
  """bool [B 1 R S] from [B R] and [B S]."""
  same = q_segments[:, :, None] == k_segments[:, None, :]
  causal = k_positions[:, None, :] <= q_positions[:, :, None]
  return (same & causal)[:, None]


def _forward(q, k, v, segments, positions):
  t, n = q.shape[1], q.shape[2]
  m = k.shape[2]
  g = n // m
  size, keys = contract.QUERY_ROWS, contract.KEY_BLOCK
  residuals = q, k, v
  queries = heads.fold(q.astype(jnp.float32), m)
  k = heads.heads_first(k.astype(jnp.float32))
  width = v.shape[-1]
  v = lax.optimization_barrier(
      _with_ones(heads.heads_first(v.astype(jnp.float32)))
  )

  def tile(i):
    start = i * size
    row_segments = jnp.repeat(_block(segments, start, size, 1), g, axis=1)
    row_positions = jnp.repeat(_block(positions, start, size, 1), g, axis=1)

    def visible(key):
      return _visible(
          row_segments,
          row_positions,
          _block(segments, key, keys, 1),
          _block(positions, key, keys, 1),
      )

    return _tile(
        _block(queries, start * g, size * g, 2),
        lambda j: _block(k, j * keys, keys, 2),
        lambda j: _block(v, j * keys, keys, 2),
        t,
        width,
        (start + size + keys - 1) // keys,
        visible,
    )

  tiles = lax.map(tile, jnp.arange(t // size, dtype=jnp.int32))
  out, peak, total = (
      x.transpose(1, 2, 0, 3, 4).reshape(*queries.shape[:3], -1) for x in tiles
  )
  residuals += out, peak, total, segments, positions
  return heads.unfold(out, n), residuals


@jax.custom_vjp
def _segment_attention(q, k, v, segments, positions):
  return _forward(q, k, v, segments, positions)[0]


def segment_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    positions: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
  """Causal attention within segments of packed rows.

  Args:
    q: [B T N H], already scaled by H^-1/2.
    k: [B T M H].
    v: [B T M V].
    segments: i32 [B T]; tokens see their own segment only. A segment is
      contiguous and starts at a multiple of KEY_BLOCK.
    positions: i32 [B T], within the segment.
    implementation: see `launch`.

  Returns:
    f32 [B T N V]; finite, but of no meaning, where no segment is (0).

  Raises:
    ValueError: T is not a multiple of KEY_BLOCK.
  """
  t = q.shape[1]
  if t % contract.KEY_BLOCK:
    raise ValueError(
        f'rows of {t} tokens: must be a multiple of {contract.KEY_BLOCK}'
    )
  name = launch.resolve(implementation)
  if name == launch.REFERENCE:
    return _segment_attention(q, k, v, segments, positions)
  return _kernel_attention(q, k, v, positions, name)


def _backward(residuals, g):
  *inputs, out, peak, total, segments, positions = residuals
  q, k, v = (x.astype(jnp.float32) for x in inputs)
  t, n = q.shape[1], q.shape[2]
  m = k.shape[2]
  groups = n // m
  q, k, v = heads.fold(q, m), heads.heads_first(k), heads.heads_first(v)
  size = 64 if t % 64 == 0 else contract.KEY_BLOCK
  g = heads.fold(g.astype(jnp.float32), m)
  delta = jnp.sum(g * out, axis=-1, keepdims=True)

  def query_chunk(i, carry):
    dq, dk, dv = carry
    start, count = i * size * groups, size * groups
    qi, gi, peak_i, total_i, delta_i = (
        _block(x, start, count, 2) for x in (q, g, peak, total, delta)
    )
    row_segments, row_positions = (
        jnp.repeat(_block(x, i * size, size, 1), groups, axis=1)
        for x in (segments, positions)
    )

    def key_chunk(j, inner):
      dq_i, dk, dv = inner
      key = j * size
      kj, vj = _block(k, key, size, 2), _block(v, key, size, 2)
      mask = _visible(
          row_segments,
          row_positions,
          _block(segments, key, size, 1),
          _block(positions, key, size, 1),
      )
      s = jnp.where(mask, _nt(qi, kj), _MASKED)
      p = jnp.exp(s - peak_i) / total_i
      ds = p * (_nt(gi, vj) - delta_i)
      dk = _add_block(dk, gradients.of_weights(ds, qi), key, 2)
      dv = _add_block(dv, gradients.of_weights(p, gi), key, 2)
      return dq_i + jnp.einsum('bkms,bksd->bkmd', ds, kj), dk, dv

    dq_i, dk, dv = lax.fori_loop(
        0, i + 1, key_chunk, (jnp.zeros_like(qi), dk, dv)
    )
    return lax.dynamic_update_slice_in_dim(dq, dq_i, start, 2), dk, dv

  dq, dk, dv = lax.fori_loop(
      0, t // size, query_chunk, tuple(jnp.zeros_like(x) for x in (q, k, v))
  )
  grads = heads.unfold(dq, n), heads.heads_first(dk), heads.heads_first(dv)
  grads = (g.astype(x.dtype) for g, x in zip(grads, inputs, strict=True))
  return *grads, None, None


_segment_attention.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _kernel_attention(q, k, v, positions, implementation):
  return _kernel_forward(q, k, v, positions, implementation)[0]


def _kernel_forward(q, k, v, positions, implementation):
  from kernels_triton import attention_kernel  # needs triton

  out, lse = attention_kernel.forward(q, k, v, positions, implementation)
  return out, (q, k, v, positions, out, lse)


def _kernel_backward(implementation, residuals, g):
  from kernels_triton import attention_backward_kernel  # needs triton

  q, k, v, positions, out, lse = residuals
  grads = attention_backward_kernel.backward(
      q, k, v, positions, out, lse, g, implementation
  )
  return *grads, None


_kernel_attention.defvjp(_kernel_forward, _kernel_backward)


def _kernel_paged(*args):
  from kernels_triton import attention_paged_kernel  # needs triton

  return attention_paged_kernel.paged(*args)


def _paged(q, k_pages, v_pages, table, positions, width):
  """One tile per sequence: q [B Q N H], positions [B Q] -> [B Q N V]."""
  keys = contract.KEY_BLOCK
  count, n, m = q.shape[1], q.shape[2], k_pages.shape[1]
  short = [(0, 0), (0, contract.QUERY_ROWS - count), (0, 0), (0, 0)]
  rows = heads.fold(jnp.pad(q.astype(jnp.float32), short), m)
  last = jnp.pad(jnp.maximum(positions, 0), short[:2])
  last = jnp.repeat(last, n // m, axis=1)[:, None, :, None]
  ids = jnp.arange(keys, dtype=jnp.int32)[None, None, None, :]

  def block(pages, columns, j):
    chosen = lax.dynamic_index_in_dim(table, j, 1, keepdims=False)
    found = pages.at[chosen].get(mode='clip')[..., :columns]
    return found.astype(jnp.float32)

  out, _, _ = _tile(
      rows,
      functools.partial(block, k_pages, None),
      lambda j: _with_ones(block(v_pages, width, j)),
      table.shape[1] * keys,
      width,
      jnp.max(last) // keys + 1,
      lambda start: start + ids <= last,
  )
  return heads.unfold(out, n)[:, :count]


@functools.partial(jax.named_call, name='paged_attention')
def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    *,
    width: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
  """Attention of chunks of sequences to their pages, cut into query tiles.

  Args:
    q: [B QUERY_ROWS N H], already scaled; each tile is of one sequence.
    k_pages: [P M KEY_BLOCK H], the keys of the new tokens included.
    v_pages: [P M KEY_BLOCK V]; may be `k_pages`, see `width`.
    table: i32 [B S/KEY_BLOCK], pages of each tile's sequence in order; the
      entries past its last page may be anything.
    positions: i32 [B QUERY_ROWS] in the sequence; below 0 a row is not used.
    width: V, if only the first columns of `v_pages` are values.
    implementation: see `launch`.

  Returns:
    f32 [B QUERY_ROWS N V]; unused rows hold finite numbers.
  """
  name = launch.resolve(implementation)
  width = width or v_pages.shape[-1]
  if name != launch.REFERENCE:
    return _kernel_paged(q, k_pages, v_pages, table, positions, width, name)
  # Tiles next to each other end at similar positions: a group visits only the
  # key blocks that its own tiles need.
  b = q.shape[0]
  size = min(b, _GROUP)

  def split(x):
    pad = [(0, -b % size)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, pad).reshape(-1, size, *x.shape[1:])

  def group(xs):
    q, table, positions = xs
    return _paged(q, k_pages, v_pages, table, positions, width)

  out = lax.map(group, (split(q), split(table), split(positions)))
  return out.reshape(-1, *out.shape[2:])[:b]


@functools.partial(jax.named_call, name='paged_decode_attention')
def paged_decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    *,
    width: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
  """Attention of one new token per sequence to its pages.

  The token is one live row of a full query tile: a smaller tile would compile
  to other instructions than the trainer's.

  Args:
    q: [B N H], already scaled.
    k_pages: [P M KEY_BLOCK H], the new key included.
    v_pages: [P M KEY_BLOCK V]; may be `k_pages`, see `width`.
    table: i32 [B S/KEY_BLOCK], as in `paged_attention`.
    positions: i32 [B], of the new token; below 0 a row is not used.
    width: V, if only the first columns of `v_pages` are values.
    implementation: see `launch`.

  Returns:
    f32 [B N V].
  """
  width = width or v_pages.shape[-1]
  args = q[:, None], k_pages, v_pages, table, positions[:, None], width
  name = launch.resolve(implementation)
  if name == launch.REFERENCE:
    return _paged(*args)[:, 0]
  return _kernel_paged(*args, name)[:, 0]
