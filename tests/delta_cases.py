"""Words whose deltas are easily got wrong."""

import numpy as np


def words(n: int, changed: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns (old, new) uint16 [n]; about `changed` words differ."""
  rng = np.random.default_rng(n)
  old = rng.integers(0, 1 << 16, n, np.uint16)
  new = old.copy()
  at = rng.permutation(n)[:changed]
  new[at] = rng.integers(0, 1 << 16, at.size)
  # -0.0 to 0.0, a NaN's payload, infinity to NaN, one ulp across zero.
  pairs = (0x8000, 0), (0x7FC1, 0x7FC2), (0xFF80, 0xFF81), (1, 0x8001)
  for i, (a, b) in enumerate(pairs[: n - 1]):
    old[i], new[i] = a, b
  return old, new
