"""Repair tasks from the standard library: its modules and its own tests.

A fault is made in a pure python module (`mutation`), or a function is taken
out, and the module's tests say what it should do. Only what some test notices
becomes a task, and only if it survives `validation`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import pathlib
import random

from composer_jax import task as task_lib
from composer_jax.environments import harbor
from composer_jax.environments import mutation
from composer_jax.environments import validation
from composer_jax.sandbox import pool as pool_lib
from composer_jax.sandbox import suite as suite_lib
from composer_jax.sandbox import suspicion

# Pure python, with a suite of their own that takes a second or less.
MODULES = (
    *('bisect', 'cmd', 'colorsys', 'copy', 'fnmatch', 'fractions', 'getopt'),
    *('graphlib', 'heapq', 'netrc', 'quopri', 'reprlib', 'shlex', 'string'),
    'textwrap',
)
HELDOUT = ('graphlib', 'quopri')  # modules that only evaluation uses
_GOLD_SECONDS = 20.0
_SHOWN = 3  # failing tests that the policy is told about, at most

_REPAIR = """\
`{path}` is a module of Python's standard library with one small fault.
{count} of its tests fail, {shown} among them:

{failing}

Find the fault and repair it in place. The tests cannot be changed, and a new
import counts as a failure: the answer is not to be found elsewhere.
"""
_REBUILD = """\
`{path}` is a module of Python's standard library. The body of `{name}` was
taken out; what is left is its signature, its documentation and its callers.
{count} tests fail for that reason, {shown} among them:

{failing}

Write it again, in place. The tests cannot be changed, and a new import counts
as a failure: the answer is not to be found elsewhere.
"""


@dataclasses.dataclass(frozen=True)
class Module:
  """A module that tasks are made of.

  Attributes:
    name: name of the module.
    source: text as it should be.
    suite: its tests; all that pass are `pass_to_pass`.
    limits: several times what the suite takes.
  """

  name: str
  source: str
  suite: task_lib.Suite
  limits: task_lib.Limits

  @property
  def path(self) -> str:
    return f'{self.name}.py'


@functools.cache
def _imports(path: pathlib.Path) -> tuple[str, ...]:
  """Modules of the `test` package that a file imports."""
  out = []
  for node in ast.walk(ast.parse(path.read_text('utf-8'))):
    if isinstance(node, ast.Import):
      out += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      module = node.module or ''
      if node.level:  # only the helpers in test/support do that
        module = f'test.support.{module}'.rstrip('.')
      out += [module, *(f'{module}.{a.name}' for a in node.names)]
  return tuple(n for n in out if n.startswith('test.'))


def _tests(library: pathlib.Path, name: str) -> dict[str, str]:
  """A module's tests and what they import of the `test` package."""
  out, left = {}, [f'test.test_{name}', 'test', 'test.support']
  seen = set()
  while left:
    module = left.pop()
    seen.add(module)
    path = library / module.replace('.', '/')
    for file in (path.with_suffix('.py'), path / '__init__.py'):
      if file.is_file():
        out[str(file.relative_to(library))] = file.read_text('utf-8')
        left += [n for n in _imports(file) if n not in seen]
  return out


async def load(
    pool: pool_lib.Pool, library: pathlib.Path, name: str
) -> Module | None:
  """Reads a module and runs its tests twice; None if they are of no use.

  Args:
    pool: sandboxes to run tests in.
    library: directory of a standard library with its tests.
    name: name of the module.

  Raises:
    ValueError: the library has no such module, or no tests.
    SandboxError: infrastructure failed.
  """
  test = library / 'test' / f'test_{name}.py'
  if not test.is_file():
    raise ValueError(
        f'{test}: no such file; give the library of a python that was installed'
        ' with its tests'
    )
  source = (library / f'{name}.py').read_text('utf-8')
  files, modules = _tests(library, name), (f'test.test_{name}',)
  limits = task_lib.Limits(_GOLD_SECONDS, 10 * _GOLD_SECONDS)
  good: set[str] | None = None
  for _ in range(2):  # a test that fails now and then is none
    async with pool.session() as session:
      run = await suite_lib.run(
          session, files, modules, {f'{name}.py': source}, limits
      )
    if run.failure:
      return None
    passed = {i for i, outcome in run.tests.items() if outcome == 'passed'}
    good = passed if good is None else good & passed
  if not good:
    return None
  suite = task_lib.Suite(
      files,
      modules,
      (),
      tuple(sorted(good)),
      suspicion.count({f'{name}.py': source}),
  )
  return Module(name, source, suite, task_lib.Limits(5.0, 40.0))


