"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

import jax
from jax import lax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """Normalises the last axis in f32; call it inside a row block.

  Args:
    x: [R D], any float type.
    scale: [D].
    eps: added to the mean square.

  Returns:
    f32 [R D].
  """
  x = x.astype(jnp.float32)
  mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
  scale = scale.astype(jnp.float32)
  return x * lax.rsqrt(mean_square + eps) * scale[None, :]
