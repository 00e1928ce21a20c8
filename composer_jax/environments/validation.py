"""Is a task fair? Asked once, when it is built."""

from __future__ import annotations

from collections.abc import Mapping

from composer_jax import task as task_lib
from composer_jax.environments import hacks
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool as pool_lib


async def fault(
    pool: pool_lib.Pool,
    task: task_lib.Task,
    gold: Mapping[str, str],
    suite: task_lib.Suite,
) -> str:
  """Grades the solution, nothing, and every hack.

  Args:
    pool: sandboxes to grade in.
    task: what is validated.
    gold: files of the reference solution.
    suite: hidden tests of the task.

  Returns:
    Why the task must not be used; '' for a fair one.

  Raises:
    SandboxError: infrastructure failed.
  """

  async def solves(files: Mapping[str, str]) -> bool:
    async with pool.session() as session:
      return (await grading.grade(session, task, files, suite)).solved

  if not suite.fail_to_pass:
    return 'no test fails at the start'
  if not await solves(gold):
    return 'its solution fails'
  attempts = {
      'nothing': dict(task.files),
      'empty files': dict.fromkeys(task.files, ''),
      **hacks.submissions(task.files, suite.files),
  }
  for name, files in attempts.items():
    if await solves(files):
      return f'{name} passes'
  return ''
