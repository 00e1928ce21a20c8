"""Metrics of a run: one json line per record, mirrored to TensorBoard.

`WORKDIR/metrics.jsonl` is the source of truth. A line is written with one
call and flushed, so a killed process leaves at most one torn last line, which
the next `Writer` removes. A step that is trained again after a resume would be
recorded twice; the records after the resumed step are therefore dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import math
import os
import pathlib
import time
from typing import Any

import numpy as np
import tensorboardX

from composer_jax import atomic

METRICS = 'metrics.jsonl'
_RESERVED = frozenset({'phase', 'step', 'seconds'})


def _kept(data: bytes, resume_step: Mapping[str, int]) -> list[bytes]:
  """The whole lines of `data` that are no later than the resumed steps."""
  kept = []
  for number, line in enumerate(data.splitlines(keepends=True), 1):
    if not line.endswith(b'\n'):
      break  # torn by a kill: never acknowledged to anybody
    try:
      record = json.loads(line)
      late = record['step'] > resume_step.get(record['phase'], math.inf)
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(
          f'{METRICS} line {number}: not a metrics record ({error}); move the'
          ' file away to go on without its history'
      ) from None
    if not late:
      kept.append(line)
  return kept


def read(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the records of a run so far, in order; none without a file."""
  path = workdir / METRICS
  data = path.read_bytes() if path.exists() else b''
  return [json.loads(line) for line in _kept(data, {})]


def _plain(value: float) -> float | None:
  """A json number; json knows no infinity, so non-finite becomes null."""
  value = float(value)
  return value if math.isfinite(value) else None


class Writer:
  """Appends records to `metrics.jsonl` and `tb/PHASE/`; safe to reopen.

  Attributes:
    kept: the records that were there before and stand, in order.
  """

  def __init__(
      self,
      workdir: str | os.PathLike[str],
      resume_step: Mapping[str, int] | None = None,
  ):
    """Opens or repairs the metrics of a work directory.

    Args:
      workdir: the run's directory; created if absent.
      resume_step: phase -> last step that stands. Later records of that phase
        are dropped; phases that are not named keep everything.

    Raises:
      ValueError: a whole line of an existing file is not a record.
    """
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    self._resume = dict(resume_step or {})
    self._tb_root = workdir / 'tb'
    self._boards: dict[str, tensorboardX.SummaryWriter] = {}
    path = workdir / METRICS
    self.kept: list[dict[str, Any]] = []
    if path.exists():
      data = path.read_bytes()
      lines = _kept(data, self._resume)
      kept = b''.join(lines)
      if kept != data:
        atomic.write(path, kept)
      self.kept = [json.loads(x) for x in lines]
    before = max((r['seconds'] for r in self.kept), default=0.0)
    # Seconds count time at work: they go on from the last record that stands.
    self._origin = time.monotonic() - before
    self._file = path.open('ab', buffering=0)

  def _board(self, phase: str) -> tensorboardX.SummaryWriter:
    # A run per phase: TensorBoard purges a whole run on resume, and phases
    # count their steps apart.
    if phase not in self._boards:
      last = self._resume.get(phase)
      folder = self._tb_root / phase
      files = len(list(folder.glob('*'))) if folder.exists() else 0
      self._boards[phase] = tensorboardX.SummaryWriter(
          str(folder),
          purge_step=None if last is None else last + 1,
          # Names have whole seconds: a quick restart would overwrite a file.
          filename_suffix=f'.{files:04}',
          flush_secs=10,
      )
    return self._boards[phase]

  def write(
      self,
      phase: str,
      step: int,
      figures: Mapping[str, float | Sequence[float]],
  ) -> None:
    """Records one step.

    Args:
      phase: name of a phase before RL, 'rl' or 'eval'.
      step: step of the phase, counted from 1 (0: before the first).
      figures: flat name -> number, or counts per bin (bin i holds value i).

    Raises:
      ValueError: a figure's name is one of the record's own fields.
    """
    if clash := _RESERVED & figures.keys():
      raise ValueError(f'figures[{min(clash)!r}]: reserved name; rename it')
    record = {
        'phase': phase,
        'step': int(step),
        'seconds': round(time.monotonic() - self._origin, 3),
    }
    board = self._board(phase)
    for name, value in figures.items():
      if np.ndim(value):
        record[name] = [_plain(v) for v in value]
        _histogram(board, name, record[name], int(step))
      else:
        record[name] = _plain(value)
        board.add_scalar(name, float(value), int(step))
    self._file.write(json.dumps(record).encode() + b'\n')

  def close(self) -> None:
    """Flushes everything; may be called twice."""
    self._file.close()
    for board in self._boards.values():
      board.close()
    self._boards.clear()

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *unused) -> None:
    self.close()


class Silent(Writer):
  """Writer of a process that leaves writing to another one."""

  def __init__(self):
    self.kept = []

  def write(self, phase, step, figures) -> None:
    del phase, step, figures

  def close(self) -> None:
    pass


def _histogram(
    board: tensorboardX.SummaryWriter,
    name: str,
    counts: Sequence[float | None],
    step: int,
) -> None:
  """Mirrors counts per integer value as a TensorBoard histogram."""
  weights = np.array([c or 0.0 for c in counts])
  if not weights.sum():
    return  # TensorBoard cannot draw an empty histogram
  values = np.arange(len(weights))
  board.add_histogram_raw(
      name,
      min=values[weights > 0].min(),
      max=values[weights > 0].max(),
      num=weights.sum(),
      sum=(weights * values).sum(),
      sum_squares=(weights * values**2).sum(),
      bucket_limits=(values + 0.5).tolist(),
      bucket_counts=weights.tolist(),
      global_step=step,
  )
