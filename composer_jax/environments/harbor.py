"""Tasks as directories in the layout of Harbor, written and read.

  instruction.md    what the policy is told
  task.toml         limits and metadata
  environment/      Dockerfile and app/, the files the episode starts from
  tests/            test.sh for Harbor's containers; suite.json and files/
  solution/         solve.sh and app/, the reference solution

What is written here runs under Harbor, too. Of a task from elsewhere the
policy's part can be read; its test.sh wants the container it was made for, so
only a task with a suite.json can be graded here.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import hashlib
import inspect
import json
import pathlib
import random
import sys
import tomllib
from typing import Any

from composer_jax import atomic
from composer_jax import checks
from composer_jax import task as task_lib
from composer_jax.agents import tools
from composer_jax.environments import mutation
from composer_jax.sandbox import suite_runner

_DOCKERFILE = """\
FROM python:{python}-slim
WORKDIR /app
COPY app/ /app/
"""
_TEST = """\
#!/bin/bash
mkdir -p /logs/verifier
if python3 -I "$(dirname "$0")/run.py" /app; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
_SOLVE = """\
#!/bin/bash
cp -r "$(dirname "$0")/app/." /app/
"""
# Runs a suite in a child, with the program that grades in our sandboxes.
_RUN = """\
import json, os, pathlib, secrets, subprocess, sys

here = pathlib.Path(__file__).resolve().parent
if len(sys.argv) == 2:
  suite = json.loads((here / 'suite.json').read_text())
  nonce = secrets.token_hex(16)
  canaries = [
      f"{suite['modules'][0]}.T{secrets.token_hex(4)}.test_{secrets.token_hex(4)}"
      for _ in range(14)
  ]
  request = json.dumps([sys.argv[1], nonce, canaries, secrets.randbits(64)])
  done = subprocess.run(
      [sys.executable, '-I', '-B', __file__], input=request, text=True,
      capture_output=True, timeout=suite['seconds'])
  lines = [json.loads(line) for line in done.stdout.splitlines()]
  ids = suite['fail_to_pass'] + suite['pass_to_pass']
  want = dict.fromkeys(ids, 'passed') | dict.fromkeys(canaries, 'failed')
  want[''] = 'end'
  right = len(lines) == len(want) and all(n == nonce for n, *_ in lines)
  sys.exit(not (right and {i: o for _, i, o, _ in lines} == want))
app, nonce, canaries, seed = json.load(sys.stdin)
suite = json.loads((here / 'suite.json').read_text())
read = lambda root: {
    str(p.relative_to(root)): p.read_text() for p in root.rglob('*.py')}
scope = {'__name__': 'suite_runner'}
exec((here / 'suite_runner.py').read_text(), scope)
tests, files = read(here / 'files'), read(pathlib.Path(app))
os.chdir(app)
scope['main'](tests, files, suite['modules'],
              suite['fail_to_pass'] + suite['pass_to_pass'],
              canaries, nonce, seed)
"""


@dataclasses.dataclass(frozen=True)
class Built:
  """A task with all that belongs to it.

  Attributes:
    task: problem as the policy sees it.
    hidden: tests that decide the reward.
    solution: path -> text of the reference solution; may be empty.
  """

  task: task_lib.Task
  hidden: task_lib.Suite
  solution: Mapping[str, str]


def _put(root: pathlib.Path, files: Mapping[str, str]) -> None:
  for path, text in files.items():
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding='utf-8')


def _get(root: pathlib.Path) -> dict[str, str]:
  paths = [str(p.relative_to(root)) for p in root.rglob('*') if p.is_file()]
  paths.sort(key=lambda p: (not p.endswith('.py'), p))  # `Edit`: the first one
  return {p: (root / p).read_text('utf-8') for p in paths}


def _toml(table: Mapping[str, Any]) -> str:
  """Texts, numbers and flags of one table; JSON's escapes are TOML's, too."""
  return ''.join(f'{k} = {json.dumps(v)}\n' for k, v in table.items())


