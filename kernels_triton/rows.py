"""Row-wise functions on blocks of a constant number of rows.

A matmul, a sum or an exp over [n, d] compiles to different instructions for
different n, and its last bits follow. Here the compiler only ever sees
[ROWS, d]: the bits of a row do not depend on how many others there are.

Where Triton kernels run, the operations that reduce inside such a function are
kernels with tiles of their own, so it is called once on all rows.
"""

from collections.abc import Callable
import functools

import jax
from jax import lax
import jax.numpy as jnp

from kernels_triton import contract
from kernels_triton import launch


def run_rows(
    f: Callable,
    params,
    *xs: jax.Array,
    implementation: str | None = None,
):
  """Runs f(params, *rows) block by block.

  The optimization barriers keep padding, slicing and neighbouring operations
  out of the block's fusions; without them the block's code would depend on
  its surroundings again. That of params matters where there is one block only:
  its loop is inlined, and what made them (the transpose of a tied embedding)
  would be folded into the block's product.

  Args:
    f: maps (params, *[ROWS, ...]) to a pytree of [ROWS, ...].
    params: pytree passed to every block unchanged.
    *xs: arrays [n, ...] with one common n.
    implementation: what `f` passes to the operations inside it.

  Returns:
    The pytree of f with leading dimension n.
  """
  if launch.resolve(implementation) != launch.REFERENCE:
    return f(params, *xs)
  params = lax.optimization_barrier(params)
  n = xs[0].shape[0]
  size = contract.ROWS
  blocks = -(-n // size)

  def split(x):
    pad = [(0, blocks * size - n)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, pad).reshape(blocks, size, *x.shape[1:])

  def block(rows):
    return lax.optimization_barrier(f(params, *lax.optimization_barrier(rows)))

  out = lax.map(block, tuple(split(x) for x in xs))
  return jax.tree.map(lambda o: o.reshape(-1, *o.shape[2:])[:n], out)


def rowwise(f: Callable, implementation: str | None = None) -> Callable:
  """`run_rows` forward, plain batched backward.

  Forward bits are the contract; the backward only has to be deterministic run
  to run, so it differentiates f on all rows at once and is fast.
  """
  if launch.resolve(implementation) != launch.REFERENCE:
    return f

  run = functools.partial(run_rows, f, implementation=implementation)

  @jax.custom_vjp
  def apply(params, *xs):
    return run(params, *xs)

  def forward(params, *xs):
    return run(params, *xs), (params, xs)

  def backward(residuals, cotangents):
    params, xs = residuals
    return jax.vjp(f, params, *xs)[1](cotangents)

  apply.defvjp(forward, backward)
  return apply
