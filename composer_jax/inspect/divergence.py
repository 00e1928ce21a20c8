"""Where two recordings of the same computation first differ, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import hashlib
import json
import pathlib

import ml_dtypes
import numpy as np

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
  """What a computation produced, in order of execution.

  Attributes:
    ops: 'layer 1, attention' -> [tokens ...].
    leaves: 'gradient of norm' -> array; what came after the ops.
  """

  ops: Arrays
  leaves: Arrays = dataclasses.field(default_factory=dict)

  def digests(self) -> dict[str, str]:
    """sha256 of every array."""
    return {
        name: hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()
        for name, x in (*self.ops.items(), *self.leaves.items())
    }


@dataclasses.dataclass(frozen=True)
class Difference:
  """The first array that differs, and its first element that does.

  Attributes:
    name: name of the array, such as 'layer 1, attention'.
    token: row of the element if the array has one per token.
    element: index of the element, within its token if there is one.
    dtype: type of the array.
    values: bits of the element on both sides, as unsigned integers.
    ulps: representable numbers between them; None for other types and NaN.
    differing: elements of the array that differ.
    size: elements of the array.
  """

  name: str
  token: int | None
  element: tuple[int, ...]
  dtype: str
  values: tuple[int, int]
  ulps: int | None
  differing: int
  size: int

  def __str__(self) -> str:
    where = [self.name]
    where += [] if self.token is None else [f'token {self.token}']
    where += [f'element {list(self.element)}'] if self.element else []
    width = 2 + 2 * np.dtype(self.dtype).itemsize
    a, b = (f'{v:#0{width}x}' for v in self.values)
    far = '' if self.ulps is None else f', {self.ulps} ulp'
    return (
        f'{", ".join(where)}, {self.dtype}: {a} vs {b}{far}'
        f' ({self.differing} of {self.size} elements differ)'
    )


def bits(x: np.ndarray) -> np.ndarray:
  """The array as unsigned integers of its width."""
  x = np.asarray(x, order='C')
  return x.view(f'u{x.dtype.itemsize}')


def first(a: Record, b: Record) -> Difference | None:
  """The first difference in order of execution; None if all bits are equal.

  Everything that the first differing op has read is equal on both sides, so
  the op itself is what is to be looked at.

  Raises:
    ValueError: the records are of different computations.
  """
  for x, y, per_token in ((a.ops, b.ops, True), (a.leaves, b.leaves, False)):
    if list(x) != list(y):
      only = sorted({*x} ^ {*y}) or 'their order'
      raise ValueError(f'records of different computations: {only} differ')
    for name in x:
      if found := _first(name, x[name], y[name], per_token):
        return found
  return None


def _first(name, x, y, per_token) -> Difference | None:
  if (x.shape, x.dtype) != (y.shape, y.dtype):
    raise ValueError(
        f'{name}: {x.dtype} {x.shape} and {y.dtype} {y.shape}; records of'
        ' different computations'
    )
  u, v = bits(x), bits(y)
  differs = u != v
  if not differs.any():
    return None
  at = tuple(int(i) for i in np.argwhere(differs)[0])
  token, element = (at[0], at[1:]) if per_token else (None, at)
  values = int(u[at]), int(v[at])
  return Difference(
      name,
      token,
      element,
      x.dtype.name,
      values,
      _ulps(values, x.dtype) if np.isfinite([x[at], y[at]]).all() else None,
      int(differs.sum()),
      differs.size,
  )


def _ulps(values: tuple[int, int], dtype: np.dtype) -> int | None:
  if dtype.kind not in 'fV':  # ml_dtypes are of kind V
    return None
  sign = 1 << (8 * dtype.itemsize - 1)
  a, b = (-(v & ~sign) if v & sign else v for v in values)
  return abs(a - b)


def digest(records: Mapping[str, Record]) -> str:
  """sha256 over the digests of all arrays: equal iff every bit is."""
  every = {name: list(r.digests().items()) for name, r in records.items()}
  return hashlib.sha256(json.dumps(every, sort_keys=True).encode()).hexdigest()


def save(path: pathlib.Path, records: Mapping[str, Record]) -> None:
  """Writes records by name to an npz file."""
  flat = [
      (record, kind, name, x)
      for record, found in records.items()
      for kind in ('ops', 'leaves')
      for name, x in getattr(found, kind).items()
  ]
  index = [(*where, x.dtype.name) for *where, x in flat]
  # By number: names hold slashes, and numpy knows no bfloat16.
  arrays = {str(i): bits(x) for i, (*_, x) in enumerate(flat)}
  with path.open('wb') as f:
    np.savez(f, index=json.dumps(index), **arrays)


def load(path: pathlib.Path) -> dict[str, Record]:
  """Inverse of `save`."""
  out: dict[str, Record] = {}
  with np.load(path) as data:
    for i, (record, kind, name, dtype) in enumerate(
        json.loads(str(data['index']))
    ):
      kinds = ml_dtypes.bfloat16 if dtype == 'bfloat16' else np.dtype(dtype)
      found = out.setdefault(record, Record({}, {}))
      getattr(found, kind)[name] = data[str(i)].view(kinds)
  return out
