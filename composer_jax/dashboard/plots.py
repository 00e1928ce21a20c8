"""Pictures in files (PNG by default, or what the file's name says)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import os

from matplotlib import figure
from matplotlib import ticker

_GRID = {'color': '#dddddd', 'linewidth': 0.8}
_DPI = 144


def _save(drawn: figure.Figure, path: str | os.PathLike) -> None:
  drawn.savefig(path, dpi=_DPI)


def _plain(axes) -> None:
  axes.spines[['top', 'right']].set_visible(False)
  axes.set_axisbelow(True)


def log_lines(
    path: str | os.PathLike,
    title: str,
    labels: tuple[str, str],
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    levels: Mapping[str, float],
) -> None:
  """Draws lines over one x, both axes logarithmic.

  Args:
    path: file to write.
    title: text above the picture.
    labels: names of the x and the y axis.
    x: positive, one mark each.
    lines: y values by name, positive.
    levels: horizontal lines to compare with, by name.
  """
  drawn = figure.Figure(figsize=(7.5, 4.8), layout='constrained')
  axes = drawn.subplots()
  axes.set(xscale='log', yscale='log', title=title)
  axes.set(xlabel=labels[0], ylabel=labels[1])
  axes.set_xticks(x, [f'{v:g}' for v in x], minor=False)
  axes.minorticks_off()
  axes.yaxis.set_major_formatter(ticker.StrMethodFormatter('{x:g}'))
  axes.grid(axis='y', **_GRID)
  for name, level in levels.items():
    axes.axhline(level, color='#999999', linestyle='--', linewidth=1)
    axes.annotate(f' {name} {level:g}', (x[0], level), va='bottom', size=8)
  for name, y in lines.items():
    axes.plot(x, y, marker='o', markersize=4, label=name)
  axes.legend(frameon=False, loc='center left', bbox_to_anchor=(1.0, 0.5))
  _plain(axes)
  _save(drawn, path)


def curves(
    path: str | os.PathLike,
    title: str,
    labels: tuple[str, str],
    arms: Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]],
) -> None:
  """Draws the runs of several arms over their steps.

  Args:
    path: file to write.
    title: text above the picture.
    labels: names of the x and the y axis.
    arms: (steps, values) of each run, by name of the arm: thin lines, and a
      thick one for their mean over the steps that all of them have.
  """
  drawn = figure.Figure(figsize=(7.5, 4.8), layout='constrained')
  axes = drawn.subplots()
  axes.set(title=title, xlabel=labels[0], ylabel=labels[1])
  axes.grid(axis='y', **_GRID)
  for number, (name, runs) in enumerate(arms.items()):
    color = f'C{number}'
    for x, y in runs:
      axes.plot(x, y, color=color, linewidth=1, alpha=0.4)
    values = [dict(zip(x, y, strict=True)) for x, y in runs]
    shared = sorted(set.intersection(*map(set, values)))
    mean = [sum(v[x] for v in values) / len(values) for x in shared]
    count = f', {len(runs)} runs' if len(runs) > 1 else ''
    axes.plot(
        shared,
        mean,
        color=color,
        marker='o',
        markersize=4,
        linewidth=2.2,
        label=name + count,
    )
  axes.legend(frameon=False)
  _plain(axes)
  _save(drawn, path)


def bars(
    path: str | os.PathLike, panels: Mapping[str, Mapping[str, float]]
) -> None:
  """Draws panels of labeled bars below each other.

  Args:
    path: file to write.
    panels: title -> fractions by name, the first name on top.
  """
  rows = [len(p) for p in panels.values()]
  drawn = figure.Figure(
      figsize=(8.0, 0.8 * len(rows) + 0.25 * sum(rows)), layout='constrained'
  )
  cells = drawn.subplots(len(rows), squeeze=False, height_ratios=rows)
  for axes, (title, values) in zip(cells[:, 0], panels.items(), strict=True):
    names = [*values][::-1]
    found = axes.barh(names, [values[n] for n in names], color='#4477aa')
    axes.bar_label(found, [f'{values[n]:.2%}' for n in names], padding=3)
    axes.margins(x=0.12)
    axes.set_title(title, loc='left', size=10, weight='bold')
    axes.xaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    axes.grid(axis='x', **_GRID)
    _plain(axes)
  _save(drawn, path)
