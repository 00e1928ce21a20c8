"""Dense projections: matmuls whose rows do not feel each other."""

import jax
import jax.numpy as jnp

from kernels_triton import gradients
from kernels_triton import grouped
from kernels_triton import launch


@jax.custom_vjp
def _product(x, w):
  return x @ w


_product.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda r, dy: (
        dy @ jnp.swapaxes(r[1], -1, -2),
        gradients.of_weights(r[0], dy),
    ),
)


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    dtype: str = 'float32',
    implementation: str | None = None,
) -> jax.Array:
  """x @ w with products summed in f32; call it inside `rows.rowwise`.

  Args:
    x: [R K], any float type.
    w: [K N], any float type.
    dtype: type the kernel multiplies in. The reference multiplies in f32: a CPU
      gains nothing from less.
    implementation: see `launch`.

  Returns:
    f32 [R N].
  """
  implementation = launch.resolve(implementation)
  x, w = x.astype(jnp.float32), w.astype(jnp.float32)
  if implementation == launch.REFERENCE:
    return _product(x, w)
  sizes = launch.size(x.shape[0])
  return grouped.grouped_matmul(x, w[None], sizes, dtype, implementation)


def heads(
    x: jax.Array,
    w: jax.Array,
    *,
    dtype: str = 'float32',
    implementation: str | None = None,
) -> jax.Array:
  """Each head times its own matrix; otherwise like `matmul`.

  Args:
    x: [R N K], any float type.
    w: [N K M], any float type.
    dtype: see `matmul`.
    implementation: see `launch`.

  Returns:
    f32 [R N M].
  """
  implementation = launch.resolve(implementation)
  x = x.astype(jnp.float32).swapaxes(0, 1)
  w = w.astype(jnp.float32)
  if implementation == launch.REFERENCE:
    return _product(x, w).swapaxes(0, 1)
  n, rows, k = x.shape
  sizes = jnp.full((n,), rows, jnp.int32)
  y = grouped.grouped_matmul(x.reshape(-1, k), w, sizes, dtype, implementation)
  return y.reshape(n, rows, -1).swapaxes(0, 1)
