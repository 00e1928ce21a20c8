"""Grouped matmul, and the SwiGLU experts of the sparse MoE on top of it.

Assignments are grouped by expert; each tile of EXPERT_ROWS rows belongs to one
expert, so the bits of a row do not depend on how many rows its expert has.
Dispatch and combine are gathers in both directions: no scatter-add, no order
that could change.

Where devices share the experts, each one has a range of them. Choices of other
experts are absent: they take no row, and gathers find zero in their place.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from kernels_triton import contract
from kernels_triton import expert_tiles
from kernels_triton import launch


class _Plan(NamedTuple):
  slots: jax.Array  # i32 [n K], padded row of each; past the end if absent
  sources: jax.Array  # i32 [tiles * R], assignment of each padded row, or n*K
  experts: jax.Array  # i32 [tiles], expert of each tile, ascending
  ends: jax.Array  # i32 [E], tile after an expert's last one


def _plan(experts: jax.Array, count: int, size: int) -> _Plan:
  """Groups by expert, each expert padded to a multiple of `size` rows.

  Every assignment a that is present has a row of its own, sources[slots[a]] ==
  a. So the gather by `slots` is the gradient of the one by `sources`, and the
  other way around.
  """
  total = experts.size
  flat = experts.reshape(-1)
  # The rank of an assignment is how many earlier ones its expert has: the order
  # of a stable sort, without one.
  ids = jnp.arange(count, dtype=jnp.int32)[None, :]
  hits = (flat[:, None] == ids).astype(jnp.int32)
  rank = jnp.sum((jnp.cumsum(hits, axis=0) - hits) * hits, axis=1)
  # Experts follow each other in whole tiles. Their number depends on the load,
  # the room for them must not: an expert has at most one tile that is not full,
  # and no tile is without an assignment.
  tiles = -(-jnp.sum(hits, axis=0) // size)
  ends = jnp.cumsum(tiles)
  most = min(total // size + count, total)
  # Absent choices go just past the end, where the scatter drops them and a
  # gather finds zero. Below 0 they would count from the end.
  absent = (flat < 0) | (flat >= count)
  starts = (ends - tiles)[jnp.clip(flat, 0, count - 1)] * size
  slots = jnp.where(absent, most * size, starts + rank)
  # A tile's expert is the first one that ends behind it. Tiles that are left
  # over come last, with the last expert's id and no assignment.
  numbers = jnp.arange(most, dtype=jnp.int32)[:, None]
  owners = jnp.sum((ends[None, :] <= numbers).astype(jnp.int32), axis=1)
  sources = jnp.full((most * size,), total, jnp.int32)
  sources = sources.at[slots].set(
      jnp.arange(total, dtype=jnp.int32), mode='drop'
  )
  plan = _Plan(
      slots.reshape(experts.shape),
      sources,
      jnp.minimum(owners, count - 1),
      ends,
  )
  return lax.optimization_barrier(plan)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
  """Rows of x; zero where an index is past its end."""
  return jnp.take(x, index, axis=0, mode='fill', fill_value=0)


def _sum_slots(y: jax.Array, slots: jax.Array) -> jax.Array:
  out = _take(y, slots[:, 0])
  for i in range(1, slots.shape[1]):  # fixed order over the k experts
    out = out + _take(y, slots[:, i])
  return out


@jax.custom_vjp
def _dispatch(x, slots, sources):
  return _take(x, sources // slots.shape[1])


_dispatch.defvjp(
    lambda x, slots, sources: (_dispatch(x, slots, sources), slots),
    lambda slots, g: (_sum_slots(g, slots), None, None),
)


@jax.custom_vjp
def _combine(y, slots, sources):
  del sources
  return _sum_slots(y, slots)


_combine.defvjp(
    lambda y, slots, sources: (
        _combine(y, slots, sources),
        (sources, slots.shape[1]),
    ),
    lambda r, g: (_take(g, r[0] // r[1]), None, None),
)


@jax.custom_vjp
def _spread(y, slots, sources):
  del sources
  return _take(y, slots)


_spread.defvjp(
    lambda y, slots, sources: (_spread(y, slots, sources), sources),
    lambda sources, g: (_take(g.reshape(-1, g.shape[-1]), sources), None, None),
)


@jax.custom_vjp
def _dispatch_gates(gates, slots, sources):
  del slots
  return _take(gates.reshape(-1), sources)


_dispatch_gates.defvjp(
    lambda g, slots, sources: (_dispatch_gates(g, slots, sources), slots),
    lambda slots, d: (_take(d, slots), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    dtype: str,
    implementation: str,
) -> jax.Array:
  """Each row times the weights of its group, by a kernel.

  Args:
    x: f32 [n K], rows in order of their group.
    w: f32 [E K N].
    sizes: i32 [E], rows of each group; they sum to n.
    dtype: type of the operands of every product; sums are f32.
    implementation: 'triton' or 'interpret'.

  Returns:
    f32 [n N].
  """
  return _grouped_forward(x, w, sizes, dtype, implementation)[0]


def _grouped_forward(x, w, sizes, dtype, implementation):
  from kernels_triton import grouped_kernel  # needs triton

  x, w = x.astype(dtype), w.astype(dtype)
  y = grouped_kernel.rows_matmul(
      x, w, sizes, transposed=False, implementation=implementation
  )
  return y, (x, w, sizes)


def _grouped_backward(dtype, implementation, residuals, dy):
  from kernels_triton import grouped_kernel  # needs triton

  x, w, sizes = residuals
  dy = dy.astype(dtype)
  dx = grouped_kernel.rows_matmul(
      dy, w, sizes, transposed=True, implementation=implementation
  )
  dw = grouped_kernel.weights_matmul(
      x, dy, sizes, implementation=implementation
  )
  return dx, dw, None


grouped_matmul.defvjp(_grouped_forward, _grouped_backward)


def _kernel_rows(x, gates, experts, w_in, w_out, dtype, implementation):
  plan = _plan(experts, w_in.shape[0], 1)
  ids = jnp.arange(w_in.shape[0], dtype=jnp.int32)[None, :]
  sizes = jnp.sum((experts.reshape(-1, 1) == ids).astype(jnp.int32), axis=0)
  multiply = functools.partial(
      grouped_matmul, sizes=sizes, dtype=dtype, implementation=implementation
  )
  w_in = jnp.asarray(w_in, jnp.float32).reshape(*w_in.shape[:2], -1)
  w_out = jnp.asarray(w_out, jnp.float32)
  up = multiply(_dispatch(x, plan.slots, plan.sources), w_in)
  gate, value = jnp.split(up, 2, axis=-1)
  weights = _dispatch_gates(gates, plan.slots, plan.sources)
  y = multiply(jax.nn.silu(gate) * value * weights[:, None], w_out)
  return y, plan


def _rows(x, gates, experts, w_in, w_out, dtype, implementation):
  """(gate x SwiGLU in order of the experts, f32 [rows D]; the plan)."""
  implementation = launch.resolve(implementation)
  if implementation != launch.REFERENCE:
    return _kernel_rows(x, gates, experts, w_in, w_out, dtype, implementation)
  size = contract.EXPERT_ROWS
  plan = _plan(experts, w_in.shape[0], size)
  padded = _dispatch(x, plan.slots, plan.sources)
  y = expert_tiles.swiglu(
      padded.reshape(-1, size, x.shape[-1]),
      _dispatch_gates(gates, plan.slots, plan.sources).reshape(-1, size),
      jnp.asarray(w_in, jnp.float32),
      jnp.asarray(w_out, jnp.float32),
      plan.experts,
      plan.ends,
  )
  return y.reshape(-1, x.shape[-1]), plan


@functools.partial(jax.named_call, name='expert_ffn')
def expert_ffn(
    x: jax.Array,
    gates: jax.Array,
    experts: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    *,
    dtype: str = 'float32',
    implementation: str | None = None,
) -> jax.Array:
  """Sum over a token's k experts of gate x SwiGLU(x).

  Args:
    x: f32 [n D].
    gates: f32 [n K].
    experts: i32 [n K], distinct in a row.
    w_in: [E D 2 F]; the first of the two feeds silu, the other is its factor.
    w_out: [E F D].
    dtype: type the kernels multiply in; the reference multiplies in f32.
    implementation: see `launch`.

  Returns:
    f32 [n D].
  """
  y, plan = _rows(x, gates, experts, w_in, w_out, dtype, implementation)
  return _combine(y, plan.slots, plan.sources)


@functools.partial(jax.named_call, name='expert_choices')
def expert_choices(
    x: jax.Array,
    gates: jax.Array,
    experts: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    *,
    dtype: str = 'float32',
    implementation: str | None = None,
) -> jax.Array:
  """The terms of `expert_ffn`, apart; zero where an expert is not in [0, E).

  Added in order of k they give the bits of `expert_ffn`.

  Returns:
    f32 [n K D].
  """
  y, plan = _rows(x, gates, experts, w_in, w_out, dtype, implementation)
  return _spread(y, plan.slots, plan.sources)
