"""Codec F: bucketed changes through an adaptive binary range coder.

Same header and symbols as `rice_coder`, but the ones and zeros of the unary
parts and the signs are coded with the odds that were counted for them so far,
apart for each bucket: close to the entropy, at some cost in time.

A bit of probability a / (a + b) narrows an interval of 32 bits; whenever it
has less than 24, the top byte of its low end is written, and only a carry can
still change it. The payload is the shortest number inside the last interval,
without trailing zero bytes. `tests.reference_buckets` writes the same with
integers of any length.
"""

from __future__ import annotations

import numba
import numpy as np

from composer_jax.weights import buckets

ESCAPE = 20
LIMIT = 1 << 12  # counts are halved when they reach it
# Counters of a bucket: unary gap, by ones so far up to 2; sign; unary size.
GAP, SIGN, SIZE, CONTEXTS = 0, 3, 4, 10

_BUCKETS = buckets.BUCKETS
_TOP = 1 << 24
_FULL = (1 << 32) - 1
_jit = numba.njit(nogil=True, cache=True)
_inline = numba.njit(nogil=True, cache=True, inline='always')


@_inline
def _count(odds, context, bit):
  """Twice the number of zeros and ones seen, plus one."""
  odds[context, bit] += 2
  if odds[context, 0] + odds[context, 1] >= LIMIT:
    odds[context, 0] = odds[context, 0] >> 1 | 1
    odds[context, 1] = odds[context, 1] >> 1 | 1


@_jit
def _carry(out, end):
  """Adds one to the bytes written so far; 255 turns to 0 and passes it on.

  It stops before the front: all intervals lie in the first one, which ends
  below 2**32, so the number never grows beyond the bytes it has.
  """
  end -= 1
  while out[end] == 255:
    out[end] = 0
    end -= 1
  out[end] += 1


# state: low end (32 bits), width of the interval, bytes written. The number is
# the bytes, then 32 bits in [low, low + width), whose end may need 33.
# Between two bits 2**24 <= width < 2**32, and counts are odd with a sum below
# 2**12. So both parts of a split are at least 2**12 wide; an empty one would
# never be wide again, and the shifts would not end.
@_inline
def _narrow(out, state, begin, width):
  # The carry belongs to the bytes written so far: it comes before the next one.
  low = state[0] + begin
  if low > _FULL:
    _carry(out, state[2])
    low &= _FULL
  while width < _TOP:
    out[state[2]] = low >> 24
    state[2] += 1
    low = low << 8 & _FULL
    width <<= 8
  state[0], state[1] = low, width


@_inline
def _put_bit(out, state, odds, context, bit):
  zero, one = odds[context, 0], odds[context, 1]
  split = state[1] * zero // (zero + one)
  if bit:
    _narrow(out, state, split, state[1] - split)
  else:
    _narrow(out, state, 0, split)
  _count(odds, context, bit)


@_jit
def _put_even(out, state, value, width):
  """Bits that are as often set as not, the high ones first."""
  for i in range(width - 1, -1, -1):
    half = state[1] >> 1
    if value >> i & 1:
      _narrow(out, state, half, state[1] - half)
    else:
      _narrow(out, state, 0, half)


@_jit
def _put_value(out, state, odds, context, contexts, value, k):
  ones = min(value >> k, ESCAPE)
  for i in range(ones):
    _put_bit(out, state, odds, context + min(i, contexts - 1), 1)
  if ones == ESCAPE:
    _put_even(out, state, value, 32)
    return
  _put_bit(out, state, odds, context + min(ones, contexts - 1), 0)
  _put_even(out, state, value & ((1 << k) - 1), k)


@_jit
def _write(out, start, gaps, steps, sizes):
  """Packs changes; returns the number of bytes."""
  state = np.array([0, _FULL, 0], np.int64)
  odds = np.empty((CONTEXTS, 2), np.int64)
  low, high = 0, _BUCKETS - 1
  while start[low] == start[low + 1]:
    low += 1
  while start[high] == start[high + 1]:
    high -= 1
  _put_even(out, state, low, 8)
  _put_even(out, state, high, 8)
  for b in range(low, high + 1):
    first, last = start[b], start[b + 1]
    _put_even(out, state, np.int64(last > first), 1)
    if last == first:
      continue
    width = 0
    while (last - first - 1) >> width:
      width += 1
    # One less than for Rice codes: longer unary parts can be modeled.
    k_gap = max(buckets.parameter(gaps, first, last, 31) - 1, 0)
    k_size = max(buckets.parameter(sizes, first, last, 15) - 1, 0)
    _put_even(out, state, width, 5)
    _put_even(out, state, last - first - 1, width)
    _put_even(out, state, k_gap, 5)
    _put_even(out, state, k_size, 4)
    odds[:] = 1
    for i in range(first, last):
      _put_value(out, state, odds, GAP, SIGN - GAP, np.int64(gaps[i]), k_gap)
      _put_bit(out, state, odds, SIGN, np.int64(steps[i] >> 15))
      _put_value(
          out, state, odds, SIZE, CONTEXTS - SIZE, np.int64(sizes[i]), k_size
      )
  # The number in the interval with most zeros at its end. There is one with 24,
  # as the interval is that wide; with 32 no more than a carry is left of it.
  for zeros in (32, 24, 16, 8, 0):
    begin = -(-state[0] >> zeros << zeros) - state[0]
    if begin < state[1]:
      break
  _narrow(out, state, begin, _TOP)  # of that width it shifts nothing out
  for i in range(4):
    out[state[2] + i] = state[0] >> (24 - 8 * i) & 255
  end = state[2] + 4
  while not out[end - 1]:
    end -= 1
  return end


