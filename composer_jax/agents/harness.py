"""The agent loop: prompt, sampled turn, tool calls, observation, repeat.

Token-in, token-out: what the policy sampled goes back to it as the same ids,
and the episode's segment is that very sequence. A turn that cannot be read is
answered with the reason and stays in the episode, hence in training.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import struct
import time
from typing import Protocol

import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.agents import grading
from composer_jax.agents import sandbox
from composer_jax.agents import suite
from composer_jax.agents import tasks
from composer_jax.agents import tools


class Policy(Protocol):
  """Samples a continuation; see `rollout.endpoint` for the real one."""

  async def complete(
      self,
      context: trace.TokenTrace,
      *,
      max_tokens: int,
      stop: frozenset[int],
      seed: int,
      temperature: float,
  ) -> trace.TokenTrace:
    """Returns the whole window: the context, then what was sampled.

    Args:
      context: routing rows are blank where no forward pass has filled them.
      max_tokens: sampled at most.
      stop: ids that end the turn; the one sampled is included.
      seed: of the random numbers of this turn.
      temperature: 0 for the most likely token.

    Raises:
      ConnectionError, TimeoutError: no answer; an infrastructure failure.
    """


class Renderer(Protocol):
  """Token ids of tasks and observations; tool calls of token ids."""

  stop_ids: frozenset[int]

  def encode_task(self, task: tasks.Task) -> list[int]:
    ...

  def encode_observation(self, text: str) -> list[int]:
    ...

  def parse(self, ids: Sequence[int]) -> list[tools.ToolCall]:
    ...


@dataclasses.dataclass(frozen=True)
class Episode:
  """What happened; graded or not yet.

  Attributes:
    segments: context windows, in order.
    stop: why it ended.
    submission: the files at the end; None after an infrastructure failure.
    grade: verdict on the submission; None until graded.
    meta: counts, as text: turns, calls, edits, runs, failed calls, bad turns.
    log: what a judge reads of it: a turn's calls and what they showed.
  """

  segments: tuple[trace.TokenTrace, ...]
  stop: trace.StopReason
  submission: Mapping[str, str] | None
  grade: grading.Grade | None = None
  meta: Mapping[str, str] = dataclasses.field(default_factory=dict)
  log: tuple[str, ...] = ()


def turn_seed(seed: int, turn: int) -> int:
  """Seed (32 bits) of a turn: the same whatever else is in flight."""
  content = struct.pack('<QQ', seed & (2**64 - 1), turn)
  digest = hashlib.blake2b(content, digest_size=4).digest()
  return int.from_bytes(digest, 'little')


def extend(window: trace.TokenTrace, ids: Sequence[int]) -> trace.TokenTrace:
  """Appends context tokens: not sampled, version and routes not known yet."""
  tokens = np.asarray(ids, np.int32)
  routing = window.routing
  if routing is not None:
    _, layers, k = routing.experts.shape
    dtype = routing.experts.dtype
    rows = np.full((len(tokens), layers, k), trace.blank_route(dtype), dtype)
    routing = trace.RoutingTrace(np.concatenate([routing.experts, rows]))

  def join(old, value):
    return np.concatenate([old, np.full(len(tokens), value, old.dtype)])

  return trace.TokenTrace(
      tokens=np.concatenate([window.tokens, tokens]),
      sampled=join(window.sampled, False),
      logps=join(window.logps, 0),
      versions=join(window.versions, -1),
      routing=routing,
  )


def _empty() -> trace.TokenTrace:
  return trace.TokenTrace(
      tokens=np.zeros(0, np.int32),
      sampled=np.zeros(0, np.bool_),
      logps=np.zeros(0, np.float32),
      versions=np.zeros(0, np.int32),
  )


def _check(before: trace.TokenTrace, after: trace.TokenTrace) -> None:
  """A policy that changes its context would train on what was not there."""
  n = len(before)
  if not (
      len(after) > n
      and np.array_equal(after.tokens[:n], before.tokens)
      and np.array_equal(after.sampled[:n], before.sampled)
      and np.array_equal(after.logps[:n], before.logps)
      and after.sampled[n:].all()
  ):
    raise ValueError(
        f'policy: window of {len(after)} tokens does not continue its context'
        f' of {n}; it must return context + sampled tokens'
    )
  if before.routing is not None:
    rows = before.routing.experts
    known = rows != trace.blank_route(rows.dtype)
    if after.routing is None or not np.array_equal(
        after.routing.experts[:n][known], rows[known]
    ):
      raise ValueError('policy: recorded routing was changed; it is immutable')


class Loop(Protocol):
  """Carries out turns.

  Attributes:
    counts: of the current episode.
    log: of the current episode.
    exhausted: the policy has used up its tools.
  """

  counts: collections.Counter[str]
  log: list[str]

  @property
  def exhausted(self) -> bool:
    ...

  async def execute(
      self,
      task: tasks.Task,
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

  def __init__(self, session: sandbox.Session, cfg: config.HarnessConfig):
    self._session = session
    self._cfg = cfg
    self.counts: collections.Counter[str] = collections.Counter()
    self.log: list[str] = []
    self._seconds = cfg.max_turns * cfg.tool_seconds  # left

  @property
  def exhausted(self) -> bool:
    return self._seconds <= 0

  async def _run_tests(self, task: tasks.Task, files: Mapping[str, str]) -> str:
    await self._session.open()  # waiting for it is not the policy's doing
    began = time.monotonic()
    try:
      return await self._public(task, files)
    finally:
      self._seconds -= time.monotonic() - began

  async def _public(self, task: tasks.Task, files: Mapping[str, str]) -> str:
    """What the `run` tool shows: the public tests that fail."""
    limits = dataclasses.replace(
        task.limits,
        wall_seconds=min(task.limits.wall_seconds, self._cfg.tool_seconds),
    )
    public = task.public_tests
    if isinstance(public, tasks.Suite):
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
      task: tasks.Task,
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
      shown.append(outcome.text)
      self.log.append(f'{call}\n{outcome.text}')
      if self.exhausted:
        break
    text = '\n'.join(shown)
    return files, tools.truncate(text, self._cfg.tool_output_bytes), False


async def run(
    task: tasks.Task,
    session: sandbox.Session | Loop,
    policy: Policy,
    renderer: Renderer,
    *,
    cfg: config.HarnessConfig,
    seed: int,
    temperature: float = 1.0,
) -> Episode:
  """Plays one episode.

  Args:
    task: the problem.
    session: for the `run` tool; untouched if the policy never calls it. Or
      whatever else carries out the turns.
    policy: samples the turns.
    renderer: between tokens and calls.
    cfg: budgets.
    seed: of the episode; turn t samples with `turn_seed(seed, t)`.
    temperature: 1 in training, where log-probs have to be the policy's own.

  Returns:
    An ungraded episode with one segment. Only a failure of the sandbox or of
    the policy's server is INFRA_ERROR.

  Raises:
    ValueError: the prompt alone exceeds the context, or the policy's window
      does not continue the one it was given.
  """
  own = isinstance(session, sandbox.Session)
  loop = ToolLoop(session, cfg) if own else session
  files: Mapping[str, str] = dict(task.files)
  window = extend(_empty(), renderer.encode_task(task))
  if len(window) >= cfg.max_context_tokens:
    raise ValueError(
        f'max_context_tokens={cfg.max_context_tokens}: prompt of {task.id} has'
        f' {len(window)} tokens; raise it'
    )
  stop, failure, turns = trace.StopReason.MAX_TURNS, '', 0
  try:
    while turns < cfg.max_turns:
      room = cfg.max_context_tokens - len(window)
      after = await policy.complete(
          window,
          max_tokens=min(cfg.max_turn_tokens, room),
          stop=renderer.stop_ids,
          seed=turn_seed(seed, turns),
          temperature=temperature,
      )
      _check(window, after)
      turn, window = after.tokens[len(window) :].tolist(), after
      turns += 1
      stop = trace.StopReason.MAX_TURNS
      try:
        files, text, done = await loop.execute(
            task, files, renderer.parse(turn)
        )
      except tools.ParseError as e:
        loop.counts['bad_turns'] += 1
        stop, text, done = trace.StopReason.PARSE_ERROR, str(e), False
      if done:
        stop = trace.StopReason.FINISHED
        break
      if loop.exhausted:
        stop = trace.StopReason.TOOL_BUDGET
        break
      if turns == cfg.max_turns:
        break  # an observation that nobody reads
      observation = renderer.encode_observation(text)
      if len(window) + len(observation) >= cfg.max_context_tokens:
        stop = trace.StopReason.MAX_TOKENS
        break
      window = extend(window, observation)
  except (sandbox.SandboxError, ConnectionError, TimeoutError) as e:
    stop, failure = trace.StopReason.INFRA_ERROR, repr(e)
  infra = stop is trace.StopReason.INFRA_ERROR
  meta = {name: str(count) for name, count in sorted(loop.counts.items())}
  meta |= {'turns': str(turns)} | ({'failure': failure} if infra else {})
  files = None if infra else files
  return Episode((window,), stop, files, meta=meta, log=tuple(loop.log))
