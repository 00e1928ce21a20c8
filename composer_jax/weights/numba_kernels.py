"""Numba kernels of the delta codec: `reference` bit for bit, only faster.

They release the GIL, are compiled on first use and cached on disk. Decoding
checks every index, so a damaged payload raises and never writes outside.
"""

from __future__ import annotations

import numba
import numpy as np

from composer_jax.weights import reference

_jit = numba.njit(nogil=True, cache=True)

to_key = _jit(reference.to_key)
from_key = _jit(reference.from_key)


@_jit
def _split(where, step, gaps, signs, skips, magnitudes):
  gap_end = skip_end = large = 0
  last = last_large = -1
  for n in range(where.size):
    gap = np.int64(where[n]) - last - 1
    last = np.int64(where[n])
    while gap >= 255:
      gaps[gap_end] = 255
      gap_end += 1
      gap -= 255
    gaps[gap_end] = gap
    gap_end += 1
    size = np.int32(step[n])
    if size >= 0x8000:
      size = 0x10000 - size
      signs[n >> 3] |= np.uint8(1 << (n & 7))
    if size != 1:
      skip = n - last_large - 1
      last_large = n
      while skip >= 255:
        skips[skip_end] = 255
        skip_end += 1
        skip -= 255
      skips[skip_end] = skip
      skip_end += 1
      magnitudes[large] = size
      large += 1
  return gap_end, skip_end, large


@_jit
def _next(packed, at, index):
  """Follows one distance from `index`; (-1, -1) if it does not end."""
  while at < packed.size and packed[at] == 255:
    index += 255
    at += 1
  if at >= packed.size:
    return -1, -1
  return at + 1, index + packed[at] + 1


@_jit
def _merge(out, changed, gaps, signs, skips, magnitudes):
  """Applies the streams to `out` in place; False if they are damaged."""
  where = large = -1
  gap_at = skip_at = used = 0
  if magnitudes.size:
    skip_at, large = _next(skips, 0, -1)
    if skip_at < 0:
      return False
  for k in range(changed):
    gap_at, where = _next(gaps, gap_at, where)
    if gap_at < 0 or where >= out.size:
      return False
    step = np.uint16(1)
    if k == large:
      step = magnitudes[used]
      used += 1
      if used < magnitudes.size:
        skip_at, large = _next(skips, skip_at, large)
        if skip_at < 0:
          return False
    key = to_key(out[where])
    if signs[k >> 3] >> (k & 7) & 1:
      key = np.uint16(key - step)
    else:
      key = np.uint16(key + step)
    out[where] = from_key(key)
  return (
      gap_at == gaps.size and skip_at == skips.size and used == magnitudes.size
  )


def aligned(words: np.ndarray) -> np.ndarray:
  return words.copy() if words.ctypes.data % 8 else words


def split(where: np.ndarray, step: np.ndarray) -> reference.Streams:
  """The streams of `reference.split`, from `ulp_steps.UlpSteps`."""
  n = where.size
  reach = int(where[-1]) + 1 if n else 0
  gaps = np.empty(n + reach // 255, np.uint8)
  signs = np.zeros(-(-n // 8), np.uint8)
  skips = np.empty(n + n // 255, np.uint8)
  magnitudes = np.empty(n, np.uint16)
  gap_end, skip_end, large = _split(where, step, gaps, signs, skips, magnitudes)
  return reference.Streams(
      n, gaps[:gap_end], signs, skips[:skip_end], magnitudes[:large]
  )


def copied(old: np.ndarray, out: np.ndarray | None) -> np.ndarray:
  """A copy of `old`, in `out` or a fresh array."""
  if out is None:
    return old.copy()
  np.copyto(out, old)
  return out


def merge(
    old: np.ndarray, streams: reference.Streams, out: np.ndarray | None = None
) -> np.ndarray:
  """Does what `reference.merge` does; the new words go to `out` if given."""
  out = copied(old, out)
  if streams.signs.size * 8 < streams.changed or not _merge(out, *streams):
    raise ValueError('delta payload: streams disagree; damaged')
  return out
