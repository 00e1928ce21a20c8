"""Builds repair tasks from the standard library and its own tests.

  python3 -m experiments.build_tasks --out=DIR

Each is validated in sandboxes: its tests fail on it, pass on the solution, and
no known hack passes. The same command continues a build that was stopped.
"""

import asyncio
from collections.abc import Iterator
import contextlib
import itertools
import json
import os
import pathlib
import sysconfig

from absl import flags
from rich import progress

from composer_jax.environments import harbor
from composer_jax.environments import mutation
from composer_jax.environments import stdlib_repair
from composer_jax.sandbox import pool as pool_lib
from experiments import flags as binary

_REJECTED = 'rejected.jsonl'  # faults that made no task, and why

_TRIES = 3

_OUT = flags.DEFINE_string('out', None, 'Directory of the tasks.')
binary.local('out')
_TASKS = flags.DEFINE_integer(
    'tasks', 600, 'How many to build in all.', lower_bound=1
)
_JOBS = flags.DEFINE_integer(
    'jobs', None, 'Sandboxes at a time. Default: one per core.', lower_bound=1
)
_LIBRARY = flags.DEFINE_string(
    'library',
    None,
    'Standard library with its tests. Default: the one of this interpreter.',
)
_MODULES = flags.DEFINE_list(
    'modules', list(stdlib_repair.MODULES), 'Modules to make tasks of.'
)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the order of faults.')
flags.register_validator('out', bool, message='this flag is required')

Candidate = tuple[stdlib_repair.Module, mutation.Fault]


def _rejected(path: pathlib.Path) -> set[str]:
  """Ids in a log whose last line a kill may have cut."""
  if not path.exists():
    return set()
  out = set()
  for line in path.read_text().splitlines():
    try:
      out.add(json.loads(line)['id'])
    except ValueError:
      continue
  return out


def _candidates(modules: list[stdlib_repair.Module]) -> Iterator[Candidate]:
  """A fault of each module in turn, until the last module has none left."""
  every = [
      [(m, f) for f in stdlib_repair.faults(m, _SEED.value)] for m in modules
  ]
  for row in itertools.zip_longest(*every):
    yield from filter(None, row)


async def _try(
    pool: pool_lib.Pool, module: stdlib_repair.Module, fault: mutation.Fault
) -> harbor.Built | str:
  """Builds a task, again if a sandbox failed: a machine may be very busy."""
  for _ in range(_TRIES - 1):
    with contextlib.suppress(pool_lib.SandboxError):
      return await stdlib_repair.build(pool, module, fault)
  return await stdlib_repair.build(pool, module, fault)


async def _work(
    pool: pool_lib.Pool,
    candidates: Iterator[Candidate],
    out: pathlib.Path,
    left: Iterator[int],
    bar: progress.Progress,
) -> None:
  """Builds tasks until enough are there; one of several at a time."""
  bar_task = bar.task_ids[0]
  known = _rejected(out / _REJECTED)
  for module, fault in candidates:
    name = stdlib_repair.task_id(module, fault)
    folder = out / harbor.folder_name(name)
    if name in known:
      continue
    if not folder.exists():
      built = await _try(pool, module, fault)
      if isinstance(built, str):
        with (out / _REJECTED).open('a') as log:
          log.write(json.dumps({'id': name, 'why': built}) + '\n')
        continue
      harbor.write(folder, built)
    bar.advance(bar_task)
    if next(left, None) is None:
      return


async def _build(out: pathlib.Path, jobs: int) -> None:
  library = pathlib.Path(_LIBRARY.value or sysconfig.get_path('stdlib'))
  left = iter(range(_TASKS.value - jobs))
  columns = (
      progress.TextColumn('{task.description}'),
      progress.BarColumn(),
      progress.MofNCompleteColumn(),
      progress.TimeElapsedColumn(),
      progress.TimeRemainingColumn(),
  )
  with progress.Progress(*columns) as bar:
    bar.add_task('tasks', total=_TASKS.value)
    async with pool_lib.Pool(jobs) as pool:
      loaded = await asyncio.gather(
          *(stdlib_repair.load(pool, library, n) for n in _MODULES.value)
      )
      modules = [m for m in loaded if m is not None]
      bar.console.print(f'{len(modules)} modules whose tests run here')
      candidates = _candidates(modules)
      await asyncio.gather(
          *(_work(pool, candidates, out, left, bar) for _ in range(jobs))
      )


def main() -> None:
  out = pathlib.Path(_OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  jobs = min(_JOBS.value or os.cpu_count() or 1, _TASKS.value)
  asyncio.run(_build(out, jobs))
  names = [p.parent.name for p in out.glob('*/task.toml')]
  print(f'{len(names)} tasks in {out}')


if __name__ == '__main__':
  binary.run(main)
