"""The tools of an episode at work: counts, limits, and the `run` tool."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import time
from typing import Protocol

from composer_jax import config
from composer_jax import task as task_lib
from composer_jax.agents import tools
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool
from composer_jax.sandbox import suite


class Loop(Protocol):
  """Carries out turns.

  Attributes:
    counts: calls of the episode by kind, and those that failed.
    log: calls of the episode with their observations.
    exhausted: the policy has used up its tools.
  """

  counts: collections.Counter[str]
  log: list[str]

  @property
  def exhausted(self) -> bool:
    ...

  async def execute(
      self,
      task: task_lib.Task,
      files: Mapping[str, str],
      calls: Sequence[tools.ToolCall],
  ) -> tuple[Mapping[str, str], str, bool]:
    """Carries out a turn; returns (files, observation, done)."""


class ToolLoop:
  """Runs tasks with edit, run and done.

  All tools together have `tool_seconds` a turn: whoever keeps them busy for
  longer has spent the episode, and is graded like everybody else. Were it the
  deadline of the whole rollout that ended it, it would count as lost.
  """

  def __init__(self, session: pool.Session, cfg: config.HarnessConfig):
    self._session = session
    self._cfg = cfg
    self.counts: collections.Counter[str] = collections.Counter()
    self.log: list[str] = []
    self._seconds = cfg.max_turns * cfg.tool_seconds  # left

  @property
  def exhausted(self) -> bool:
    return self._seconds <= 0

  async def _run_tests(
      self, task: task_lib.Task, files: Mapping[str, str]
  ) -> str:
    await self._session.open()  # waiting for it is not the policy's doing
    began = time.monotonic()
    try:
      return await self._public(task, files)
    finally:
      self._seconds -= time.monotonic() - began

  async def _public(self, task: task_lib.Task, files: Mapping[str, str]) -> str:
    """What the `run` tool shows: the public tests that fail."""
    limits = dataclasses.replace(
        task.limits,
        wall_seconds=min(task.limits.wall_seconds, self._cfg.tool_seconds),
    )
    public = task.public_tests
    if isinstance(public, task_lib.Suite):
      outcomes = await suite.run_suite(self._session, public, files, limits)
      return tools.report_suite(
          public.ids, outcomes.tests, outcomes.errors, outcomes.failure
      )
    outputs = await grading.call_function(
        self._session,
        grading.source_of(task, files),
        task.meta['entry'],
        [c.args for c in public],
        limits,
    )
    return tools.report(public, outputs.values, outputs.errors, outputs.failure)

  async def execute(
      self,
      task: task_lib.Task,
      files: Mapping[str, str],
      calls: Sequence[tools.ToolCall],
  ) -> tuple[Mapping[str, str], str, bool]:
    shown = []
    for call in calls:
      self.counts[type(call).__name__.lower() + 's'] += 1
      if isinstance(call, tools.Done):
        return files, '', True
      outcome = await tools.execute(call, task, files, self._run_tests)
      if outcome.failed:
        self.counts['failed_calls'] += 1
      files = outcome.files
      text = tools.legible(outcome.text)
      shown.append(text)
      self.log.append(f'{call}\n{text}')
      if self.exhausted:
        break
    text = '\n'.join(shown)
    return files, tools.truncate(text, self._cfg.tool_output_bytes), False
