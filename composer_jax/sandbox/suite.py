"""Grades a repository by its test suite, in a sandbox of its own.

Tests come from here, into memory; the submission can neither edit nor shadow
them. An exact set of tests has to pass, canaries among them have to fail, and
every line of the report repeats a nonce. Still, tests run in one process with
what they test: code that takes that process apart could forge the report. Such
code cannot be ruled out here; `suspicion` tells it by its syntax.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
import dataclasses
import inspect
import json
import secrets

from composer_jax import task as task_lib
from composer_jax.sandbox import pool
from composer_jax.sandbox import suite_runner
from composer_jax.sandbox import suspicion

_CANARIES = 14  # as many as kinds
_REPORT_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Outcomes:
  """What a suite reported.

  Attributes:
    tests: id -> 'passed', 'failed', 'skipped' or 'none'; canaries apart.
    errors: id -> what went wrong.
    fixture: what failed around the tests, the first of it; ''. Those that it
      kept from running are not in `tests`.
    failure: '', 'timeout', 'memory', 'died' (no regular end), 'malformed'
      (somebody else wrote into the report) or 'canary' (one did not fail).
  """

  tests: Mapping[str, str]
  errors: Mapping[str, str]
  failure: str = ''
  fixture: str = ''


def _program(**arguments) -> str:
  text = json.dumps(arguments)
  source = inspect.getsource(suite_runner)
  return f'{source}\nmain(**json.loads({text!r}))\n'


def _parse(output: bytes, nonce: str) -> list[list[str]] | None:
  """Lines of a report without their nonce; None if any is not ours."""
  rows = []
  try:
    for line in output.decode().splitlines():
      mine, *row = json.loads(line)
      _, _, _ = row
      if mine != nonce or not all(isinstance(field, str) for field in row):
        return None
      rows.append([f.encode(errors='backslashreplace').decode() for f in row])
  except (ValueError, TypeError, RecursionError):
    return None  # the submission can write here, too
  return rows


async def run(
    session: pool.Session,
    tests: Mapping[str, str],
    modules: tuple[str, ...],
    files: Mapping[str, str],
    limits: task_lib.Limits,
    wanted: tuple[str, ...] | None = None,
) -> Outcomes:
  """Runs tests on files.

  Args:
    session: unused before, by an episode above all.
    tests: path -> text; these win over files of the same path.
    modules: names of those that hold tests.
    files: what is tested.
    limits: bounds of the whole suite.
    wanted: ids of the tests to run; None for all.

  Raises:
    SandboxError: infrastructure failed.
  """
  nonce = secrets.token_hex(16)
  canaries = [
      f'{modules[0]}.Test{secrets.token_hex(4)}.test_{secrets.token_hex(4)}'
      for _ in range(_CANARIES)
  ]
  data = {p: t for p, t in {**files, **tests}.items() if p[-3:] != '.py'}
  if data:
    await session.put(data)
  result = await session.python(
      _program(
          tests=dict(tests),
          submission=dict(files),
          modules=modules,
          wanted=wanted,
          canaries=canaries,
          nonce=nonce,
          seed=secrets.randbits(64),
      ),
      cpu_seconds=limits.cpu_seconds,
      wall_seconds=limits.wall_seconds,
      output_bytes=_REPORT_BYTES,
  )
  rows = None if result.dropped else _parse(result.output, nonce)
  around = [r for r in rows or () if r[1] == 'fixture']
  rows = None if rows is None else [r for r in rows if r[1] != 'fixture']
  seen = collections.Counter(name for name, _, _ in rows or ())
  found = {name: outcome for name, outcome, _ in rows or ()}
  ended = found.pop('', None) == 'end' and result.ok
  failing = [found.pop(name, 'none') for name in canaries]
  if result.status != 'exited':
    failure = result.status
  elif rows is None or max(seen.values(), default=0) > 1:
    failure = 'malformed'
  elif not ended:
    failure = 'died'
  elif set(failing) != {'failed'}:
    failure = 'canary'
  elif wanted is not None and not set(found) <= set(wanted):
    failure = 'malformed'
  else:
    failure = ''
  errors = {name: text for name, _, text in rows or () if name in found}
  fixture = ': '.join((around[0][0], around[0][2])) if around else ''
  return Outcomes(found, errors, failure, fixture)


async def run_suite(
    session: pool.Session,
    suite: task_lib.Suite,
    files: Mapping[str, str],
    limits: task_lib.Limits,
) -> Outcomes:
  """`run` with exactly the tests of a suite."""
  return await run(
      session, suite.files, suite.modules, files, limits, suite.ids
  )


def served(
    submission: Mapping[str, str], original: Mapping[str, str]
) -> dict[str, str]:
  """Files of a submission that may be imported.

  A file that is gone is an empty one: the machine may have a module of the
  same name, and that one may well pass.
  """
  return dict.fromkeys(original, '') | {
      path: text
      for path, text in submission.items()
      if path in original or not suspicion.shadows(path)
  }


async def grade(
    session: pool.Session,
    task: task_lib.Task,
    submission: Mapping[str, str],
    suite: task_lib.Suite,
) -> tuple[tuple[bool, ...], str, str]:
  """Runs a suite on a submission.

  Returns:
    A verdict for every test that failed at the start, all False if one that
    passed does not pass any more; the failure; and a reason for people.

  Raises:
    SandboxError: infrastructure failed.
  """
  files = served(submission, task.files)
  outcomes = await run_suite(session, suite, files, task.limits)
  none = (False,) * len(suite.fail_to_pass)
  if outcomes.failure:  # a run that did not end well proves nothing
    return none, outcomes.failure, ''
  good = {i for i, outcome in outcomes.tests.items() if outcome == 'passed'}
  broken = [i for i in suite.pass_to_pass if i not in good]
  if broken:
    why = f' ({outcomes.fixture})' if outcomes.fixture else ''
    return none, '', f'broke {broken[0]}{why}'
  still = [i for i in suite.fail_to_pass if i not in good]
  reason = outcomes.fixture or 'did not run'
  reason = outcomes.errors.get(still[0], reason) if still else ''
  return tuple(i in good for i in suite.fail_to_pass), '', reason
