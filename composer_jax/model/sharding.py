"""How the devices of a mesh share a model, and what its code says about it.

The train step is one `jax.shard_map` over all axes: a device runs the layers on
its own rows, on shapes that no compiler cuts again, so a row has the same bits
on any mesh that leaves tensors whole (tensor = 1). Every function here reads
the axes of the `shard_map` that it is traced in. Outside of one, as in decode,
nothing is shared and each is the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

DATA, FSDP, EXPERT, TENSOR = AXES = ('data', 'fsdp', 'expert', 'tensor')
ROWS = (DATA, FSDP, EXPERT)  # what splits the rows of a batch

# Logical axis of a tensor -> mesh axis. Vocabulary and router stay whole.
RULES = {
    'embed': FSDP,
    'experts': EXPERT,
    'q_heads': TENSOR,
    'kv_heads': TENSOR,
    'q_bias': TENSOR,
    'kv_bias': TENSOR,
    'moe_ffn': TENSOR,
    'shared_ffn': TENSOR,
    # Where no axis is the model's width.
    'q_latent': FSDP,
    'kv_latent': FSDP,
}


def size(axis: str) -> int:
  """Devices along a mesh axis that share what is traced now."""
  mesh = jax.sharding.get_abstract_mesh()
  return mesh.shape[axis] if axis in mesh.manual_axes else 1


def over_mesh(
    f: Callable[..., Any],
    mesh: jax.sharding.Mesh,
    *,
    in_specs: tuple[Any, ...],
    out_specs: Any,
) -> Callable[..., Any]:
  """`shard_map` over all axes, of arguments that may lie anywhere.

  Args:
    f: sees a device's parts.
    mesh: with `AXES`.
    in_specs: of each argument, as for `shard_map`.
    out_specs: of what f returns.
  """
  mapped = jax.shard_map(
      f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )
  places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), in_specs)
  return lambda *args: mapped(*jax.sharding.reshard(args, places))


def heads(count: int) -> int:
  """A device's part of a number of heads."""
  return count // size(TENSOR)


def whole(tree: Any, specs: Any, *, skip: int = 0) -> Any:
  """Gathers tensors that are split over FSDP; their gradients are scattered.

  Args:
    tree: of a device's parts.
    specs: the tree's PartitionSpecs.
    skip: leading axes that a spec has and its tensor has no more.
  """

  def leaf(x, spec):
    axes = tuple(spec)[skip:]
    if FSDP not in axes:
      return x
    return lax.all_gather(x, FSDP, axis=axes.index(FSDP), tiled=True)

  return jax.tree.map(leaf, tree, specs) if size(FSDP) > 1 else tree


def passed_on(tree: Any) -> Any:
  """To the next device on the ring of those that share the experts."""
  n = size(EXPERT)
  return lax.ppermute(tree, EXPERT, [(i, (i + 1) % n) for i in range(n)])


def summed(grads: Any, specs: Any) -> Any:
  """Adds gradients of a device's rows to those of the others' rows.

  An axis that splits the tensor itself has added them up on the way back.
  """

  def leaf(g: jax.Array, spec: PartitionSpec) -> jax.Array:
    axes = tuple(a for a in ROWS if a not in spec and size(a) > 1)
    return lax.psum(g, axes) if axes else g  # of one device it would copy

  return jax.tree.map(leaf, grads, specs)


@jax.custom_vjp
def _fan_out(x):
  return x


_fan_out.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, TENSOR),))


@jax.custom_vjp
def _fan_in(x):
  return lax.psum(x, TENSOR)


_fan_in.defvjp(lambda x: (lax.psum(x, TENSOR), None), lambda _, g: (g,))


def fan_out(x: Any) -> Any:
  """A value that each TENSOR device uses for its part of a sum.

  Theirs are parts of its gradient, too: they are added (Shoeybi et al., arXiv
  1909.08053, section 3).
  """
  return jax.tree.map(_fan_out, x) if size(TENSOR) > 1 else x


def fan_in(x: jax.Array) -> jax.Array:
  """The sum of the TENSOR devices' parts; the counterpart of `fan_out`."""
  return _fan_in(x) if size(TENSOR) > 1 else x
