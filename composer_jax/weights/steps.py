"""Sparse steps between two tiles: deltas that add up without the weights.

A step is the distance in total order modulo 2**16, so the steps of several
versions in a row are their sum, whatever the weights were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from composer_jax.weights import reference


class Steps(NamedTuple):
  """What changed; no step is zero."""

  where: np.ndarray  # u32 [changes], increasing
  step: np.ndarray  # u16 [changes], modulo 2**16


def between(old: np.ndarray, new: np.ndarray) -> Steps:
  """The steps that lead from old to new, both uint16 [n]."""
  where = np.flatnonzero(old != new).astype(np.uint32)
  step = reference.to_key(new[where]) - reference.to_key(old[where])
  return Steps(where, step)


def compose(parts: Sequence[Steps], words: int) -> Steps:
  """The steps that have the effect of all, one after the other.

  Args:
    parts: of successive versions of a tile.
    words: of the tile.
  """
  total = np.zeros(words, np.uint16)
  for part in parts:
    total[part.where] += part.step
  where = np.flatnonzero(total).astype(np.uint32)
  return Steps(where, total[where])


def undo(new: np.ndarray, steps: Steps) -> np.ndarray:
  """The words that `steps` led to `new`, in a fresh array."""
  out = new.copy()
  keys = reference.to_key(new[steps.where]) - steps.step
  out[steps.where] = reference.from_key(keys)
  return out
