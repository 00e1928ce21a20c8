"""Plain reference of the delta kernels: what the bytes mean, slowly.

A 2-byte float is mapped to its rank in total order (`to_key`), where one ulp
is one step whatever the sign, so -0.0, infinities and NaN payloads are plain
integers and steps add up modulo 2**16. Codec D2 has a tile's change in four
streams, E and F (`tests.reference_buckets`) have it in buckets:

  gaps        u8: unchanged words before each change; 255 adds 255 and goes on
  signs       u8: one bit per change, low bit first; 1 is a step down
  skips       u8: +-1 steps before each larger step, coded like gaps
  magnitudes  u16: sizes of those larger steps, in 2..32768
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Streams(NamedTuple):
  """What changed between two tiles of the same size."""

  changed: int
  gaps: np.ndarray  # u8
  signs: np.ndarray  # u8 [ceil(changed / 8)]
  skips: np.ndarray  # u8
  magnitudes: np.ndarray  # u16


def to_key(words: np.ndarray) -> np.ndarray:
  """Rank of every word in total order, uint16; also compiled, for one word."""
  return words ^ (0x8000 | (words >> 15 & 1) * 0x7FFF)


def from_key(keys: np.ndarray) -> np.ndarray:
  """Inverse of `to_key`."""
  return keys ^ (0xFFFF ^ (keys >> 15 & 1) * 0x7FFF)


def _pack_distances(where: np.ndarray) -> np.ndarray:
  """Increasing indices as distances in bytes, with 255 as continuation."""
  gap = np.diff(where, prepend=-1) - 1
  out = np.full(int((gap // 255 + 1).sum()), 255, np.uint8)
  out[np.cumsum(gap // 255 + 1) - 1] = gap % 255
  return out


def _unpack_distances(packed: np.ndarray) -> np.ndarray:
  ends = packed != 255
  if packed.size and not ends[-1]:
    raise ValueError('delta payload: a distance does not end; damaged')
  advance = packed.astype(np.int64) + ends
  return np.cumsum(advance)[ends] - 1


def split(old: np.ndarray, new: np.ndarray) -> Streams:
  """The streams that lead from old to new, both uint16 [n]."""
  where = np.flatnonzero(old != new)
  step = (to_key(new[where]) - to_key(old[where])).view(np.int16)
  size = np.abs(step.astype(np.int32))
  large = np.flatnonzero(size != 1)
  return Streams(
      where.size,
      _pack_distances(where),
      np.packbits(step < 0, bitorder='little'),
      _pack_distances(large),
      size[large].astype(np.uint16),
  )


def merge(old: np.ndarray, streams: Streams) -> np.ndarray:
  """Inverse of `split`: the new words, uint16 [n], in a fresh array.

  Raises:
    ValueError: the streams contradict each other or leave the tile.
  """
  where = _unpack_distances(streams.gaps)
  large = _unpack_distances(streams.skips)
  if (
      where.size != streams.changed
      or (where.size and where[-1] >= old.size)
      or large.size != streams.magnitudes.size
      or (large.size and large[-1] >= where.size)
  ):
    raise ValueError('delta payload: streams disagree; damaged')
  size = np.ones(where.size, np.uint16)
  size[large] = streams.magnitudes
  down = np.unpackbits(streams.signs, count=where.size, bitorder='little')
  step = np.where(down, -size, size)
  out = old.copy()
  out[where] = from_key(to_key(old[where]) + step)
  return out
