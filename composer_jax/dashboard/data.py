"""Reads a work directory for people: whatever is there, finished or not."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
from typing import Any

_PHASES = {'midtrain': 'mid-training', 'warmup': 'warm start', 'rl': 'RL'}
_WHY = {
    'config.json': 'written before step 0',
    'manifest.json': 'written before step 0',
    'metrics.jsonl': 'written after every step',
    'summary.json': 'written when the run ends',
    'showcase.json': 'written by the last evaluation',
}


@dataclasses.dataclass(frozen=True)
class RunData:
  """What a work directory says about its run.

  Attributes:
    workdir: where it was read.
    config: the resolved experiment; empty if missing, as the next three.
    manifest: what the run started from.
    summary: the closing figures.
    showcase: tasks answered before and after RL.
    records: phase -> records in order of step, one per step.
    missing: file name -> when it gets written (or why it is unreadable).
  """

  workdir: pathlib.Path
  config: Mapping[str, Any]
  manifest: Mapping[str, Any]
  summary: Mapping[str, Any]
  showcase: Mapping[str, Any]
  records: Mapping[str, list[dict[str, Any]]]
  missing: Mapping[str, str]

  def series(self, phase: str, key: str) -> tuple[list[float], list[float]]:
    """Steps and values of one figure, where it was recorded and finite."""
    pairs = [
        (r['step'], r[key])
        for r in self.records.get(phase, ())
        if isinstance(r.get(key), (int, float))
    ]
    return [x for x, _ in pairs], [y for _, y in pairs]

  def keys(self, phase: str, prefix: str) -> list[str]:
    """Names of the phase's figures that start with `prefix`, sorted."""
    records = self.records.get(phase, ())
    return sorted({k for r in records for k in r if k.startswith(prefix)})

  def last(self, phase: str) -> dict[str, Any]:
    """The phase's last record; empty if it has none."""
    records = self.records.get(phase, ())
    return records[-1] if records else {}


def phase_name(phase: str) -> str:
  """What a phase is called on the page."""
  return _PHASES.get(phase, phase.replace('_', ' '))


def pretraining(run: RunData) -> list[str]:
  """Phases before RL, in the order of their records."""
  phases = [p for p in run.records if p not in ('rl', 'eval')]
  return sorted(phases, key=lambda p: run.last(p).get('seconds', 0.0))


def _records(text: str) -> dict[str, list[dict[str, Any]]]:
  """Groups metric lines by phase; a later line of a step adds or overrides."""
  phases: dict[str, dict[int, dict[str, Any]]] = {}
  for line in text.splitlines(keepends=True):
    if line.endswith('\n'):  # else it is being written, or was torn by a kill
      record = json.loads(line)
      steps = phases.setdefault(record['phase'], {})
      steps.setdefault(record['step'], {}).update(record)
  return {
      phase: [steps[k] for k in sorted(steps)]
      for phase, steps in phases.items()
  }


def load(workdir: str | os.PathLike[str]) -> RunData:
  """Reads a work directory.

  Raises:
    ValueError: it does not exist, or holds none of a run's files.
  """
  workdir = pathlib.Path(workdir)
  if not workdir.is_dir():
    raise ValueError(f'workdir={workdir}: no such directory')
  found: dict[str, Any] = {}
  missing: dict[str, str] = {}
  for name, why in _WHY.items():
    try:
      text = (workdir / name).read_text()
      found[name] = _records(text) if name[-1] == 'l' else json.loads(text)
    except FileNotFoundError:
      missing[name] = why
    except (ValueError, KeyError) as error:
      missing[name] = f'unreadable: {error}'
  if not found:
    raise ValueError(
        f'workdir={workdir}: no run here (wants any of {", ".join(_WHY)})'
    )
  return RunData(
      workdir=workdir,
      config=found.get('config.json', {}),
      manifest=found.get('manifest.json', {}),
      summary=found.get('summary.json', {}),
      showcase=found.get('showcase.json', {}),
      records=found.get('metrics.jsonl', {}),
      missing=missing,
  )
