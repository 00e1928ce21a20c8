"""Charts as inline SVG: pure functions from numbers to markup.

A chart is 400 units wide and shown at about that many pixels, on a phone as
on a desktop, so that its text keeps its size. Colors are CSS variables of the
page (`--s0`...), which is how it follows light and dark. The points that a
pointer reads out travel in `data-read`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import html
import itertools
import json
import math

_WIDTH, _HEIGHT = 400, 232
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 16, 24, 36
_MAX_POINTS = 300


@dataclasses.dataclass(frozen=True)
class Series:
  """One line of a chart.

  Attributes:
    name: its text in the legend.
    x: values, increasing.
    y: values, as many.
    error: half length of the whisker at every point, or none.
    color: which `--sN`.
    faint: thin and pale, for the raw values below a smoothed line.
  """

  name: str
  x: Sequence[float]
  y: Sequence[float]
  error: Sequence[float] | None = None
  color: int = 0
  faint: bool = False


def ticks(low: float, high: float, count: int = 5) -> list[float]:
  """About `count` multiples of 1, 2 or 5 times a power of ten in a range."""
  span = high - low
  if span <= 0 or not math.isfinite(span):
    return [low]
  raw = span / count
  power = 10.0 ** math.floor(math.log10(raw))
  unit = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
  first, last = math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9)
  return [float(f'{i * unit:.12g}') for i in range(first, last + 1)]


def number(value: float) -> str:
  """A short label: 0, 0.25, 1.2k, 3M, 2e-6."""
  if value == 0:
    return '0'
  value = float(f'{value:.3g}')
  for scale, suffix in ((1e9, 'G'), (1e6, 'M'), (1e4, 'k')):
    if abs(value) >= scale:
      return f'{value / (1e3 if suffix == "k" else scale):.3g}{suffix}'
  if abs(value) >= 1000:
    return f'{value:.0f}'
  if abs(value) >= 1e-3:
    return f'{value:.3g}'
  return f'{value:.2g}'.replace('e-0', 'e-')


def trailing_mean(y: Sequence[float], window: int) -> list[float]:
  """Mean of each value and those before it, over at most `window` values."""
  sums = [0.0, *itertools.accumulate(y)]
  return [
      (sums[i] - sums[max(0, i - window)]) / min(i, window)
      for i in range(1, len(sums))
  ]


def _thin(x: Sequence[float], y: Sequence[float]) -> list[int]:
  """Indices to draw: all, or the extremes of equal bins, so peaks survive."""
  if len(x) <= _MAX_POINTS:
    return list(range(len(x)))
  edges = [i * len(x) * 2 // _MAX_POINTS for i in range(_MAX_POINTS // 2 + 1)]
  keep = {0, len(x) - 1}
  for a, b in itertools.pairwise(edges):
    keep |= {min(range(a, b), key=y.__getitem__)}
    keep |= {max(range(a, b), key=y.__getitem__)}
  return sorted(keep)


class _Frame:
  """Maps values to the drawing area and draws grid, ticks and labels."""

  def __init__(self, x_range, y_range, x_label: str, y_label: str):
    (self._x0, self._x1), (low, high) = x_range, y_range
    if self._x1 <= self._x0:
      self._x0, self._x1 = self._x0 - 0.5, self._x0 + 0.5
    if high <= low:
      high = low + (abs(low) * 0.1 or 1.0)
    self._y_ticks = ticks(low, high)
    unit = self._y_ticks[1] - self._y_ticks[0] if len(self._y_ticks) > 1 else 0
    # The top is a tick, so that every value lies between two labels.
    if unit and self._y_ticks[-1] < high - 1e-9 * abs(high):
      self._y_ticks.append(float(f'{self._y_ticks[-1] + unit:.12g}'))
    if unit and self._y_ticks[0] > low + 1e-9 * abs(low):
      self._y_ticks.insert(0, float(f'{self._y_ticks[0] - unit:.12g}'))
    self._y0 = min(low, self._y_ticks[0])
    self._y1 = max(high, self._y_ticks[-1])
    self._labels = x_label, y_label

  def x(self, value: float) -> float:
    part = (value - self._x0) / (self._x1 - self._x0)
    return round(_LEFT + part * (_WIDTH - _LEFT - _RIGHT), 1)

  def y(self, value: float) -> float:
    part = (value - self._y0) / (self._y1 - self._y0)
    return round(_HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM), 1)

  def grid(self, x_ticks: Sequence[float] | None = None) -> list[str]:
    out = []
    for value in self._y_ticks:
      y = self.y(value)
      out.append(
          f'<line class="{"grid" if value else "axis"}" x1="{_LEFT}" y1="{y}"'
          f' x2="{_WIDTH - _RIGHT}" y2="{y}"/>'
          f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">'
          f'{number(value)}</text>'
      )
    base = _HEIGHT - _BOTTOM
    if x_ticks is None:
      x_ticks = [t for t in ticks(self._x0, self._x1) if t == int(t)]
    for value in x_ticks:
      x = self.x(value)
      out.append(
          f'<line class="axis" x1="{x}" y1="{base}" x2="{x}" y2="{base + 4}"/>'
          f'<text x="{x}" y="{base + 16}" text-anchor="middle">'
          f'{number(value)}</text>'
      )
    x_label, y_label = map(html.escape, self._labels)
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    out.append(
        f'<line class="axis" x1="{_LEFT}" y1="{base}" x2="{_WIDTH - _RIGHT}"'
        f' y2="{base}"/><text class="label" x="4" y="12">{y_label}</text>'
        f'<text class="label" x="{middle}" y="{_HEIGHT - 4}"'
        f' text-anchor="middle">{x_label}</text>'
    )
    return out


def _figure(
    names: Sequence[tuple[str, int, str]],
    parts: Sequence[str],
    reading: Sequence[Mapping[str, object]],
    alt: str,
) -> str:
  """Legend and drawing together; `reading` is what a pointer shows."""
  legend = ''
  if len(names) > 1:
    keys = ''.join(
        f'<li class="{kind}" style="--c:var(--s{color})">'
        f'{html.escape(name)}</li>'
        for name, color, kind in names
    )
    legend = f'<ul class="legend">{keys}</ul>'
  read = html.escape(json.dumps(reading, separators=(',', ':')))
  return (
      f'{legend}<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
      f' aria-label="{html.escape(alt)}" data-read="{read}">'
      f'{"".join(parts)}</svg>'
  )


def _reading(name: str, color: int, points) -> dict[str, object]:
  return {'n': name, 'c': color, 'p': [list(p) for p in points]}


def _limits(values: Sequence[float], low: float | None, high: float | None):
  return (
      min(values) if low is None else min(low, *values),
      max(values) if high is None else max(high, *values),
  )


def lines(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    levels: Mapping[str, float] | None = None,
    low: float | None = 0.0,
    high: float | None = None,
) -> str | None:
  """Draws lines over a common x axis, which begins at 0.

  Args:
    series: those without points are left out.
    x_label: name of the x axis with its unit.
    y_label: name of the y axis with its unit.
    levels: name -> a constant to compare with, drawn dashed.
    low: a value the y axis must reach down to; None: fit the values.
    high: a value the y axis must reach up to; None: fit the values.

  Returns:
    Markup, or None if there is nothing to draw.
  """
  series = [s for s in series if len(s.x)]
  if not series:
    return None
  ends = [
      y + side * e
      for s in series
      for y, e in zip(s.y, s.error or [0.0] * len(s.y), strict=True)
      for side in (-1, 1)
  ]
  levels = levels or {}
  ends += levels.values()
  xs = [0.0, *(x for s in series for x in s.x)]
  frame = _Frame((min(xs), max(xs)), _limits(ends, low, high), x_label, y_label)
  parts, reading = frame.grid(), []
  for value in levels.values():
    y = frame.y(value)
    parts.append(
        f'<line class="level" x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}"'
        f' y2="{y}"/>'
    )
  for s in series:
    drawn = [(frame.x(s.x[i]), frame.y(s.y[i]), i) for i in _thin(s.x, s.y)]
    stroke = f'style="--c:var(--s{s.color})"'
    for px, _, i in drawn if s.error else ():
      y1, y2 = (frame.y(s.y[i] + e) for e in (-s.error[i], s.error[i]))
      parts.append(
          f'<line class="error" {stroke} x1="{px}" y1="{y1}" x2="{px}"'
          f' y2="{y2}"/>'
      )
    path = ' '.join(f'{px},{py}' for px, py, _ in drawn)
    kind = 'line faint' if s.faint else 'line'
    parts.append(f'<polyline class="{kind}" {stroke} points="{path}"/>')
    if len(drawn) <= 30 and not s.faint:
      parts += [
          f'<circle class="dot" {stroke} cx="{px}" cy="{py}" r="2.6"/>'
          for px, py, _ in drawn
      ]
    labels = (
        number(s.y[i]) + (f' ± {number(s.error[i])}' if s.error else '')
        for *_, i in drawn
    )
    reading.append(
        _reading(
            s.name,
            s.color,
            (
                (px, py, f'{x_label} {s.x[i]:g}', label)
                for (px, py, i), label in zip(drawn, labels, strict=True)
            ),
        )
    )
  names = [(s.name, s.color, 'faint' if s.faint else '') for s in series]
  names += [(f'{name}: {number(v)}', 5, 'level') for name, v in levels.items()]
  return _figure(names, parts, reading, f'{y_label} over {x_label}')


def bars(
    values: Sequence[float], *, x_label: str, y_label: str, name: str
) -> str | None:
  """Draws one bar for each of 0, 1, 2, ...; None if all are zero."""
  if not any(values):
    return None
  n = len(values)
  frame = _Frame((-0.5, n - 0.5), (0.0, max(values)), x_label, y_label)
  step = max(1, math.ceil(n / 10))
  parts, points = frame.grid(range(0, n, step)), []
  base = frame.y(0.0)
  for i, value in enumerate(values):
    x1, x2, y = frame.x(i - 0.4), frame.x(i + 0.4), frame.y(value)
    parts.append(
        f'<rect class="bar" x="{x1}" y="{y}" width="{x2 - x1:.1f}"'
        f' height="{base - y:.1f}"/>'
    )
    points.append((frame.x(i), y, f'{x_label} {i}', number(value)))
  reading = [_reading(name, 0, points)]
  return _figure([(name, 0, '')], parts, reading, f'{y_label} over {x_label}')


def stacked(
    x: Sequence[float],
    layers: Mapping[str, Sequence[float]],
    *,
    x_label: str,
    y_label: str,
) -> str | None:
  """Draws layers on top of each other.

  Args:
    x: values, increasing.
    layers: name -> one value per x, bottom layer first.
    x_label: name of the x axis with its unit.
    y_label: name of the y axis with its unit.

  Returns:
    Markup, or None if there is nothing to draw.
  """
  if not x or not layers:
    return None
  # Neighbors are averaged, which keeps the areas.
  size = max(1, math.ceil(len(x) / _MAX_POINTS))
  cut = [slice(i, i + size) for i in range(0, len(x), size)]

  def mean(values):
    return [sum(values[c]) / len(values[c]) for c in cut]

  xs = mean(x)
  tops = [[0.0] * len(xs)]
  parts, reading = [], []
  for values in layers.values():
    tops.append([a + b for a, b in zip(tops[-1], mean(values), strict=True)])
  frame = _Frame(
      (min(0.0, xs[0]), xs[-1]), (0.0, max(tops[-1])), x_label, y_label
  )
  for color, (name, values) in enumerate(layers.items()):
    below, edge = (
        [(frame.x(a), frame.y(b)) for a, b in zip(xs, top, strict=True)]
        for top in tops[color : color + 2]
    )
    path = ' '.join(f'{a},{b}' for a, b in edge + below[::-1])
    parts.append(
        f'<polygon class="area" style="--c:var(--s{color})" points="{path}"/>'
    )
    reading.append(
        _reading(
            name,
            color,
            (
                (px, py, f'{x_label} {a:.4g}', number(v))
                for (px, py), a, v in zip(edge, xs, mean(values), strict=True)
            ),
        )
    )
  names = [(name, color, '') for color, name in enumerate(layers)]
  # The grid lies over the areas, or they would hide it.
  return _figure(
      names, parts + frame.grid(), reading, f'{y_label} over {x_label}'
  )


def shares(rows: Mapping[str, Mapping[str, float]]) -> str | None:
  """Draws one bar per row, each cut into parts that make up 100%.

  Args:
    rows: title of the row -> name of the part -> seconds; the last part is
      what is left, and pale.

  Returns:
    Markup, or None if no row has any time in it.
  """
  out = []
  for title, parts in rows.items():
    whole = sum(parts.values())
    if whole <= 0:
      continue
    bar, keys, last = '', '', len(parts) - 1
    for color, (name, value) in enumerate(parts.items()):
      ink = '--line' if color == last else f'--s{color}'
      style = f'--c:var({ink});--w:{100 * value / whole:.2f}%'
      bar += f'<i style="{style}"></i>'
      keys += (
          f'<li style="{style}">{html.escape(name)} {number(value)} s'
          f' <small>{value / whole:.0%}</small></li>'
      )
    out.append(
        f'<dt>{html.escape(title)} <small>{number(whole)} s</small></dt>'
        f'<dd><div class="bar">{bar}</div><ul class="legend">{keys}</ul></dd>'
    )
  return f'<dl class="shares">{"".join(out)}</dl>' if out else None
