"""Operands of kernel tests, and how near a kernel must come to float64."""

import jax
import jax.numpy as jnp
import numpy as np

_TOLERANCE = {'float32': 1e-5, 'bfloat16': 1e-2}


def exact(x) -> np.ndarray:
  """Returns an operand as float64."""
  return np.asarray(jnp.asarray(x, jnp.float32), np.float64)


class Cases:
  """Random operands of one type, and its tolerance."""

  def __init__(self, dtype: str):
    self.dtype = jnp.dtype(dtype)
    self._rng = np.random.default_rng(0)

  def normal(self, *shape: int) -> jax.Array:
    return jnp.asarray(self._rng.standard_normal(shape), self.dtype)

  def check(self, got, want) -> None:
    """Asserts that the error is small beside the largest value."""
    scale = np.abs(want).max() or 1.0
    error = np.abs(exact(got) - want).max() / scale
    limit = _TOLERANCE[self.dtype.name]
    np.testing.assert_array_less(error, limit)


def bits(x) -> np.ndarray:
  """Returns the bytes of every element."""
  x = np.ascontiguousarray(x)
  return x.view(f'u{x.itemsize}')
