"""Which source fills which rows of a batch.

A pure function of weights and of the rows dealt so far: a resumed run goes on
with the very source that would have come next, on any number of machines.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import fractions
import math
from typing import Protocol

from composer_jax import trace
from composer_jax.data import stream

Cursors = Mapping[str, stream.Cursor]


class Source(Protocol):
  """Documents without end."""

  def next(
      self, cursor: stream.Cursor, rows: int
  ) -> tuple[list[trace.TokenTrace], stream.Cursor]:
    """Returns documents that fill `rows` rows, and the cursor behind them."""
    ...


def deal(
    weights: Mapping[str, float], given: Mapping[str, int], rows: int
) -> dict[str, int]:
  """Gives each row to the source that is furthest behind its share.

  After n rows a source of share w has had fewer than w n + 1 of them.

  Args:
    weights: shares of the sources, positive; ties go to the first.
    given: rows that each has had.
    rows: rows to give.

  Returns:
    Rows for each source.
  """
  exact = {name: fractions.Fraction(w) for name, w in weights.items()}
  scale = math.lcm(*(f.denominator for f in exact.values()))
  whole = {name: int(f * scale) for name, f in exact.items()}
  total = sum(whole.values())
  have = dict(given)
  first = sum(have.values()) + 1
  for count in range(first, first + rows):
    behind = max(
        whole, key=lambda name: whole[name] * count - total * have[name]
    )
    have[behind] += 1
  return {name: have[name] - given[name] for name in weights}


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
  """Documents of several sources, side by side in the rows of a batch.

  Attributes:
    sources: sources by name.
    weights: share of the ROWS that each fills, up to a common factor.
  """

  sources: Mapping[str, Source]
  weights: Mapping[str, float]

  def next(
      self, cursors: Cursors, rows: int
  ) -> tuple[list[trace.TokenTrace], Cursors]:
    """Documents of one batch.

    Args:
      cursors: cursors of the sources; {} is the beginning.
      rows: rows of the batch.

    Returns:
      Documents, and the cursors behind them.
    """
    cursors = {
        name: cursors.get(name, stream.Cursor()) for name in self.weights
    }
    given = {name: cursor.rows for name, cursor in cursors.items()}
    documents = []
    for name, share in deal(self.weights, given, rows).items():
      if share:
        some, cursors[name] = self.sources[name].next(cursors[name], share)
        documents += some
    return documents, cursors
