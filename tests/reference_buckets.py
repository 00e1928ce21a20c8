"""Plain reference of codecs E and F, in slow code that is easy to check.

Its bytes are those of `buckets` with `rice_coder` and with `range_coder`.
Streams of bits are integers of any length, so that neither carries nor word
boundaries exist here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from composer_jax.weights import buckets
from composer_jax.weights import range_coder
from composer_jax.weights import reference
from composer_jax.weights import rice_coder


def _grouped(old: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Words in the order of their buckets, and where each bucket starts."""
  bucket = old >> buckets.SHIFT & 255
  count = np.bincount(bucket, minlength=buckets.BUCKETS)
  return np.argsort(bucket, kind='stable'), np.cumsum([0, *count])


def between(old: np.ndarray, new: np.ndarray) -> buckets.Changes:
  """See `buckets.between`."""
  order, start = _grouped(old)
  at = np.flatnonzero((old != new)[order])
  first = np.searchsorted(at, start)
  gaps = np.diff(at, prepend=-1) - 1
  for b in range(buckets.BUCKETS):
    if first[b] < first[b + 1]:
      gaps[first[b]] = at[first[b]] - start[b]
  where = order[at]
  steps = reference.to_key(new[where]) - reference.to_key(old[where])
  return buckets.Changes(first, gaps.astype(np.uint32), steps)


def apply(old: np.ndarray, changes: buckets.Changes) -> np.ndarray:
  """See `buckets.apply`."""
  order, start = _grouped(old)
  out = old.copy()
  for b in range(buckets.BUCKETS):
    mine = slice(changes.start[b], changes.start[b + 1])
    at = start[b] - 1 + np.cumsum(changes.gaps[mine].astype(np.int64) + 1)
    if at.size and at[-1] >= start[b + 1]:
      raise ValueError('delta payload: changes leave the tile; damaged')
    where = order[at]
    keys = reference.to_key(old[where]) + changes.steps[mine]
    out[where] = reference.from_key(keys)
  return out


def _parameter(values: np.ndarray, most: int) -> int:
  def cost(k: int) -> int:
    return int((values >> k).sum()) + k * values.size

  return next((k for k in range(most) if cost(k + 1) >= cost(k)), most)


def _plan(changes: buckets.Changes) -> Iterator[tuple[int, list, int, int]]:
  """(bucket, its changes as (gap, down, size - 1), k_gap, k_size)."""
  steps = changes.steps.view(np.int16).astype(np.int64)
  for b in range(buckets.BUCKETS):
    mine = slice(changes.start[b], changes.start[b + 1])
    gaps = changes.gaps[mine].astype(np.int64)
    sizes = np.abs(steps[mine]) - 1
    down = (steps[mine] < 0).astype(int)
    rows = [*zip(gaps.tolist(), down.tolist(), sizes.tolist(), strict=True)]
    yield b, rows, _parameter(gaps, 31), _parameter(sizes, 15)


class _Bits:
  """Bits of an integer, low ones first."""

  def __init__(self):
    self.value = self.length = 0

  def put(self, value: int, width: int) -> None:
    self.value |= value << self.length
    self.length += width

  def rice(self, value: int, k: int) -> None:
    ones = value >> k
    if ones >= rice_coder.ESCAPE:
      self.put((1 << rice_coder.ESCAPE) - 1, rice_coder.ESCAPE)
      self.put(value, 32)
    else:
      self.put((1 << ones) - 1, ones + 1)
      self.put(value & ((1 << k) - 1), k)


def _headed(
    changes: buckets.Changes, put: Callable[[int, int], None], less: int = 0
) -> Iterator[tuple[list, int, int]]:
  """Changes and parameters of every bucket, whose head `put` has then written.

  Args:
    changes: to pack.
    put: writes a number in so many bits.
    less: what the parameters are lowered by.
  """
  plan = [*_plan(changes)]
  used = [b for b, rows, *_ in plan if rows]
  put(used[0], 8)
  put(used[-1], 8)
  for _, rows, *parameters in plan[used[0] : used[-1] + 1]:
    put(int(bool(rows)), 1)
    if rows:
      k_gap, k_size = (max(k - less, 0) for k in parameters)
      width = (len(rows) - 1).bit_length()
      for value, bits in ((width, 5), (len(rows) - 1, width)):
        put(value, bits)
      put(k_gap, 5)
      put(k_size, 4)
      yield rows, k_gap, k_size


def rice_pack(changes: buckets.Changes) -> bytes:
  """See `rice_coder.pack`."""
  out = _Bits()
  for rows, k_gap, k_size in _headed(changes, out.put):
    for gap, down, size in rows:
      out.rice(gap, k_gap)
      out.put(down, 1)
      out.rice(size, k_size)
  return out.value.to_bytes(-(-out.length // 8), 'little')


class _Interval:
  """A growing number: `low` holds all of its bytes but the last four."""

  def __init__(self):
    self.low, self.width, self.shifts = 0, (1 << 32) - 1, 0
    self.odds = {}

  def narrow(self, begin: int, width: int) -> None:
    self.low += begin
    self.width = width
    while self.width < 1 << 24:
      self.low <<= 8
      self.width <<= 8
      self.shifts += 1

  def put(self, context: int, bit: int) -> None:
    odds = self.odds.setdefault(context, [1, 1])
    split = self.width * odds[0] // sum(odds)
    self.narrow(*((split, self.width - split) if bit else (0, split)))
    odds[bit] += 2
    if sum(odds) >= range_coder.LIMIT:
      odds[:] = [n // 2 | 1 for n in odds]

  def even(self, value: int, width: int) -> None:
    for i in reversed(range(width)):
      half = self.width // 2
      bit = value >> i & 1
      self.narrow(*((half, self.width - half) if bit else (0, half)))

  def unary(self, first: int, last: int, value: int, k: int) -> None:
    ones = min(value >> k, range_coder.ESCAPE)
    for i in range(ones):
      self.put(min(first + i, last), 1)
    if ones == range_coder.ESCAPE:
      self.even(value, 32)
    else:
      self.put(min(first + ones, last), 0)
      self.even(value & ((1 << k) - 1), k)

  def packed(self) -> bytes:
    for zeros in (32, 24, 16, 8, 0):
      value = -(-self.low >> zeros << zeros)
      if value < self.low + self.width:
        break
    return value.to_bytes(self.shifts + 4, 'big').rstrip(b'\0')


def range_pack(changes: buckets.Changes) -> bytes:
  """See `range_coder.pack`."""
  out = _Interval()
  for rows, k_gap, k_size in _headed(changes, out.even, less=1):
    out.odds.clear()
    for gap, down, size in rows:
      out.unary(range_coder.GAP, range_coder.SIGN - 1, gap, k_gap)
      out.put(range_coder.SIGN, down)
      out.unary(range_coder.SIZE, range_coder.CONTEXTS - 1, size, k_size)
  return out.packed()
