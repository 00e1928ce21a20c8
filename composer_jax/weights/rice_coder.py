"""Codec E: bucketed changes in Rice codes, one stream of bits, low bit first.

  lowest, highest bucket with changes   8 bits each; then for each of them
  changed?    1 bit; the rest follows only if it is set
  changes-1   5 bits say how many bits it has, then those
  k_gap       5 bits, k_size 4 bits: Rice parameters
  changes     each: Rice(gap), sign (1 is a step down), Rice(size - 1)

Rice(v) with parameter k is v >> k ones, a zero, and the low k bits of v; or
`ESCAPE` ones and v in 32 bits. `tests.reference_buckets` does the same, slowly.
"""

from __future__ import annotations

import numba
import numpy as np

from composer_jax.weights import buckets

ESCAPE = 20

_BUCKETS = buckets.BUCKETS
_jit = numba.njit(nogil=True, cache=True)
_inline = numba.njit(nogil=True, cache=True, inline='always')


@_inline
def _put(bits, at, value, width):
  """Appends the low `width` <= 32 bits of value; returns the new end."""
  word, shift = at >> 6, np.uint64(at & 63)
  bits[word] |= np.uint64(value) << shift
  if (at & 63) + width > 64:
    bits[word + 1] |= np.uint64(value) >> (np.uint64(64) - shift)
  return at + width


@_inline
def _put_rice(bits, at, value, k):
  ones = value >> k
  if ones >= ESCAPE:
    at = _put(bits, at, (1 << ESCAPE) - 1, ESCAPE)
    return _put(bits, at, value, 32)
  at = _put(bits, at, (1 << ones) - 1, ones + 1)
  return _put(bits, at, value & ((1 << k) - 1), k)


@_jit
def _write(bits, start, gaps, steps, sizes):
  """Packs changes; returns the number of bits."""
  low, high = 0, _BUCKETS - 1
  while start[low] == start[low + 1]:
    low += 1
  while start[high] == start[high + 1]:
    high -= 1
  at = _put(bits, 0, low, 8)
  at = _put(bits, at, high, 8)
  for b in range(low, high + 1):
    first, last = start[b], start[b + 1]
    at = _put(bits, at, last > first, 1)
    if last == first:
      continue
    width = 0
    while (last - first - 1) >> width:
      width += 1
    k_gap = buckets.parameter(gaps, first, last, 31)
    k_size = buckets.parameter(sizes, first, last, 15)
    at = _put(bits, at, width, 5)
    at = _put(bits, at, last - first - 1, width)
    at = _put(bits, at, k_gap, 5)
    at = _put(bits, at, k_size, 4)
    for i in range(first, last):
      at = _put_rice(bits, at, np.int64(gaps[i]), k_gap)
      at = _put(bits, at, steps[i] >> 15, 1)
      at = _put_rice(bits, at, np.int64(sizes[i]), k_size)
  return at


@_inline
def _get(bits, at, width):
  """The `width` <= 32 bits from `at`; zeros behind the end."""
  word, shift = at >> 6, np.uint64(at & 63)
  value = bits[word] >> shift
  if (at & 63) + width > 64:
    value |= bits[word + 1] << (np.uint64(64) - shift)
  return np.int64(value & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)))


@_inline
def _get_rice(bits, at, k):
  window = _get(bits, at, ESCAPE)
  ones = 0
  while window & 1:
    ones += 1
    window >>= 1
  if ones == ESCAPE:
    return at + ESCAPE + 32, _get(bits, at + ESCAPE, 32)
  at += ones + 1
  return at + k, ones << k | _get(bits, at, k)


@_jit
def _read(bits, length, words, start, gaps, steps):
  """Unpacks changes; False if the payload is damaged."""
  low, high = _get(bits, 0, 8), _get(bits, 8, 8)
  at, n = 16, 0
  for b in range(_BUCKETS):
    start[b] = n
    if b < low or b > high:
      continue
    at += 1
    if at > length:
      return False
    if not _get(bits, at - 1, 1):
      continue
    width = _get(bits, at, 5)
    count = _get(bits, at + 5, width) + 1
    at += 5 + width
    k_gap = _get(bits, at, 5)
    k_size = _get(bits, at + 5, 4)
    at += 9
    if at > length or n + count > min(words, gaps.size):
      return False
    for _ in range(count):
      at, gap = _get_rice(bits, at, k_gap)
      down = _get(bits, at, 1)
      at, size = _get_rice(bits, at + 1, k_size)
      if at > length:
        return False
      gaps[n] = gap
      steps[n] = np.uint16(-(size + 1) if down else size + 1)
      n += 1
  start[_BUCKETS] = n
  return (at + 7) >> 3 == length >> 3


def pack(changes: buckets.Changes) -> bytes:
  """The payload of one or more changes."""
  # At most 105 bits a change; 15 a bucket with its count in up to 32.
  n = changes.gaps.size
  bits = np.zeros((n * 105 + _BUCKETS * 47) // 64 + 2, np.uint64)
  end = _write(bits, *changes, buckets.sizes(changes.steps))
  return bits.view(np.uint8)[: (end + 7) >> 3].tobytes()


def unpack(payload: bytes, words: int) -> buckets.Changes:
  """Inverse of `pack`.

  Args:
    payload: bytes from `pack`.
    words: words of the tile.

  Raises:
    ValueError: damaged payload.
  """
  # A code may be read up to 105 bits behind the end before that is noticed.
  bits = np.zeros(len(payload) // 8 + 4, np.uint64)
  bits.view(np.uint8)[: len(payload)] = np.frombuffer(payload, np.uint8)
  start = np.empty(_BUCKETS + 1, np.int64)
  most = len(payload) * 8 // 3  # the shortest change has three bits
  gaps = np.empty(most, np.uint32)
  steps = np.empty(most, np.uint16)
  if not _read(bits, len(payload) * 8, words, start, gaps, steps):
    raise ValueError('delta payload: bits do not fit the tile; damaged')
  return buckets.Changes(start, gaps[: start[-1]], steps[: start[-1]])
