"""The agent loop: prompt, sampled turn, tool calls, observation, repeat.

Token-in, token-out: what the policy sampled goes back to it as the same ids,
and the episode's segment is that very sequence. A turn that cannot be read is
answered with the reason and stays in the episode, hence in training.

An episode that outgrows its context goes on in another window: the policy is
asked for a summary, and task, summary and state of the work begin the next
segment. The query is context, the summary is sampled and trained like a turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import logging
from typing import Protocol

import numpy as np

from composer_jax import config
from composer_jax import task as task_lib
from composer_jax import trace
from composer_jax.agents import tool_loop
from composer_jax.agents import tools
from composer_jax.agents import windows as windows_lib
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool

_INFRASTRUCTURE = (pool.SandboxError, ConnectionError, TimeoutError)


class Policy(Protocol):
  """Samples a continuation; see `rollout.engine` for the real one."""

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
      seed: seed of the random numbers of this turn.
      temperature: 0 for the most likely token.

    Raises:
      ConnectionError, TimeoutError: no answer; an infrastructure failure.
    """


class Renderer(Protocol):
  """Token ids of tasks and observations; tool calls of token ids."""

  stop_ids: frozenset[int]

  def encode_task(self, task: task_lib.Task) -> list[int]:
    ...

  def encode_observation(self, text: str) -> list[int]:
    ...

  def encode_summary_query(self) -> list[int]:
    """Asks for a summary; it may be sampled from this and what is before."""

  def encode_resumed(
      self,
      task: task_lib.Task,
      summary: Sequence[int],
      state: windows_lib.State,
  ) -> list[int]:
    """Begins another window; `summary` stays the very ids that were sampled."""

  def parse(self, ids: Sequence[int]) -> list[tools.ToolCall]:
    ...


@dataclasses.dataclass(frozen=True)
class Episode:
  """What happened; graded or not yet.

  Attributes:
    segments: context windows, in order; each but the last ends in a summary.
    stop: why it ended.
    submission: the files at the end; None after an infrastructure failure, or
      if the task cannot be played.
    grade: verdict on the submission; None until graded.
    meta: counts, as text: turns, calls, edits, runs, failed calls, bad turns,
      summaries and their tokens.
    log: what a judge reads of it: calls and what they showed.
  """

  segments: tuple[trace.TokenTrace, ...]
  stop: trace.StopReason
  submission: Mapping[str, str] | None
  grade: grading.Grade | None = None
  meta: Mapping[str, str] = dataclasses.field(default_factory=dict)
  log: tuple[str, ...] = ()


class _Odd(Exception):
  """Something that the policy wrote was too much for us."""


@contextlib.contextmanager
def _policys_doing(task: task_lib.Task) -> Iterator[None]:
  """Reading, executing and showing: what fails there, the policy has caused.

  Were it an error of the run, whoever finds such a turn could end it; were it
  one of the infrastructure, it would be played again and never be trained on.
  """
  try:
    yield
  except (tools.ParseError, *_INFRASTRUCTURE):
    raise
  except Exception as e:
    logging.exception('%s: booked as a failure of the policy', task.id)
    raise _Odd(repr(e)) from e


class _Windows:
  """The context windows of one episode; the last one is being sampled in.

  A window that grows across `HarnessConfig.summary_trigger_tokens` is over
  once the policy has summed it up. One that begins at that length or above
  never crosses it, and goes on to the end of the context.
  """

  def __init__(
      self,
      policy: Policy,
      renderer: Renderer,
      cfg: config.HarnessConfig,
      seed: int,
      temperature: float,
  ):
    self._policy = policy
    self._stop = renderer.stop_ids
    self._cfg = cfg
    self._seed = seed
    self._temperature = temperature
    self._draws = 0
    self._crossable = False
    self._past: tuple[trace.TokenTrace, ...] = ()
    self._now = trace.empty()

  @property
  def segments(self) -> tuple[trace.TokenTrace, ...]:
    return (*self._past, self._now) if len(self._now) else self._past

  def room(self, ids: Sequence[int] = ()) -> int:
    """Tokens that could be sampled after `ids`."""
    return self._cfg.max_context_tokens - len(self._now) - len(ids)

  def begin(self, prompt: Sequence[int]) -> bool:
    """Starts a window; False, and there is none, if the prompt fills it."""
    self._past, self._now = self.segments, trace.empty()
    if self.room(prompt) <= 0:
      return False
    trigger = self._cfg.summary_trigger_tokens
    self._crossable = trigger is not None and len(prompt) < trigger
    self.append(prompt)
    return True

  def append(self, ids: Sequence[int]) -> None:
    self._now = trace.extend(self._now, ids)

  def crosses(self, ids: Sequence[int]) -> bool:
    """Says whether `ids` would make the window long enough to be summed up."""
    trigger = self._cfg.summary_trigger_tokens
    length = len(self._now) + len(ids)
    return self._crossable and trigger is not None and length >= trigger

  async def sample(self, max_tokens: int) -> list[int]:
    """Lets the policy go on; at least one token of room is needed."""
    before = self._now
    after = await self._policy.complete(
        before,
        max_tokens=min(max_tokens, self.room()),
        stop=self._stop,
        seed=trace.draw_seed(self._seed, self._draws),
        temperature=self._temperature,
    )
    windows_lib.check(before, after)
    self._draws += 1
    self._now = after
    return after.tokens[len(before) :].tolist()

  async def summarize(self) -> list[int]:
    """Samples the summary that ends the window; returns it without its end.

    Nothing in it is executed. One that is empty, or cut at its budget, is what
    the next window gets: the policy's own loss.
    """
    summary = await self.sample(self._cfg.summary_tokens)
    if not self._cfg.train_summaries:
      drawn = np.arange(len(self._now)) >= len(self._now) - len(summary)
      self._now = dataclasses.replace(
          self._now,
          sampled=self._now.sampled & ~drawn,
          logps=np.where(drawn, np.float32(0), self._now.logps),
      )
    return summary[:-1] if summary[-1] in self._stop else summary


