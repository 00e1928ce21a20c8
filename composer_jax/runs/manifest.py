"""What made a run: versions, machine, mesh, numeric contract, config digest.

A run can be reproduced bit for bit by the same program on the same kind of
machine; the manifest says which those were. It is written before step 0, and
a directory is a run if and only if it holds one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any
import uuid

from composer_jax import atomic
from composer_jax import config
from composer_jax import config_text

FILE = 'manifest.json'
CONFIG_FILE = 'config.json'
FORMAT = 'composer_jax run'

_PACKAGES = (
    'composer_jax',
    'jax',
    'jaxlib',
    'jax-triton',
    'triton',
    'flax',
    'ml_dtypes',
    'numpy',
    'optax',
    'orbax-checkpoint',
    'tensorstore',
    'tokenizers',
)


def build(
    cfg: config.Experiment,
    *,
    devices: Iterable[Any],
    processes: int = 1,
    contract: Mapping[str, Any],
    xla_flags: str,
    command: str,
) -> dict[str, Any]:
  """Collects the facts that decide a run's bits.

  Args:
    cfg: the resolved experiment.
    devices: jax devices, the mesh first.
    processes: number of processes that the devices belong to.
    contract: constants that fix the order of every reduction.
    xla_flags: value of XLA_FLAGS.
    command: command line that starts the run again.
  """
  kinds = [f'{d.platform} {d.device_kind}' for d in devices]
  return {
      'format': FORMAT,
      'command': command,
      'commit': _commit(),
      'config': config_text.digest(cfg),
      'contract': dict(contract),
      'contract_digest': _digest(contract),
      'devices': {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
      'machine': f'{platform.system()} {platform.machine()}',
      'mesh': dataclasses.asdict(cfg.mesh),
      'processes': processes,
      'processor': _processor(),
      'processors': os.cpu_count(),
      'python': platform.python_version(),
      'run': uuid.uuid4().hex[:12],
      'versions': _versions(),
      'xla_flags': xla_flags,
  }


@dataclasses.dataclass(frozen=True)
class Change:
  """A fact that is not what it was.

  Attributes:
    field: dotted name, such as 'versions.jaxlib'.
    before: value when the run was last started.
    now: value in this process.
    numeric: may change bits, so it is part of the run's numeric contract.
  """

  field: str
  before: Any
  now: Any
  numeric: bool

  def __str__(self) -> str:
    return f'{self.field} {self.before!r} -> {self.now!r}'


# What decides bits: the program that is compiled, and what runs it. (Python
# comes with the standard library, which is the default corpus.) Not the number
# of cores, the source's commit, or libraries that only move data.
_NUMERIC = frozenset(
    (
        'devices',
        'machine',
        'processes',
        'processor',
        'python',
        'versions.jax',
        'versions.jax-triton',
        'versions.jaxlib',
        'versions.ml_dtypes',
        'versions.numpy',
        'versions.optax',
        'versions.triton',
        'xla_flags',
    )
)
_NUMERIC_GROUPS = ('contract.', 'mesh.')
# Where or which, not what; and what other fields say already.
_NOT_COMPARED = ('command', 'config', 'contract_digest', 'history', 'run')
# What a host shares with the trainer if both compute the same bits.
_SHARED = frozenset(('machine', 'processor', 'xla_flags'))
_UNNAMED = 'offline'  # runs of versions that gave them no id


def begin(
    workdir: pathlib.Path,
    cfg: config.Experiment,
    facts: dict[str, Any],
    *,
    accept: bool = False,
) -> list[Change]:
  """Records the start or the continuation of a run before its first step.

  The manifest keeps the facts of the start; `history` has a record for every
  continuation: what was no longer as it had been, and whether a change of the
  numeric contract was accepted.

  Args:
    workdir: an empty directory or one that holds a run.
    cfg: the resolved experiment.
    facts: result of `build`.
    accept: go on although the numeric contract has changed.

  Returns:
    What has changed since the run was last started.

  Raises:
    ValueError: the run was started with another config, or under another
      numeric contract and that is not accepted. Nothing is written.
  """
  stored = workdir / CONFIG_FILE
  if not (is_run(workdir) and stored.exists()):
    atomic.write_json(workdir / FILE, facts)
    atomic.write(stored, config_text.to_json(cfg))
    return []
  config_text.check_resume(stored.read_text(), cfg)
  first = json.loads((workdir / FILE).read_text())
  history = first.get('history', [])
  last = _flat(first)
  for resume in history:
    last |= {field: now for field, (_, now) in resume['changed'].items()}
  changed = _compare(last, _flat(facts))
  numeric = [c for c in changed if c.numeric]
  if numeric and not accept:
    raise ValueError(
        f'{workdir}: the numeric contract of this run has changed'
        f' ({"; ".join(map(str, numeric))}), so it would not go on with the'
        ' same bits; go back to what was, choose a new work directory, or'
        ' accept it with --accept_numeric_change'
    )
  atomic.write(stored, config_text.to_json(cfg))
  resume = {
      'accepted_numeric_change': bool(numeric),
      'changed': {c.field: [c.before, c.now] for c in changed},
  }
  first['history'] = [*history, resume]
  atomic.write_json(workdir / FILE, first)
  return changed


def numerics(facts: Mapping[str, Any]) -> dict[str, Any]:
  """The facts that have to be equal where two machines compute equal bits.

  Args:
    facts: result of `build`.
  """
  return {
      name: value
      for name, value in _flat(facts).items()
      if name in _SHARED
      or name.startswith('contract.')
      or (name.startswith('versions.') and name in _NUMERIC)
  }


def differences(
    there: Mapping[str, Any], facts: Mapping[str, Any]
) -> list[Change]:
  """In what this machine differs from another.

  Args:
    there: `numerics` of the other one.
    facts: result of `build` here.
  """
  return [c for c in _compare(there, numerics(facts)) if c.numeric]


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
  """Facts by dotted field; devices stay one field, a set of kinds."""
  out = {}
  for key, value in json.loads(json.dumps(facts)).items():
    if key in ('contract', 'mesh', 'versions'):
      out |= {f'{key}.{name}': v for name, v in value.items()}
    elif key not in _NOT_COMPARED:
      out[key] = value
  return out


def _compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
  return [
      Change(
          key,
          before.get(key),
          now.get(key),
          key in _NUMERIC or key.startswith(_NUMERIC_GROUPS),
      )
      for key in sorted({*before, *now})
      if before.get(key) != now.get(key)
  ]


def is_run(workdir: pathlib.Path) -> bool:
  """Says whether a directory holds a run of composer_jax."""
  try:
    head = json.loads((workdir / FILE).read_text())
  except (OSError, ValueError):
    return False
  return isinstance(head, dict) and head.get('format') == FORMAT


def run_id(workdir: pathlib.Path) -> str:
  """Returns the id of a run, the first part of its rollouts' ids.

  No two runs have the same one, and a run keeps it when it is continued.
  """
  return json.loads((workdir / FILE).read_text()).get('run', _UNNAMED)


def _digest(contract: Mapping[str, Any]) -> str:
  text = json.dumps(dict(contract), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _versions() -> dict[str, str | None]:
  installed = {d.name: d.version for d in importlib.metadata.distributions()}
  return {name: installed.get(name) for name in _PACKAGES}


def _processor() -> str:
  if sys.platform == 'linux':
    for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines():
      if line.startswith('model name'):
        return line.partition(':')[2].strip()
  return platform.processor()


def _commit() -> str | None:
  """Commit of the source tree, marked if files differ; None outside git."""
  root = pathlib.Path(__file__).parents[2]
  if not (root / '.git').exists():
    return None
  command = ['git', 'describe', '--always', '--dirty', '--abbrev=40']
  try:
    out = subprocess.run(command, cwd=root, capture_output=True, text=True)
  except FileNotFoundError:
    return None
  return out.stdout.strip() or None
