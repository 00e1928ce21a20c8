"""The rollout side of a run: engine, environments and an event loop of its own.

A `Player` turns tasks into graded trajectories. It sees the trainer only
through the weight store; a host on another machine would be built of the same
parts around another `WorkQueue`.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Coroutine, Mapping, Sequence
import dataclasses
import threading
import time
from typing import Any, Protocol, Self, TypeVar

import jax

from composer_jax import config
from composer_jax import task as task_lib
from composer_jax import trace
from composer_jax.agents import harness
from composer_jax.rewards import hierarchy
from composer_jax.rewards import judge
from composer_jax.rewards import signals
from composer_jax.rollout import engine as engine_lib
from composer_jax.runs import feed as feed_lib
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool as pool_lib

_SANDBOXES = 4  # warm ones, for episodes and as many for grading
_DEATHS = 2  # of sandboxes, under one rollout: the policy's doing
T = TypeVar('T')
Feed = feed_lib.WeightFeed | feed_lib.FixedFeed


class Policy(harness.Policy, Protocol):
  """A policy that knows the digest of every weight step it has used."""

  @property
  def digests(self) -> Mapping[int, str]:
    ...


def isolation() -> str:
  """Which sandbox this machine gives, for people.

  Raises:
    ValueError: none that is safe; says what to install.
  """
  level = pool_lib.describe()
  if level.name == 'none':
    raise ValueError(f'no sandbox for model-written code: {level.reason}')
  return f'{level.name} ({level.reason})'


class BusyClock:
  """Seconds during which at least one of many coroutines was inside."""

  def __init__(self):
    self.seconds = 0.0
    self._inside = 0
    self._since = 0.0

  def __enter__(self) -> None:
    if not self._inside:
      self._since = time.perf_counter()
    self._inside += 1

  def __exit__(self, *_) -> None:
    self._inside -= 1
    if not self._inside:
      self.seconds += time.perf_counter() - self._since


def _blamed(task: task_lib.Task, episode: harness.Episode) -> harness.Episode:
  """What is booked for a policy under which sandboxes die: it failed."""
  files = task.files if episode.submission is None else episode.submission
  return dataclasses.replace(
      episode,
      stop=trace.StopReason.POLICY_FAILURE,
      submission=files,
      grade=grading.Grade((False,), 'died', reason='its sandboxes died'),
  )


class Player:
  """Engine, weight feed, sandboxes and grader behind one event loop.

  Attributes:
    engine: the decode engine.
    feed: source of weights.
    loop: event loop of the host's thread; `call` runs a coroutine there.
    environment: time spent on grading in sandboxes.
    renderer: between tasks and tokens.
    url: URL of the weight store.
  """

  def __init__(
      self,
      cfg: config.Experiment,
      url: str,
      renderer: Any,
      *,
      device: jax.Device,
      feed: Callable[[str], Feed] = feed_lib.WeightFeed,
  ):
    """Describes the host; entering the context starts it.

    Args:
      cfg: model, rollout, harness, tasks and rewards are used.
      url: URL of the weight store; something must have been published there.
      renderer: renderer of the experiment's tasks.
      device: device of the engine; the trainer should not use it.
      feed: makes the source of weights from `url`: one that follows the
        newest version, or one that stays at a version (`FixedFeed`).
    """
    self._cfg = cfg
    self.url = url
    self._make_feed = feed
    self._device = device
    self.renderer = renderer
    self.environment = BusyClock()
    self._deaths: collections.Counter[str] = collections.Counter()
    self.loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
        target=self.loop.run_forever, name='rollout-host', daemon=True
    )

  def __enter__(self) -> Self:
    self.feed = self._make_feed(self.url)
    version, params = self.feed.first
    self.engine = engine_lib.Engine(
        self._cfg.model,
        self._cfg.rollout,
        version,
        params,
        devices=[self._device],
        refresh=self.feed.refresh,
    )
    self._policy = engine_lib.EnginePolicy(self.engine)
    self._start()
    return self

  def __exit__(self, *_) -> None:
    self.call(self._close_pools())
    self.engine.close()
    self.feed.close()
    self._halt()

  def _start(self) -> None:
    """Starts all but engine and feed."""
    self._thread.start()
    self._pools = self.call(self._open_pools())
    self._grader = grading.Grader(self._cfg.tasks, self._pools[1])

  def _halt(self) -> None:
    self.loop.call_soon_threadsafe(self.loop.stop)
    self._thread.join()
    self.loop.close()

  def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the host's loop; for other threads."""
    return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

  async def _open_pools(self) -> list[pool_lib.Pool]:
    # Grading never happens in a sandbox that an episode has used.
    pools = [pool_lib.Pool(_SANDBOXES) for _ in range(2)]
    for pool in pools:
      await pool.__aenter__()
    return pools

  async def _close_pools(self) -> None:
    mine = asyncio.current_task()
    tasks = [t for t in asyncio.all_tasks() if t is not mine]
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for pool in self._pools:
      await pool.__aexit__(None, None, None)
    await judge.close()

  async def rollout(
      self,
      task: task_lib.Task,
      task_id: str,
      *,
      seed: int,
      temperature: float = 1.0,
      oldest_version: int = 0,
      policy: Policy | None = None,
  ) -> trace.Trajectory:
    """Plays and grades one episode.

    Args:
      task: the problem.
      task_id: `run/prompt/member`.
      seed: seed of the episode's random numbers.
      temperature: 1 in training, 0 for greedy evaluation.
      oldest_version: weight step that the episode must at least start on.
      policy: samples the turns; None for the engine.

    Returns:
      The trajectory; INFRA_ERROR and no reward if it could not be judged (but a
      rollout under which a sandbox died before has failed), and neither a
      segment nor a reward if the task's prompt does not fit.
    """
    policy = policy or self._policy
    await self.feed.wait_for(oldest_version)
    async with self._pools[0].session() as session:
      episode = await harness.run(
          task,
          session,
          policy,
          self.renderer,
          cfg=self._cfg.harness,
          seed=seed,
          temperature=temperature,
      )
    if episode.stop is trace.StopReason.MAX_TOKENS and not episode.segments:
      return trace.Trajectory(
          task_id=task_id,
          group_id=task_id.rpartition('/')[0],
          segments=(),
          reward=None,
          reward_parts={},
          stop=episode.stop,
          meta={**task.meta, **episode.meta},
      )
    if episode.submission is not None and episode.grade is None:
      with self.environment:
        grade = await self._grader(task, episode.submission)
      episode = dataclasses.replace(episode, grade=grade)
    infra = episode.stop is trace.StopReason.INFRA_ERROR
    grade = episode.grade
    if (infra and session.died) or (grade and grade.sandbox_died):
      self._deaths[task_id] += 1
    if self._deaths[task_id] >= _DEATHS:
      episode = _blamed(task, episode)
    results = await asyncio.gather(
        *(reward(task, episode) for reward in self._cfg.rewards)
    )
    reward = hierarchy.combine(results)
    if reward.valid:
      del self._deaths[task_id]  # it will not be played again
    digests = policy.digests
    versions = {int(v) for s in episode.segments for v in s.versions if v >= 0}
    flags = sorted({flag for r in results for flag in r.flags})
    # A grader that failed may do better with a new sandbox, so the rollout is
    # played again; a judge has had its tries, so it only leaves its group.
    graded = episode.grade is None or episode.grade.valid
    return trace.Trajectory(
        task_id=task_id,
        group_id=task_id.rpartition('/')[0],
        segments=episode.segments,
        reward=reward.score if reward.valid else None,
        reward_parts={**signals.measure(task, episode), **reward.parts},
        stop=episode.stop if graded else trace.StopReason.INFRA_ERROR,
        weights={v: digests[v] for v in sorted(versions)},
        meta={**task.meta, **episode.meta, 'flags': ' '.join(flags)},
    )

  async def rollouts(
      self,
      tasks: Sequence[task_lib.Task],
      *,
      name: str,
      seeds: Sequence[int],
      temperature: float,
      oldest_version: int = 0,
      ended: Callable[[], None] = lambda: None,
  ) -> list[trace.Trajectory]:
    """One episode per task, all at once; for evaluation.

    Args:
      tasks: the problems.
      name: first part of the trajectories' ids.
      seeds: one per task.
      temperature: temperature of all of them.
      oldest_version: see `rollout`.
      ended: called after every episode, on the host's thread.
    """

    async def one(i: int) -> trace.Trajectory:
      trajectory = await self.rollout(
          tasks[i],
          f'{name}/{i}/0',
          seed=seeds[i],
          temperature=temperature,
          oldest_version=oldest_version,
      )
      ended()
      return trajectory

    return await asyncio.gather(*map(one, range(len(tasks))))