def _observe(renderer: Renderer, text: str, room: int) -> list[int]:
  """An observation, its middle cut out if it is longer than `room` tokens."""
  ids = renderer.encode_observation(text)
  if len(ids) > room:
    # No token is longer than a byte of text.
    limit = max(room - len(renderer.encode_observation('')), 0)
    ids = renderer.encode_observation(tools.truncate(text, limit))
  return ids


def prompt_of(
    task: task_lib.Task, renderer: Renderer, cfg: config.HarnessConfig
) -> tuple[list[int], str]:
  """The prompt of a task, and why it cannot be played; '' if it can be."""
  try:
    prompt = renderer.encode_task(task)
  except ValueError as e:
    return [], str(e)
  if len(prompt) < cfg.max_context_tokens:
    return prompt, ''
  return prompt, (
      f'max_context_tokens={cfg.max_context_tokens}: prompt of {task.id} has'
      f' {len(prompt)} tokens; raise it'
  )


async def run(
    task: task_lib.Task,
    session: pool.Session | tool_loop.Loop,
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
    session: sandbox of the `run` tool; untouched if that is never called. Or
      whatever else carries out the turns.
    policy: samples the turns, and summaries if `cfg` asks for them.
    renderer: between tokens and calls.
    cfg: budgets. A summary is not a turn, and none is asked for when no turn
      is left.
    seed: seed of the episode; `trace.draw_seed(seed, t)` draws sample t.
    temperature: 1 in training, where log-probs have to be the policy's own.

  Returns:
    An episode, with a segment for every window. It is MAX_TOKENS if a
    window is full, or if a summary and what goes with it are too long for a
    window to begin with, and POLICY_FAILURE if something in a turn was too
    much for us, which leaves the files as they were before. If it takes longer
    than `cfg.episode_seconds` it is a TIMEOUT, and graded: it failed, whatever
    the files. Only a failure of the sandbox or of the policy's server is
    INFRA_ERROR. A task whose prompt does not fit is MAX_TOKENS without a
    segment and a submission.

  Raises:
    ValueError: the policy's window does not continue the one it was given.
  """
  own = isinstance(session, pool.Session)
  loop = tool_loop.ToolLoop(session, cfg) if own else session
  files: Mapping[str, str] = dict(task.files)
  windows = _Windows(policy, renderer, cfg, seed, temperature)
  prompt, misfit = prompt_of(task, renderer, cfg)
  if misfit:  # of one task among many: no reason to end a run
    meta = {'failure': misfit}
    return Episode((), trace.StopReason.MAX_TOKENS, None, meta=meta)
  windows.begin(prompt)
  stop, failure, turns = trace.StopReason.MAX_TURNS, '', 0
  grade: grading.Grade | None = None
  try:
    async with asyncio.timeout(cfg.episode_seconds) as clock:
      while turns < cfg.max_turns:
        turn = await windows.sample(cfg.max_turn_tokens)
        turns += 1
        stop = trace.StopReason.MAX_TURNS
        try:
          with _policys_doing(task):
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
        with _policys_doing(task):
          observation = renderer.encode_observation(text)
          crossing = windows.crosses(observation)
          if crossing:
            query = renderer.encode_summary_query()
            room = windows.room() - len(query) - cfg.summary_tokens
            observation = _observe(renderer, text, room) + query
        if windows.room(observation) <= 0:
          stop = trace.StopReason.MAX_TOKENS
          break
        windows.append(observation)
        if crossing:
          summary = await windows.summarize()
          loop.counts['summaries'] += 1
          loop.counts['summary_tokens'] += len(summary)
          state = windows_lib.State(
              files=files,
              turns_left=cfg.max_turns - turns,
              summaries=loop.counts['summaries'],
          )
          with _policys_doing(task):
            resumed = renderer.encode_resumed(task, summary, state)
          if not windows.begin(resumed):
            stop = trace.StopReason.MAX_TOKENS
            break
  except _Odd as e:
    stop, failure = trace.StopReason.POLICY_FAILURE, str(e)
  except _INFRASTRUCTURE as e:
    stop, failure = trace.StopReason.INFRA_ERROR, repr(e)
    if isinstance(e, TimeoutError) and clock.expired():
      stop = trace.StopReason.TIMEOUT
      failure = f'harness.episode_seconds={cfg.episode_seconds} are over'
      grade = grading.Grade((False,), 'timeout', reason=failure)
  infra = stop is trace.StopReason.INFRA_ERROR
  meta = {name: str(count) for name, count in sorted(loop.counts.items())}
  meta |= {'turns': str(turns)} | ({'failure': failure} if failure else {})
  files = None if infra else files
  log = tuple(loop.log)
  return Episode(windows.segments, stop, files, grade, meta, log)
