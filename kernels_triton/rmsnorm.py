"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from kernels_triton import launch


def _reference(x, scale, eps):
  x = x.astype(jnp.float32)
  mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
  scale = scale.astype(jnp.float32)
  return x * lax.rsqrt(mean_square + eps) * scale[None, :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(x, scale, eps, implementation):
  return _forward(x, scale, eps, implementation)[0]


def _forward(x, scale, eps, implementation):
  from kernels_triton import rmsnorm_kernel  # needs triton

  y, inverse = rmsnorm_kernel.forward(x, scale, eps, implementation)
  return y, (x, scale, inverse)


def _backward(eps, implementation, residuals, dy):
  del eps
  from kernels_triton import rmsnorm_kernel  # needs triton

  x, scale, inverse = residuals
  return rmsnorm_kernel.backward(x, scale, inverse, dy, implementation)


_rms_norm.defvjp(_forward, _backward)


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    eps: float,
    *,
    implementation: str | None = None,
) -> jax.Array:
  """Normalises the last axis in f32; call it inside `rows.rowwise`.

  Args:
    x: [R D], any float type.
    scale: [D].
    eps: added to the mean square.
    implementation: see `launch`.

  Returns:
    f32 [R D].
  """
  implementation = launch.resolve(implementation)
  if implementation == launch.REFERENCE:
    return _reference(x, scale, eps)
  return _rms_norm(x, scale, eps, implementation)
