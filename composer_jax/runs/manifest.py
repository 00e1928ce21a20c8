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

from composer_jax import config
from composer_jax import config_text

FILE = 'manifest.json'
CONFIG_FILE = 'config.json'
FORMAT = 'composer_jax run'

_PACKAGES = (
    'composer_jax',
    'jax',
    'jaxlib',
    'flax',
    'optax',
    'orbax-checkpoint',
    'tensorstore',
    'tokenizers',
    'numpy',
)


def build(
    cfg: config.Experiment,
    *,
    devices: Iterable[Any],
    contract: Mapping[str, Any],
    xla_flags: str,
    command: str,
) -> dict[str, Any]:
  """Collects the facts that decide a run's bits.

  Args:
    cfg: the resolved experiment.
    devices: jax devices of the process, the mesh first.
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
      'processor': _processor(),
      'processors': os.cpu_count(),
      'python': platform.python_version(),
      'versions': _versions(),
      'xla_flags': xla_flags,
  }


def begin(
    workdir: pathlib.Path, cfg: config.Experiment, facts: dict[str, Any]
) -> list[str]:
  """Records the start or the continuation of a run before its first step.

  Args:
    workdir: an empty directory or one that holds a run.
    cfg: the resolved experiment.
    facts: result of `build`.

  Returns:
    What has changed since the run was started, one line each: with other
    versions or another machine it may not continue with the same bits.

  Raises:
    ValueError: the run was started with another config.
  """
  stored = workdir / CONFIG_FILE
  if not (is_run(workdir) and stored.exists()):
    write(workdir / FILE, json.dumps(facts, indent=2) + '\n')
    write(stored, config_text.to_json(cfg))
    return []
  config_text.check_resume(stored.read_text(), cfg)
  first = json.loads((workdir / FILE).read_text())
  changed = compare(first, facts)
  write(stored, config_text.to_json(cfg))
  resumes = [*first.get('resumes', []), changed]
  text = json.dumps(first | {'resumes': resumes}, indent=2) + '\n'
  write(workdir / FILE, text)
  return changed


# Where, not what: none of these decides a bit.
_NOT_COMPARED = ('command', 'config', 'resumes')


def compare(first: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """Names the facts that differ between two manifests, one line each."""
  a, b = (json.loads(json.dumps(m)) for m in (first, now))
  return [
      f'{key}: {a.get(key)!r} -> {b.get(key)!r}'
      for key in sorted({*a, *b})
      if key not in _NOT_COMPARED and a.get(key) != b.get(key)
  ]


def is_run(workdir: pathlib.Path) -> bool:
  """Says whether a directory holds a run of composer_jax."""
  try:
    head = json.loads((workdir / FILE).read_text())
  except (OSError, ValueError):
    return False
  return isinstance(head, dict) and head.get('format') == FORMAT


def write(path: pathlib.Path, text: str) -> None:
  """Writes a file so that a crash leaves the old or the new one, never half."""
  part = path.with_name(path.name + '.part')
  with part.open('w') as f:
    f.write(text)
    f.flush()
    os.fsync(f.fileno())
  part.replace(path)


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