# state: value minus low end, width of the interval, bytes read. The difference
# is all that decoding needs, and it stays below the width: no carry here. Past
# the end of the payload are the zeros that the writer left out.
@_inline
def _settle(packed, state, value, width):
  while width < _TOP:
    value <<= 8
    if state[2] < packed.size:
      value |= packed[state[2]]
    state[2] += 1
    width <<= 8
  state[0], state[1] = value, width


@_inline
def _get_bit(packed, state, odds, context):
  zero, one = odds[context, 0], odds[context, 1]
  split = state[1] * zero // (zero + one)
  bit = np.int64(state[0] >= split)
  if bit:
    _settle(packed, state, state[0] - split, state[1] - split)
  else:
    _settle(packed, state, state[0], split)
  _count(odds, context, bit)
  return bit


@_jit
def _get_even(packed, state, width):
  value = np.int64(0)
  for _ in range(width):
    half = state[1] >> 1
    value <<= 1
    if state[0] >= half:
      value |= 1
      _settle(packed, state, state[0] - half, state[1] - half)
    else:
      _settle(packed, state, state[0], half)
  return value


@_jit
def _get_value(packed, state, odds, context, contexts, k):
  ones = 0
  while ones < ESCAPE:
    if not _get_bit(packed, state, odds, context + min(ones, contexts - 1)):
      return ones << k | _get_even(packed, state, k)
    ones += 1
  return _get_even(packed, state, 32)


@_jit
def _read(packed, start, gaps, steps):
  """Unpacks changes; False if the payload is damaged."""
  state = np.array([0, 0, 0], np.int64)
  for _ in range(4):
    _settle(packed, state, state[0], _TOP - 1)
  state[1] = _FULL
  odds = np.empty((CONTEXTS, 2), np.int64)
  low = _get_even(packed, state, 8)
  high = _get_even(packed, state, 8)
  n = 0
  for b in range(_BUCKETS):
    start[b] = n
    if b < low or b > high or not _get_even(packed, state, 1):
      continue
    width = _get_even(packed, state, 5)
    count = _get_even(packed, state, width) + 1
    k_gap = _get_even(packed, state, 5)
    k_size = _get_even(packed, state, 4)
    if n + count > gaps.size:
      return False
    odds[:] = 1
    for i in range(n, n + count):
      gaps[i] = _get_value(packed, state, odds, GAP, SIGN - GAP, k_gap)
      down = _get_bit(packed, state, odds, SIGN)
      size = 1 + _get_value(packed, state, odds, SIZE, CONTEXTS - SIZE, k_size)
      steps[i] = np.uint16(-size if down else size)
    n += count
  start[_BUCKETS] = n
  return True


def pack(changes: buckets.Changes) -> bytes:
  """The payload of one or more changes."""
  # No bit costs more than the 12 bits of a full counter.
  n = changes.gaps.size
  out = np.zeros(n * 120 + 8 * _BUCKETS + 16, np.uint8)
  end = _write(out, *changes, buckets.sizes(changes.steps))
  return out[:end].tobytes()


def unpack(payload: bytes, words: int) -> buckets.Changes:
  """Inverse of `pack`.

  Args:
    payload: bytes from `pack`.
    words: words of the tile.

  Raises:
    ValueError: damaged payload.
  """
  start = np.empty(_BUCKETS + 1, np.int64)
  gaps = np.empty(words, np.uint32)
  steps = np.empty(words, np.uint16)
  if not _read(np.frombuffer(payload, np.uint8), start, gaps, steps):
    raise ValueError('delta payload: more changes than words; damaged')
  return buckets.Changes(start, gaps[: start[-1]], steps[: start[-1]])