def write(folder: pathlib.Path, built: Built) -> None:
  """Writes a task; the directory is there as a whole or not at all.

  Args:
    folder: folder of the task; must not exist yet.
    built: what to write; the public tests must be a part of the hidden ones.
  """
  task, hidden = built.task, built.hidden
  public = task.public_tests
  assert isinstance(public, task_lib.Suite)
  limits = task.limits
  config = '\n'.join(
      [
          'version = "1.0"\n',
          '[metadata]',
          _toml({'id': task.id, **task.meta}),
          '[verifier]',
          _toml({'timeout_sec': 10 * limits.wall_seconds}),
          '[agent]',
          _toml({'timeout_sec': 900.0}),
          '[environment]',
          _toml({'cpus': 1, 'memory_mb': 1024, 'allow_internet': False}),
      ]
  )
  suite = {
      'modules': hidden.modules,
      'fail_to_pass': hidden.fail_to_pass,
      'pass_to_pass': hidden.pass_to_pass,
      'public': public.ids,
      'allowed': dict(hidden.allowed),
      'cpu_seconds': limits.cpu_seconds,
      'seconds': limits.wall_seconds,
  }
  version = '{}.{}'.format(*sys.version_info)
  texts = {
      'instruction.md': task.instruction,
      'task.toml': config,
      'environment/Dockerfile': _DOCKERFILE.format(python=version),
      'tests/test.sh': _TEST,
      'tests/run.py': _RUN,
      'tests/suite_runner.py': inspect.getsource(suite_runner),
      'tests/suite.json': json.dumps(suite, indent=1) + '\n',
      'solution/solve.sh': _SOLVE,
  }
  with atomic.new_folder(folder) as part:
    _put(part, texts)
    _put(part / 'environment' / 'app', task.files)
    _put(part / 'tests' / 'files', hidden.files)
    _put(part / 'solution' / 'app', built.solution)
    for script in ('tests/test.sh', 'solution/solve.sh'):
      (part / script).chmod(0o755)


def _public(suite: task_lib.Suite, ids: list[str]) -> task_lib.Suite:
  return dataclasses.replace(
      suite,
      fail_to_pass=tuple(i for i in suite.fail_to_pass if i in ids),
      pass_to_pass=tuple(i for i in suite.pass_to_pass if i in ids),
  )


@functools.lru_cache(maxsize=256)
def read(folder: pathlib.Path) -> Built:
  """Reads a task.

  Raises:
    ValueError: not a task directory.
  """
  try:
    text = (folder / 'instruction.md').read_text('utf-8')
    config = tomllib.loads((folder / 'task.toml').read_text('utf-8'))
  except (OSError, tomllib.TOMLDecodeError) as e:
    raise ValueError(f'{folder}: no task of Harbor: {e}') from e
  meta = {k: str(v) for k, v in config.get('metadata', {}).items()}
  app = folder / 'environment' / 'app'
  files = _get(app) if app.is_dir() else _get(folder / 'environment')
  path = folder / 'tests' / 'suite.json'
  suite, public = task_lib.Suite({}, (), ()), ()
  limits = task_lib.Limits()
  seconds = config.get('verifier', {}).get('timeout_sec', limits.wall_seconds)
  limits = dataclasses.replace(limits, wall_seconds=seconds)
  if path.exists():
    facts = json.loads(path.read_text('utf-8'))
    suite = task_lib.Suite(
        files=_get(folder / 'tests' / 'files'),
        modules=tuple(facts['modules']),
        fail_to_pass=tuple(facts['fail_to_pass']),
        pass_to_pass=tuple(facts['pass_to_pass']),
        allowed=facts['allowed'],
    )
    public = _public(suite, facts['public'])
    limits = task_lib.Limits(facts['cpu_seconds'], facts['seconds'])
  task = task_lib.Task(
      id=meta.pop('id', folder.name),
      instruction=text,
      files=files,
      public_tests=public,
      limits=limits,
      meta=meta,
  )
  solution = folder / 'solution' / 'app'
  return Built(task, suite, _get(solution) if solution.is_dir() else {})


