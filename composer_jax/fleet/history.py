"""Records of a run's steps, in files that never change.

Every checkpoint adds one file with the records of the steps since the one
before, so that its cost does not grow with the run. A file names the digest of
the file before it, and the ledger in the checkpoint that of the newest one: no
record can be lost, altered or exchanged unnoticed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib

import zstandard

from composer_jax import atomic
from composer_jax.fleet import ledger as ledger_lib


def folder(workdir: pathlib.Path) -> pathlib.Path:
  """Where a run keeps its records."""
  return workdir / 'ledger'


def _path(workdir: pathlib.Path, done: int, head: str) -> pathlib.Path:
  return folder(workdir) / f'{done:08d}-{head[:16]}.jsonl.zst'


def append(
    workdir: pathlib.Path, ledger: ledger_lib.Ledger
) -> ledger_lib.Ledger:
  """Moves the ledger's recent records to a file; returns the ledger to save."""
  if not ledger.recent:
    return ledger
  before = {'parent': ledger.head, 'done': ledger.done - len(ledger.recent)}
  rows = [before, *map(ledger_lib.step_rows, ledger.recent)]
  data = '\n'.join(json.dumps(r, separators=(',', ':')) for r in rows).encode()
  head = hashlib.sha256(data).hexdigest()
  folder(workdir).mkdir(exist_ok=True)
  atomic.write(
      _path(workdir, ledger.done, head),
      zstandard.ZstdCompressor().compress(data),
  )
  return dataclasses.replace(ledger, head=head, recent=())


def read(
    workdir: pathlib.Path, ledger: ledger_lib.Ledger
) -> tuple[ledger_lib.StepRecord, ...]:
  """Records of all steps of a ledger, in order.

  Raises:
    ValueError: a file is missing or damaged, or they do not make the ledger.
  """
  files = [ledger.recent]
  done, head = ledger.done - len(ledger.recent), ledger.head
  while head:
    path = _path(workdir, done, head)
    try:
      data = zstandard.ZstdDecompressor().decompress(path.read_bytes())
    except (OSError, zstandard.ZstdError) as e:
      raise ValueError(f'{path}: {e}; the run cannot go on without it') from e
    if hashlib.sha256(data).hexdigest() != head:
      raise ValueError(f'{path}: damaged; restore it from a copy of the run')
    before, *rows = map(json.loads, data.splitlines())
    files.append(tuple(map(ledger_lib.step_of, rows)))
    done, head = before['done'], before['parent']
  steps = tuple(step for file in reversed(files) for step in file)
  ledger_lib.check(ledger, steps)
  return steps


def cut_back(workdir: pathlib.Path, done: int) -> None:
  """Removes files of steps that no checkpoint has.

  A kill may come between a file and the checkpoint that names it.
  """
  for path in folder(workdir).glob('*.jsonl.zst'):
    if int(path.name.partition('-')[0]) > done:
      path.unlink()
