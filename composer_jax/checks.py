"""What a config may hold: declared on its fields, refused in one way.

A field says its range beside its type,

  slots: Annotated[int, Range(1, 65_536)] = 256

and `__post_init__` calls `fields(self)`, then `require` for what holds between
fields. So every value is checked where it is declared, before anything is built.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import typing
from typing import Annotated, Any


@dataclasses.dataclass(frozen=True)
class Range:
  """Numbers that a field may hold.

  Attributes:
    low: Smallest one.
    high: Largest one; inf allows inf.
    above: Leaves `low` itself out.
  """

  low: float
  high: float = math.inf
  above: bool = False

  def __contains__(self, value: float) -> bool:
    return self.low <= value <= self.high and not (  # False for nan
        self.above and value == self.low
    )

  def __str__(self) -> str:
    low = f'above {self.low:,}' if self.above else f'at least {self.low:,}'
    return low if self.high == math.inf else f'{low} and at most {self.high:,}'


_INT32 = 2**31 - 1  # what counts on a device are held in
Count = Annotated[int, Range(1, _INT32)]
Natural = Annotated[int, Range(0, _INT32)]
Tokens = Annotated[int, Range(1, 2**24)]  # of one sequence
Rows = Annotated[int, Range(1, 2**20)]  # of a batch
Seed = Annotated[int, Range(0, 2**32 - 1)]
Share = Annotated[float, Range(0, 1)]
Weight = Annotated[float, Range(0, 1e6)]
Seconds = Annotated[float, Range(0, 30 * 86_400, above=True)]


def require(owner: Any, *conditions: tuple[Any, str, str]) -> None:
  """Refuses an object of which a condition does not hold.

  Args:
    owner: The object.
    *conditions: (whether it holds, field to blame, what it must be).

  Raises:
    ValueError: Names the first such field, its value and the cure.
  """
  for ok, field, cure in conditions:
    if not ok:
      value = getattr(owner, field)
      raise ValueError(f'{type(owner).__name__}.{field}={value!r}: {cure}')


def fields(owner: Any) -> None:
  """Refuses an object with a field that holds what it does not declare.

  Numbers with a `Range` and `Literal` texts are checked.

  Raises:
    ValueError: As `require`; also for a number of another kind than declared.
  """
  for name, (kind, allowed) in declared(type(owner)).items():
    value = getattr(owner, name)
    if value is None:  # Whether it may be is the type's affair.
      continue
    if isinstance(allowed, tuple):
      cure = ' or '.join(map(repr, allowed))
      require(owner, (value in allowed, name, f'must be {cure}'))
      continue
    exact = numbers.Integral if kind is int else numbers.Real
    number = isinstance(value, exact) and not isinstance(value, bool)
    cure = 'must be a whole number' if kind is int else 'must be a number'
    require(
        owner,
        (number, name, cure),
        (number and value in allowed, name, f'must be {allowed}'),
    )


@functools.cache
def declared(cls: type) -> dict[str, tuple[type, Range | tuple[str, ...]]]:
  """Returns field -> (type, range or texts) of the fields that declare them."""
  out = {}
  for name, hint in typing.get_type_hints(cls, include_extras=True).items():
    for option in (hint, *typing.get_args(hint)):
      if typing.get_origin(option) is typing.Literal:
        out[name] = str, typing.get_args(option)
      for extra in getattr(option, '__metadata__', ()):
        if isinstance(extra, Range):
          out[name] = typing.get_args(option)[0], extra
  return out