@dataclasses.dataclass(frozen=True)
class HarborDirectory:
  """Task source: the tasks in a directory, by the split in their metadata.

  The training split ends, so that no task is trained on twice; the others
  start again.

  Attributes:
    path: directory of task directories.
    seed: seed of the order.
  """

  path: str
  seed: checks.Seed = 0

  def __post_init__(self):
    checks.fields(self)

  def task(self, index: int, split: str) -> task_lib.Task:
    """Returns task `index` of a split.

    Raises:
      ValueError: there are no tasks of this split, or two have one id.
      IndexError: the last training task lies before.
    """
    names = _order(self.path, self.seed, split)
    if not names:
      raise ValueError(f'split={split!r}: {self.path} has no such tasks')
    if split == 'train' and index >= len(names):
      raise IndexError(f'{self.path} has {len(names)} tasks to train on')
    return read(pathlib.Path(self.path, names[index % len(names)])).task

  def _built(self, task: task_lib.Task) -> Built:
    folders = _opened(self.path)[1]
    name = folders.get(task.id, folder_name(task.id))
    return read(pathlib.Path(self.path, name))

  def hidden(self, task: task_lib.Task) -> task_lib.Suite:
    """Returns the tests that decide.

    Raises:
      ValueError: its own container would have to grade it.
    """
    suite = self._built(task).hidden
    if not suite.fail_to_pass:
      raise ValueError(
          f'{task.id}: has no tests/suite.json, so only its container grades it'
      )
    return suite

  def fingerprint(self, task: task_lib.Task) -> str:
    """Returns a hash of the files and the tests that fail on them."""
    content = [sorted(task.files.items()), self.hidden(task).fail_to_pass]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()

  def demo(
      self, task: task_lib.Task, rng: random.Random
  ) -> list[tools.ToolCall]:
    """One more fault, as an edit of a line: the form, never the answer."""
    path, source = next(iter(task.files.items()))
    gold = self._built(task).solution.get(path, '').split('\n')
    old, faults = source.split('\n'), mutation.faults(source)
    rng.shuffle(faults)
    for fault in faults:
      line = source.count('\n', 0, fault.start)
      new = fault.apply(source).split('\n')
      if new[line] not in gold:
        return [tools.Edit(line, old[line], new[line]), tools.Done()]
    return [tools.Done()]

  def chance(self, task: task_lib.Task) -> float:
    """Probability that undoing one fault at random hits the right one."""
    source = next(iter(task.files.values()))
    return 1 / max(1, len(mutation.faults(source)))


def folder_name(task_id: str) -> str:
  return task_id.replace('/', '-')


@functools.lru_cache(maxsize=32)
def _order(path: str, seed: int, split: str) -> list[str]:
  """Folders of a split in the order in which they are played."""
  names = _opened(path)[0].get(split, [])
  return random.Random(f'{seed}/{split}').sample(names, len(names))


@functools.lru_cache(maxsize=8)
def _opened(path: str) -> tuple[dict[str, list[str]], dict[str, str]]:
  """Finds the tasks in a directory.

  Returns:
    (split -> names of its folders, id of a task -> name of its folder).

  Raises:
    ValueError: two tasks have one id, by which hidden tests are found.
  """
  splits: dict[str, list[str]] = {}
  folders: dict[str, str] = {}
  # What a killed writer left has a name that starts with a dot.
  for folder in sorted(pathlib.Path(path).glob('[!.]*/task.toml')):
    config = tomllib.loads(folder.read_text('utf-8'))
    meta, name = config.get('metadata', {}), folder.parent.name
    splits.setdefault(meta.get('split', 'train'), []).append(name)
    task_id = str(meta.get('id', name))
    if task_id in folders:
      raise ValueError(
          f'{path}: id {task_id!r} is that of {folders[task_id]!r} and {name!r};'
          ' ids are unique, so change one in its task.toml'
      )
    folders[task_id] = name
  return splits, folders
