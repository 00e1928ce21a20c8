"""Sparse steps between two tiles: deltas that add up without the weights.

A step is the distance in total order modulo 2**16, so the steps of several
versions in a row are their sum, whatever the weights were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

from composer_jax.weights import numba_kernels
from composer_jax.weights import parallel
from composer_jax.weights import reference


class UlpSteps(NamedTuple):
  """What changed; no step is zero."""

  where: np.ndarray  # u32 [changes], increasing
  step: np.ndarray  # u16 [changes], modulo 2**16


@numba.njit(nogil=True, cache=True)
def _find(old, new, where, step):
  n = 0
  whole = old.size >> 2  # words are compared by fours: most are equal
  old_four = old[: whole << 2].view(np.uint64)
  new_four = new[: whole << 2].view(np.uint64)
  for four in range(whole + 1):
    if four < whole and old_four[four] == new_four[four]:
      continue
    for i in range(four << 2, min((four << 2) + 4, old.size)):
      if old[i] != new[i]:
        where[n] = i
        step[n] = numba_kernels.to_key(new[i]) - numba_kernels.to_key(old[i])
        n += 1
  return n


def between(old: np.ndarray, new: np.ndarray) -> UlpSteps:
  """The steps that lead from old to new, both uint16 [n]."""
  where = parallel.scratch('where', old.size, np.uint32)
  step = parallel.scratch('step', old.size, np.uint16)
  n = _find(numba_kernels.aligned(old), numba_kernels.aligned(new), where, step)
  return UlpSteps(where[:n].copy(), step[:n].copy())


def compose(parts: Sequence[UlpSteps], words: int) -> UlpSteps:
  """The steps that have the effect of all, one after the other.

  Args:
    parts: steps of successive versions of a tile.
    words: words of the tile.
  """
  total = np.zeros(words, np.uint16)
  for part in parts:
    total[part.where] += part.step
  where = np.flatnonzero(total).astype(np.uint32)
  return UlpSteps(where, total[where])


def undo(new: np.ndarray, steps: UlpSteps) -> np.ndarray:
  """The words that `steps` led to `new`, in a fresh array."""
  out = new.copy()
  keys = reference.to_key(new[steps.where]) - steps.step
  out[steps.where] = reference.from_key(keys)
  return out
