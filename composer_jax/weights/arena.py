"""Memory of versions that nobody looks at any more, for the next version."""

from __future__ import annotations

from collections.abc import Mapping
import weakref

import numpy as np


class Spare:
  """Keeps one array's worth of memory per name.

  A host that has two versions while it changes from one to the other needs
  the memory again at the next change; mapping it anew costs as much as
  decoding. It comes back when the last view of an array is gone, so arrays
  stay valid for as long as somebody, a device buffer included, holds them.
  """

  def __init__(self):
    self._free: dict[str, np.ndarray] = {}

  def lend(self, fresh: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays like `fresh`, uninitialized, in memory used before if possible."""
    return {name: self._lend(name, a) for name, a in fresh.items()}

  def _lend(self, name: str, fresh: np.ndarray) -> np.ndarray:
    if not fresh.nbytes:
      return fresh
    owner = self._free.pop(name, fresh)
    if owner.nbytes != fresh.nbytes:
      owner = fresh
    # All views have `lent` as their base: numpy looks through arrays only as
    # far as one over foreign memory. So it lives as long as any of them.
    lent = np.frombuffer(owner.reshape(-1).view(np.uint8).data, np.uint8)
    back = weakref.finalize(lent, self._free.__setitem__, name, owner)
    back.atexit = False
    return lent.view(fresh.dtype).reshape(fresh.shape)
