"""Sparse steps between two versions of 2-byte floats, on the device.

A word's key is its rank in total order, where one ulp is one step whatever the
sign; a change is the distance of two keys modulo 2**16. So -0.0, infinities
and NaN payloads travel like any other bits, and the steps of versions in a row
add up. Counting comes first: its result sizes the arrays of `compact`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_triton import launch

TILE = 4096  # words per count
_MOST = 2**32 - 1  # words that a 32-bit index can tell apart


class Steps(NamedTuple):
  """Changes in ascending order; unused room holds the index `n` of no word."""

  where: jax.Array  # u32 [room]
  step: jax.Array  # u16 [room], modulo 2**16


def _check(*words: jax.Array) -> int:
  for w in words:
    if w.dtype != jnp.uint16 or w.ndim != 1 or w.shape != words[0].shape:
      raise ValueError(
          f'words {w.dtype}{list(w.shape)}: must be uint16 of one flat shape;'
          ' use lax.bitcast_convert_type'
      )
  if words[0].size > _MOST:
    raise ValueError(f'{words[0].size} words: at most {_MOST}; split them')
  return words[0].size


def _to_key(words: jax.Array) -> jax.Array:
  return words ^ jnp.where(words >= 0x8000, 0xFFFF, 0x8000).astype(jnp.uint16)


def _from_key(keys: jax.Array) -> jax.Array:
  return keys ^ jnp.where(keys >= 0x8000, 0x8000, 0xFFFF).astype(jnp.uint16)


def _call(kernel, *args, out, tiles, implementation):
  from kernels_triton import delta_kernel  # needs triton

  return launch.call(
      getattr(delta_kernel, kernel),
      *args,
      out=out,
      grid=(tiles,),
      config=launch.config(delta_kernel.CONFIGS, jnp.uint16, implementation),
      implementation=implementation,
  )


def _u32(*values) -> jax.Array:
  return jnp.array(values, jnp.uint32)


def count(
    old: jax.Array, new: jax.Array, *, implementation: str | None = None
) -> jax.Array:
  """Number of words that differ, per tile of TILE words.

  Args:
    old: uint16 [n].
    new: uint16 [n].
    implementation: see `launch`.

  Returns:
    i32 [ceil(n / TILE)].
  """
  n = _check(old, new)
  tiles = -(-n // TILE)
  name = launch.resolve(implementation)
  if name == launch.REFERENCE:
    changed = jnp.pad(old != new, (0, tiles * TILE - n))
    return jnp.sum(changed.reshape(tiles, TILE), axis=1, dtype=jnp.int32)
  out = (jax.ShapeDtypeStruct((tiles,), jnp.int32),)
  return _call(
      'count_kernel',
      old,
      new,
      _u32(n),
      out=out,
      tiles=tiles,
      implementation=name,
  )[0]


def compact(
    old: jax.Array,
    new: jax.Array,
    counts: jax.Array,
    *,
    room: int,
    implementation: str | None = None,
) -> Steps:
  """The steps that lead from old to new.

  Args:
    old: uint16 [n].
    new: uint16 [n].
    counts: from `count`.
    room: how many changes the result can hold, at least their number; what
      does not fit is lost. Few different sizes mean few compilations.
    implementation: see `launch`.
  """
  n = _check(old, new)
  name = launch.resolve(implementation)
  if name == launch.REFERENCE:
    (where,) = jnp.nonzero(old != new, size=room, fill_value=n)
    a, b = (w.at[where].get(mode='clip') for w in (old, new))
    step = _to_key(b) - _to_key(a)
    used = where < n
    return Steps(where.astype(jnp.uint32), jnp.where(used, step, 0))
  ends = jnp.cumsum(counts, dtype=jnp.uint32)
  where, step = _call(
      'compact_kernel',
      old,
      new,
      ends - counts.astype(jnp.uint32),
      _u32(n),
      _u32(room),
      out=(
          jax.ShapeDtypeStruct((room,), jnp.uint32),
          jax.ShapeDtypeStruct((room,), jnp.uint16),
      ),
      tiles=counts.size,
      implementation=name,
  )
  used = jnp.arange(room, dtype=jnp.uint32) < ends[-1]
  return Steps(jnp.where(used, where, jnp.uint32(n)), jnp.where(used, step, 0))


def apply(
    words: jax.Array, steps: Steps, *, implementation: str | None = None
) -> jax.Array:
  """Inverse of `compact`: the words after the steps.

  Args:
    words: uint16 [n].
    steps: indices ascending and distinct; those >= n are left out.
    implementation: see `launch`.

  Returns:
    uint16 [n], in a fresh array.
  """
  n = _check(words)
  name = launch.resolve(implementation)
  if name == launch.REFERENCE:
    # Indices stay distinct, also those of no word.
    spare = n + jnp.arange(steps.where.size, dtype=jnp.uint32)
    where = jnp.where(steps.where < n, steps.where, spare)
    keys = _to_key(words.at[where].get(mode='clip')) + steps.step
    return words.at[where].set(
        _from_key(keys), mode='drop', unique_indices=True
    )
  tiles = -(-n // TILE)
  bounds = jnp.arange(tiles + 1, dtype=jnp.uint32) * TILE
  bounds = jnp.minimum(bounds, jnp.uint32(n))  # the unused room comes last
  return _call(
      'apply_kernel',
      words,
      steps.where,
      steps.step,
      jnp.searchsorted(steps.where, bounds).astype(jnp.uint32),
      _u32(n),
      out=(jax.ShapeDtypeStruct((n,), jnp.uint16),),
      tiles=tiles,
      implementation=name,
  )[0]