def faults(module: Module, seed: int) -> list[mutation.Fault]:
  """What can be done to a module, in random order, removals first.

  There are few removals and many faults; both shall be among the first.
  """
  rng = random.Random(f'{seed}/{module.name}')
  removals, small = mutation.removals(module.source), mutation.faults(
      module.source
  )
  return rng.sample(removals, len(removals)) + rng.sample(small, len(small))


def task_id(module: Module, fault: mutation.Fault) -> str:
  digest = hashlib.sha256(fault.apply(module.source).encode()).hexdigest()
  return f'stdlib/{module.name}/{fault.kind}-{fault.line}-{digest[:8]}'


def _split(module: Module, name: str) -> str:
  if module.name in HELDOUT:
    return 'heldout'
  share = hashlib.sha256(name.encode()).digest()[0]
  return 'warmup' if share < 20 else 'eval' if share < 64 else 'train'


def _task(
    module: Module,
    fault: mutation.Fault,
    suite: task_lib.Suite,
    errors: dict[str, str],
) -> task_lib.Task:
  name, failing = task_id(module, fault), suite.fail_to_pass
  shown = failing[:_SHOWN]
  share = len(failing) / len(suite.ids)
  difficulty = 'easy' if share > 0.3 else 'medium' if share > 0.05 else 'hard'
  template = _REBUILD if fault.kind == 'removal' else _REPAIR
  instruction = template.format(
      path=module.path,
      name=fault.new.partition('(')[2].strip("')"),
      count=len(failing),
      shown=len(shown),
      failing='\n'.join(f'- {i}: {errors.get(i, "")}' for i in shown),
  )
  return task_lib.Task(
      id=name,
      instruction=instruction,
      files={module.path: fault.apply(module.source)},
      # Of the others every second one: a repair has to be right beyond them.
      public_tests=dataclasses.replace(
          suite, fail_to_pass=shown, pass_to_pass=suite.pass_to_pass[::2]
      ),
      limits=module.limits,
      meta={
          'family': module.name,
          'kind': fault.kind,
          'difficulty': difficulty,
          'stratum': f'{module.name} {difficulty}',
          'split': _split(module, name),
      },
  )


async def build(
    pool: pool_lib.Pool, module: Module, fault: mutation.Fault
) -> harbor.Built | str:
  """Makes a task of a fault, or says why it is none.

  Raises:
    SandboxError: infrastructure failed.
  """
  gold = {module.path: module.source}
  try:
    ast.parse(fault.apply(module.source))
  except SyntaxError:
    return 'no python'
  async with pool.session() as session:
    run = await suite_lib.run_suite(
        session,
        module.suite,
        {module.path: fault.apply(module.source)},
        module.limits,
    )
  if run.failure:
    return run.failure
  good = [i for i in module.suite.ids if run.tests.get(i) == 'passed']
  bad = [i for i in module.suite.ids if i not in good]
  if not bad:
    return 'no test fails at the start'
  if not good:
    return 'every test fails'
  suite = dataclasses.replace(
      module.suite, fail_to_pass=tuple(bad), pass_to_pass=tuple(good)
  )
  task = _task(module, fault, suite, dict(run.errors))
  fault_text = await validation.fault(pool, task, gold, suite)
  return fault_text or harbor.Built(task, suite, gold)
