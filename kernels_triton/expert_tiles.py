"""SwiGLU of tiles of rows that belong to one expert each; the reference.

An expert's tiles follow each other, so its weights are fetched once and stay in
cache for all of them.
"""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp

from kernels_triton import gradients

# Tiles that the backward takes at once, at most.
_BLOCK = 8


def _put(array, value, index):
  return lax.dynamic_update_index_in_dim(array, value, index, 0)


def _matrix(w_in, e):
  """Both projections of an expert in one [D 2F]."""
  return w_in[e].reshape(w_in.shape[1], -1)


def _each_expert(experts, ends, body: Callable, carry):
  """body(expert, its first tile, its end, carry) for those that have tiles."""

  def step(state):
    first, carry = state
    expert = experts[first]
    end = ends[expert]
    return end, body(expert, first, end, carry)

  start = jnp.zeros((), jnp.int32)
  return lax.while_loop(lambda s: s[0] < ends[-1], step, (start, carry))[1]


@jax.custom_vjp
def swiglu(
    x: jax.Array,
    gates: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    experts: jax.Array,
    ends: jax.Array,
) -> jax.Array:
  """Gate x SwiGLU of every tile by its expert.

  Args:
    x: f32 [tiles R D].
    gates: f32 [tiles R].
    w_in: f32 [E D 2 F]; the first of the two feeds silu.
    w_out: f32 [E F D].
    experts: i32 [tiles], ascending.
    ends: i32 [E], tile after an expert's last one; tiles from ends[-1] on are
      not used.

  Returns:
    f32 [tiles R D]; zero for tiles that are not used.
  """
  return _forward(x, gates, w_in, w_out, experts, ends)[0]


def _forward(x, gates, w_in, w_out, experts, ends):
  def expert(e, first, end, out):
    w1, w2 = lax.optimization_barrier((_matrix(w_in, e), w_out[e]))

    def tile(i, out):
      up = x[i] @ w1
      gate, value = jnp.split(up, 2, axis=-1)
      act = jax.nn.silu(gate) * value * gates[i][:, None]
      y, up = lax.optimization_barrier((act @ w2, up))
      return _put(out[0], y, i), _put(out[1], up, i)

    return lax.fori_loop(first, end, tile, out)

  ups = jnp.zeros((*x.shape[:2], 2 * w_in.shape[-1]), jnp.float32)
  y, up = _each_expert(experts, ends, expert, (jnp.zeros_like(x), ups))
  return y, (x, gates, w_in, w_out, experts, ends, up)


def _backward(residuals, dy):
  """Larger blocks than the forward's: only its bits are a contract.

  A block may reach into the tiles of the next expert; the last one, which must
  not reach past the end, into tiles that are done. There it takes a cotangent
  of zero and writes nothing: dx lies where dy did, which is read only once.
  """
  x, gates, w_in, w_out, experts, ends, up = residuals
  tiles, rows = gates.shape
  block = max(1, min(_BLOCK, tiles // len(w_in)))
  size = block * rows
  x, gates, up, dy = (
      a.reshape(tiles * rows, *a.shape[2:]) for a in (x, gates, up, dy)
  )

  def expert(e, first, end, out):
    w1, w2 = _matrix(w_in, e), w_out[e]

    def step(b, out):
      dx, dgates, dw1, dw2 = out
      begin = (first + b * block) * rows
      start = jnp.minimum(begin, tiles * rows - size)
      part = lambda a: lax.dynamic_slice_in_dim(a, start, size)
      ids = start + jnp.arange(size, dtype=jnp.int32)
      own = ((ids >= begin) & (ids < end * rows))[:, None]

      def put(array, value):
        value = jnp.where(
            own[:, 0] if array.ndim == 1 else own, value, part(array)
        )
        return lax.dynamic_update_slice_in_dim(array, value, start, 0)

      dy_b = jnp.where(own, part(dx), 0.0)
      x_b, g = part(x), part(gates)[:, None]
      a, v = jnp.split(part(up), 2, axis=-1)
      sigmoid = jax.nn.sigmoid(a)
      z = a * sigmoid * v
      dz = dy_b @ w2.T
      dgate = jnp.sum(dz * z, axis=-1)
      dz = dz * g
      da = dz * v * sigmoid * (1.0 + a * (1.0 - sigmoid))
      dup = jnp.concatenate([da, dz * a * sigmoid], axis=-1)
      return (
          put(dx, dup @ w1.T),
          put(dgates, dgate),
          dw1 + gradients.of_weights(x_b, dup),
          dw2 + gradients.of_weights(z * g, dy_b),
      )

    dx, dgates, dw_in, dw_out = out
    fresh = jnp.zeros_like(w1), jnp.zeros_like(w2)
    blocks = -(-(end - first) // block)
    dx, dgates, dw1, dw2 = lax.fori_loop(0, blocks, step, (dx, dgates, *fresh))
    dw_in = _put(dw_in, dw1.reshape(w_in.shape[1:]), e)
    return dx, dgates, dw_in, _put(dw_out, dw2, e)

  zeros = tuple(jnp.zeros_like(a) for a in (gates, w_in, w_out))
  dx, dgates, dw_in, dw_out = _each_expert(experts, ends, expert, (dy, *zeros))
  dx = dx.reshape(tiles, rows, -1)
  return dx, dgates.reshape(tiles, rows), dw_in, dw_out, None, None


swiglu.defvjp(_forward, _backward)
