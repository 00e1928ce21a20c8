"""Changes of a tile, bucketed by the exponent that the receiver already has.

Whether a weight changes depends on little but its exponent, so each exponent
of the OLD words is a bucket with its own statistics. Within a bucket a change
is its distance from the one before it, counted in words of that bucket, and
its step in total order. `tests.reference_buckets` does the same in plain numpy.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from composer_jax.weights import numba_kernels
from composer_jax.weights import parallel
from composer_jax.weights import ulp_steps

BUCKETS = 256
SHIFT = 7  # bits of a word below its bucket

_jit = numba.njit(nogil=True, cache=True)


class Changes(NamedTuple):
  """What changed between two tiles, bucket after bucket."""

  start: np.ndarray  # i64 [BUCKETS + 1], of a bucket's changes
  gaps: np.ndarray  # u32 [changes], words of the bucket that stayed before it
  steps: np.ndarray  # u16 [changes], modulo 2**16


@_jit
def _collect(old, new, where, buckets, gaps, steps):
  """Changes in the order of the words; returns how many.

  Ranks are counted in four tables, by position modulo 4: one table would
  have every increment wait for the one before.
  """
  seen = np.zeros((4, BUCKETS), np.int64)
  last = np.zeros(BUCKETS, np.int64)
  whole = old.size >> 2
  old_four = old[: whole << 2].view(np.uint64)
  new_four = new[: whole << 2].view(np.uint64)
  changed = 0
  for four in range(whole + 1):
    i = four << 2
    if four < whole and old_four[four] == new_four[four]:
      w = old_four[four]
      seen[0, (w >> np.uint64(7)) & np.uint64(255)] += 1
      seen[1, (w >> np.uint64(23)) & np.uint64(255)] += 1
      seen[2, (w >> np.uint64(39)) & np.uint64(255)] += 1
      seen[3, (w >> np.uint64(55)) & np.uint64(255)] += 1
      continue
    for i in range(four << 2, min((four << 2) + 4, old.size)):
      b = (old[i] >> SHIFT) & 255
      if old[i] != new[i]:
        rank = seen[0, b] + seen[1, b] + seen[2, b] + seen[3, b]
        where[changed] = i
        buckets[changed] = b
        gaps[changed] = rank - last[b]
        steps[changed] = numba_kernels.to_key(new[i]) - numba_kernels.to_key(
            old[i]
        )
        last[b] = rank + 1
        changed += 1
      seen[0, b] += 1
  return changed


@_jit
def _sort(buckets, gaps, steps, start, gap, step):
  """Moves changes to their buckets, in order."""
  start[:] = 0
  for b in buckets:
    start[b + 1] += 1
  for b in range(BUCKETS):
    start[b + 1] += start[b]
  end = start[:BUCKETS].copy()
  for i in range(buckets.size):
    at = end[buckets[i]]
    end[buckets[i]] += 1
    gap[at] = gaps[i]
    step[at] = steps[i]


@_jit
def _apply(out, start, gaps, steps):
  """Steps the words in place; False if some change lies behind the last."""
  never = np.int64(1) << 40
  left = np.empty(BUCKETS, np.int64)  # words of a bucket until its next change
  used = start[:BUCKETS].copy()
  for b in range(BUCKETS):
    left[b] = gaps[start[b]] if start[b] < start[b + 1] else never
  for i in range(out.size):
    b = (out[i] >> SHIFT) & 255
    wait = left[b]
    left[b] = wait - 1
    if wait == 0:
      at = used[b]
      used[b] = at + 1
      out[i] = numba_kernels.from_key(numba_kernels.to_key(out[i]) + steps[at])
      left[b] = gaps[at + 1] if at + 1 < start[b + 1] else never
  for b in range(BUCKETS):
    if used[b] != start[b + 1]:
      return False
  return True


@_jit
def parameter(values, first, last, most):
  """The Rice parameter that is cheapest, up to the first that is not."""
  k, best = 0, np.int64(values[first:last].sum())
  while k < most:
    cost = np.int64(0)
    for i in range(first, last):
      cost += values[i] >> (k + 1)
    cost += (k + 1) * (last - first)
    if cost >= best:
      break
    best = cost
    k += 1
  return k


@_jit
def sizes(steps):
  """Size of every step less one, 0..32767."""
  out = np.empty(steps.size, np.uint32)
  for i in range(steps.size):
    out[i] = np.uint16(-steps[i] if steps[i] >> 15 else steps[i]) - 1
  return out


def between(
    old: np.ndarray, new: np.ndarray
) -> tuple[Changes, ulp_steps.UlpSteps]:
  """What leads from old to new, both uint16 [n]; the same in word order."""
  old, new = numba_kernels.aligned(old), numba_kernels.aligned(new)
  where = parallel.scratch('where', old.size, np.uint32)
  buckets = parallel.scratch('buckets', old.size, np.uint8)
  gaps = parallel.scratch('gaps', old.size, np.uint32)
  step = parallel.scratch('step', old.size, np.uint16)
  n = _collect(old, new, where, buckets, gaps, step)
  start = np.empty(BUCKETS + 1, np.int64)
  out = Changes(start, np.empty(n, np.uint32), np.empty(n, np.uint16))
  _sort(buckets[:n], gaps[:n], step[:n], *out)
  return out, ulp_steps.UlpSteps(where[:n].copy(), step[:n].copy())


def apply(
    old: np.ndarray, changes: Changes, out: np.ndarray | None = None
) -> np.ndarray:
  """Inverse of `between`: the new words, in `out` or a fresh array.

  Raises:
    ValueError: a change lies behind the last word.
  """
  out = numba_kernels.copied(old, out)
  if not _apply(out, *changes):
    raise ValueError('delta payload: changes leave the tile; damaged')
  return out
