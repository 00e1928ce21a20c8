"""Runs a function and keeps the values that it names on the way.

The model names what is worth looking at with `jax.ad_checkpoint`'s
`checkpoint_name`, an identity that is gone before a program is compiled.
`capture` traces a function, turns those names into outputs, and leaves every
equation as it was.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

Named = collections.OrderedDict[str, jax.Array]  # in order of execution


def capture(f: Callable[..., Any]) -> Callable[..., tuple[Any, Named]]:
  """Makes f return (its result, the values it names).

  A name that is met once per layer, in an unrolled loop or in a `lax.scan`, is
  stacked: [layers, ...] in the order of execution. Wrap the result in
  `jax.jit`.

  Raises:
    ValueError: when called, if a name stands inside a while loop, a branch or
      a custom derivative, where values cannot be taken out.
  """

  def wrapped(*args):
    closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
    out, found = _evaluate(closed, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), out), _joined(found)

  return wrapped


_Found = dict[str, list[jax.Array]]  # name -> arrays [occurrences, ...]


def _joined(found: _Found) -> Named:
  return collections.OrderedDict(
      (name, jnp.concatenate(parts)) for name, parts in found.items()
  )


def _jaxprs(eqn: core.JaxprEqn) -> list[core.ClosedJaxpr]:
  leaves = jax.tree.leaves(
      list(eqn.params.values()),
      is_leaf=lambda x: isinstance(x, (core.Jaxpr, core.ClosedJaxpr)),
  )
  closed = [
      core.ClosedJaxpr(x, ()) for x in leaves if isinstance(x, core.Jaxpr)
  ]
  return closed + [x for x in leaves if isinstance(x, core.ClosedJaxpr)]


def _names(jaxpr: core.Jaxpr) -> set[str]:
  """Names in a jaxpr, whatever they are nested in."""
  out = set()
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'name':
      out.add(eqn.params['name'])
    for inner in _jaxprs(eqn):
      out |= _names(inner.jaxpr)
  return out


def _evaluate(
    closed: core.ClosedJaxpr, args: Sequence[Any]
) -> tuple[list[Any], _Found]:
  jaxpr = closed.jaxpr
  env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
  env |= zip(jaxpr.invars, args, strict=True)
  read = lambda v: v.val if isinstance(v, core.Literal) else env[v]
  found: _Found = {}
  for eqn in jaxpr.eqns:
    out, inner = _equation(eqn, [read(v) for v in eqn.invars])
    env |= zip(eqn.outvars, out, strict=True)
    for name, parts in inner.items():
      found.setdefault(name, []).extend(parts)
  return [read(v) for v in jaxpr.outvars], found


def _equation(eqn: core.JaxprEqn, args: list[Any]) -> tuple[list[Any], _Found]:
  kind = eqn.primitive.name
  if kind == 'name':
    return args, {eqn.params['name']: [args[0][None]]}
  inside = {n for inner in _jaxprs(eqn) for n in _names(inner.jaxpr)}
  if not inside:
    params = eqn.primitive.get_bind_params(eqn.params)
    out = eqn.primitive.bind(*args, **params)
    return (out if eqn.primitive.multiple_results else [out]), {}
  if kind == 'jit':
    return _evaluate(eqn.params['jaxpr'], args)
  if kind == 'scan':
    return _scan(eqn, args)
  raise ValueError(
      f'{sorted(inside)}: named inside {kind!r}, where values cannot be taken'
      ' out; name them where they leave it'
  )


def _scan(eqn: core.JaxprEqn, args: list[Any]) -> tuple[list[Any], _Found]:
  """The same scan with the named values among its stacked outputs."""
  body = eqn.params['jaxpr']
  # What is scanned has one axis less inside.
  whole = lambda vs, ins: sum(
      v.aval.ndim == i.aval.ndim for v, i in zip(vs, ins, strict=True)
  )
  carried = whole(eqn.outvars, body.jaxpr.outvars)
  constant = whole(eqn.invars, body.jaxpr.invars) - carried
  consts, init = args[:constant], args[constant : constant + carried]

  def step(carry, xs):
    out, found = _evaluate(body, [*consts, *carry, *xs])
    return out[:carried], (out[carried:], _joined(found))

  options = {k: eqn.params[k] for k in ('length', 'reverse', 'unroll')}
  last, (stacked, found) = lax.scan(
      step, init, args[constant + carried :], **options
  )
  merge = lambda x: [x.reshape(-1, *x.shape[2:])]
  return [*last, *stacked], {name: merge(x) for name, x in found.items()}
