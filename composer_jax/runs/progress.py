"""Progress of a loop: a live bar on a terminal, sparse plain lines elsewhere.

Usage:
  with progress.Progress(100, 'step', label='rl') as bar:
    for step in range(100):
      ...
      bar.update(step + 1, tokens_per_second=9e3, reward=0.4, mismatch=0.0)
"""

from __future__ import annotations

from collections.abc import Callable
import time
from typing import Self

from rich import console as rich_console
from rich import live
from rich import progress_bar
from rich import table
from rich import text

_NAMES = {'tokens_per_second': 'tokens/s', 'bits_per_byte': 'bits/byte'}


def figure(value: float | str) -> str:
  """A number in at most six characters: 0, 0.412, 3.1e-06, 12.3k, 4.5M."""
  if isinstance(value, str):
    return value
  if value == 0:
    return '0'  # exact zeros are claims: a rounded value never looks so
  value = float(f'{value:.3g}')  # first, so that 999.9k turns into 1M
  for scale, suffix in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if abs(value) >= scale:
      return f'{value / scale:.3g}{suffix}'
  return f'{value:.3g}' if abs(value) >= 1e-3 else f'{value:.1e}'


def duration(seconds: float) -> str:
  """Whole seconds as m:ss or h:mm:ss."""
  minutes, seconds = divmod(int(seconds + 0.5), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}:{minutes:02}:{seconds:02}'
  return f'{minutes}:{seconds:02}'


class Progress:
  """Context that shows how far a loop has come and its latest figures."""

  def __init__(
      self,
      total: int,
      unit: str,
      *,
      label: str = '',
      start: int = 0,
      every_seconds: float = 5.0,
      console: rich_console.Console | None = None,
      clock: Callable[[], float] = time.monotonic,
  ):
    """Describes the loop; nothing is shown before the context is entered.

    Args:
      total: number of units in the whole loop.
      unit: what is counted, singular ('step', 'task').
      label: the phase ('midtrain', 'rl').
      start: units already done, after a resume.
      every_seconds: least time between two plain lines (not on a terminal).
      console: where to show it; standard output by default.
      clock: seconds from any origin.
    """
    self._total, self._unit, self._label = total, unit, label
    self._every, self._clock = every_seconds, clock
    self._console = console or rich_console.Console(soft_wrap=True)
    self._step = start
    self._figures: dict[str, float | str] = {}
    # The first update waited for compilation, so the pace is taken from it on.
    self._first: tuple[int, float] | None = None
    self._latest = self._shown = 0.0
    self._live: live.Live | None = None

  def __enter__(self) -> Self:
    self._began = self._latest = self._clock()
    self._shown = self._began
    if self._console.is_terminal:
      self._live = live.Live(
          console=self._console,
          get_renderable=self._render,
          refresh_per_second=2,
      )
      self._live.start()
    return self

  def __exit__(self, *unused) -> None:
    if self._live is not None:
      self._live.stop()
    elif self._latest > self._shown:
      self._print()

  def update(self, step: int, **figures: float | str) -> None:
    """Notes that `step` units are done; figures stay until replaced."""
    now = self._clock()
    self._step, self._latest = step, now
    # Replaced, not changed: the terminal is refreshed by another thread.
    self._figures = self._figures | figures
    if self._first is None:
      self._first = (step, now)
    if self._live is None and now - self._shown >= self._every:
      self._print()

  def _print(self) -> None:
    self._shown = self._clock()
    head = f'{self._label} {self._count()}'.strip()
    parts = [head, *self._parts(), self._times()]
    self._console.print(
        ' | '.join(parts), markup=False, highlight=False, soft_wrap=True
    )

  def _count(self) -> str:
    return f'{self._unit} {self._step}/{self._total}'

  def _parts(self) -> list[str]:
    return [
        f'{_NAMES.get(k, k.replace("_", " "))} {figure(v)}'
        for k, v in self._figures.items()
    ]

  def _times(self) -> str:
    elapsed = f'{duration(self._clock() - self._began)} elapsed'
    if self._first is None or self._step <= self._first[0]:
      return elapsed
    if self._step >= self._total:
      return elapsed
    pace = (self._latest - self._first[1]) / (self._step - self._first[0])
    end = self._latest + pace * (self._total - self._step)
    return f'{elapsed}, {duration(max(0.0, end - self._clock()))} left'

  def _render(self) -> table.Table:
    """Two lines: the bar with count and times, and the figures below."""
    bar = table.Table.grid(padding=(0, 1), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True, justify='right')
    bar.add_row(
        text.Text(f'{self._label} {self._count()}'.strip(), 'bold'),
        progress_bar.ProgressBar(total=self._total, completed=self._step),
        text.Text(self._times(), 'cyan'),
    )
    rows = table.Table.grid(expand=True)
    rows.add_row(bar)
    if self._figures:
      rows.add_row(text.Text('  ' + '  '.join(self._parts()), 'dim'))
    return rows
