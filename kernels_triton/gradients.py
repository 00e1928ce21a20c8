"""What the backward of every product shares."""

import jax
from jax import lax
import jax.numpy as jnp


def of_weights(x: jax.Array, dy: jax.Array) -> jax.Array:
  """Sum over rows of x times dy, the gradient of x @ w for w.

  On a CPU, XLA leaves a product with a transposed left side to Eigen, which
  cuts the sum by the number of threads: its bits would depend on the machine's
  cores. The barriers keep it an ordinary product of two matrices.

  Args:
    x: f32 [.. R K].
    dy: f32 [.. R N].

  Returns:
    f32 [.. K N].
  """
  product = lax.optimization_barrier(jnp.swapaxes(x, -1, -2)) @ dy
  return lax.optimization_barrier(product)
