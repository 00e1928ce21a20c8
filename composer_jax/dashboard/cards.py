"""A chart with its words: what the sections of the report consist of."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from composer_jax.dashboard import charts
from composer_jax.dashboard import data

STEP = 'RL step'


@dataclasses.dataclass(frozen=True)
class Card:
  """One chart with its words.

  Attributes:
    title: what is drawn.
    note: how to read it.
    chart: markup; None if the run has no such figures yet.
    alarm: the note says that something is wrong.
    wide: takes the whole width of the page.
  """

  title: str
  note: str
  chart: str | None
  alarm: bool = False
  wide: bool = False


def draw(run: data.RunData, names: Mapping[str, str], y_label: str, **limits):
  """Draws figures of the RL phase, key -> name, in the order of colors."""
  series = [
      charts.Series(name, *run.series('rl', key), color=color)
      for color, (key, name) in enumerate(names.items())
  ]
  return charts.lines(series, x_label=STEP, y_label=y_label, **limits)
