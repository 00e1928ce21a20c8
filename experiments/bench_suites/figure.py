"""A measured number and what it has to be."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Figure:
  """A number that does not depend on the machine's speed.

  Attributes:
    name: what it is of.
    value: in `unit`.
    unit: such as 'x' for ratios.
    least: smallest value that we promise, or None.
    most: largest value that we promise, or None.
  """

  name: str
  value: float
  unit: str
  least: float | None = None
  most: float | None = None

  def as_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)

  def __str__(self) -> str:
    out = f'{self.name}: {self.value:.4g} {self.unit}'
    for bound, ok in (
        (self.least, self.least is None or self.value >= self.least),
        (self.most, self.most is None or self.value <= self.most),
    ):
      if bound is not None:
        out += f' (target {bound:g}: {"ok" if ok else "MISSED"})'
    return out
