"""Grades submissions: functions out of process, repositories by their suite.

Of a function, only the submission and the inputs enter the sandbox, which is
never the one the episode ran in. The outputs come back as canonical text and
are compared HERE: a submission that patches comparisons, forges reports, reads
frames or exits early can only produce outputs, and would need to know the
right ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import logging
from typing import Any

from composer_jax import task as task_lib
from composer_jax.sandbox import child
from composer_jax.sandbox import pool as pool_lib
from composer_jax.sandbox import suite
from composer_jax.sandbox import suspicion

_Hidden = Sequence[task_lib.Case] | task_lib.Suite
_LINE_BYTES = 4096  # average room for one output


@dataclasses.dataclass(frozen=True)
class Outputs:
  """What a submission returned.

  Attributes:
    values: a case: canonical text (`child.canonical`) or None.
    errors: a case: name of what was raised, or ''.
    failure: why values are missing: '', 'timeout', 'memory', 'died' or
      'malformed' (it wrote into the report).
  """

  values: tuple[str | None, ...]
  errors: tuple[str, ...]
  failure: str = ''


@dataclasses.dataclass(frozen=True)
class Grade:
  """Verdict on a submission.

  Attributes:
    passed: a hidden case: the output equals the expected value. A suite: a
      test that failed at the start passes, and none was broken.
    failure: what the policy did wrong, see `Outputs` and `suite.Outcomes`.
    valid: False if infrastructure failed: no verdict, not a zero.
    reason: one line for people.
    flags: constructs a repair does not need (`suspicion`); then all failed.
    sandbox_died: why it is not valid; a second time it is the policy's doing.
  """

  passed: tuple[bool, ...]
  failure: str = ''
  valid: bool = True
  reason: str = ''
  flags: tuple[str, ...] = ()
  sandbox_died: bool = False

  @property
  def solved(self) -> bool:
    return self.valid and bool(self.passed) and all(self.passed)

  @property
  def fraction(self) -> float:
    return sum(self.passed) / len(self.passed) if self.passed else 0.0

  @property
  def suspicious(self) -> bool:
    """Somebody tried to be graded without doing the work."""
    return bool(self.flags) or self.failure in ('malformed', 'canary')


def _lines(output: bytes) -> list[str] | None:
  """Splits a report; None if it is not one that `child` writes."""
  *lines, rest = output.split(b'\n')
  good = all(line[:1] in (b'+', b'-') for line in lines)
  good = good and not rest and output.isascii()
  return [n.decode() for n in lines] if good else None


def source_of(task: task_lib.Task, files: Mapping[str, str]) -> str:
  """The file that a function task is about; others may have been added."""
  (path,) = task.files
  return files.get(path, '')


async def call_function(
    session: pool_lib.Session,
    source: str,
    entry: str,
    inputs: Sequence[Sequence[Any]],
    limits: task_lib.Limits,
) -> Outputs:
  """Calls `entry` of `source` with each of `inputs` in a sandbox.

  Raises:
    SandboxError: infrastructure failed; no fault of the source.
  """
  result = await session.call(
      source,
      entry,
      [json.dumps(list(arguments)) for arguments in inputs],
      cpu_seconds=limits.cpu_seconds,
      wall_seconds=limits.wall_seconds,
      output_bytes=_LINE_BYTES * len(inputs),
  )
  lines = None if result.dropped else _lines(result.output)
  failure = ''
  if result.status != 'exited':
    failure = result.status
  elif lines is None or len(lines) > len(inputs):
    failure = 'malformed'
  elif result.code or len(lines) < len(inputs):
    failure = 'died'
  lines = (lines or [])[: len(inputs)]
  lines += [''] * (len(inputs) - len(lines))
  return Outputs(
      values=tuple(n[1:] if n[:1] == '+' else None for n in lines),
      errors=tuple(n[1:].strip("'") if n[:1] == '-' else '' for n in lines),
      failure=failure,
  )


async def grade(
    session: pool_lib.Session,
    task: task_lib.Task,
    submission: Mapping[str, str],
    hidden: _Hidden,
) -> Grade:
  """Grades a submission by the tests that the policy never saw.

  Raises:
    SandboxError: infrastructure failed.
  """
  if isinstance(hidden, task_lib.Suite):
    flags = suspicion.flags(
        submission, task.files, hidden.files, hidden.allowed
    )
    if flags:
      none = (False,) * len(hidden.fail_to_pass)
      return Grade(none, reason='suspicious', flags=flags)
    passed, failure, reason = await suite.grade(
        session, task, submission, hidden
    )
    return Grade(passed, failure, reason=reason)
  outputs = await call_function(
      session,
      source_of(task, submission),
      task.meta['entry'],
      [c.args for c in hidden],
      task.limits,
  )
  passed = tuple(
      value == child.canonical(case.expected)
      for value, case in zip(outputs.values, hidden, strict=True)
  )
  if outputs.failure:  # a run that did not end well proves nothing
    passed = (False,) * len(hidden)
  errors = sorted(set(outputs.errors) - {''})
  return Grade(passed, outputs.failure, reason=', '.join(errors)[:80])


def _key(
    task: task_lib.Task, submission: Mapping[str, str], hidden: _Hidden
) -> str:
  """Digest of all that `grade` looks at; a name would be somebody's promise."""
  files = [sorted(f.items()) for f in (submission, task.files)]
  content = repr([files, task.meta.get('entry'), task.limits, hidden])
  return hashlib.sha256(content.encode()).hexdigest()


class Grader:
  """Grades submissions of one task source, each distinct one once.

  The members of a group often submit the same text. A verdict is a function
  of the text and of what grades it, so it is shared, unless it is invalid.

  Attributes:
    asked: verdicts given.
    run: verdicts that needed a sandbox.
  """

  def __init__(
      self,
      source: task_lib.TaskSource,
      pool: pool_lib.Pool,
      remembered: int = 4096,
  ):
    self._source = source
    self._pool = pool
    self._remembered = remembered
    self._grades: dict[str, asyncio.Task[Grade]] = {}  # oldest first
    self.asked = 0
    self.run = 0

  async def __call__(
      self, task: task_lib.Task, submission: Mapping[str, str]
  ) -> Grade:
    """Returns the verdict on a submission of `task`."""
    hidden = self._source.hidden(task)
    key = _key(task, submission, hidden)
    self.asked += 1
    if key not in self._grades:
      self.run += 1
      self._grades[key] = asyncio.create_task(
          self._grade(task, submission, hidden)
      )
      if len(self._grades) > self._remembered:
        del self._grades[next(iter(self._grades))]
    # One rollout that is cancelled must not take the verdict of the others.
    verdict = await asyncio.shield(self._grades[key])
    if not verdict.valid:
      self._grades.pop(key, None)
    return verdict

  async def _grade(
      self, task: task_lib.Task, submission: Mapping[str, str], hidden: _Hidden
  ) -> Grade:
    try:
      async with self._pool.session() as session:
        return await grade(session, task, submission, hidden)
    except pool_lib.SandboxError as e:
      died = isinstance(e, pool_lib.SandboxDied)
      return Grade((), valid=False, reason=str(e), sandbox_died=died)
    except Exception as e:  # whoever finds such a text must not end the run
      logging.exception('%s: booked as a failure of the policy', task.id)
      is_suite = isinstance(hidden, task_lib.Suite)
      tests = hidden.fail_to_pass if is_suite else hidden
      return Grade((False,) * len(tests), 'died', reason=repr(e)[:80])
