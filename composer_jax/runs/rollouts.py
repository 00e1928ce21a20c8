"""Rollouts of a run on one machine: who dispatches, and who plays.

Everything here lives on the host's event loop; the trainer's thread calls
`take`, `published`, `retire` and `close` only.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterable, Mapping
from concurrent import futures
import contextlib
import dataclasses
import functools
from typing import Any, Protocol

from composer_jax import config
from composer_jax import task as task_lib
from composer_jax import trace
from composer_jax.environments import curriculum
from composer_jax.fleet import admission
from composer_jax.fleet import blobs as blobs_lib
from composer_jax.fleet import dispatcher as dispatcher_lib
from composer_jax.fleet import inprocess
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.fleet import queue as queue_lib
from composer_jax.fleet import worker
from composer_jax.runs import player
from composer_jax.runs import step_record
from composer_jax.weights import publish
from composer_jax.weights import store as store_lib

_TALLIES = 32  # kept; more than a prompt's admission can lag behind


def training_task(cfg: config.Experiment, index: int) -> task_lib.Task:
  """A training task that says which it is, for the ledger."""
  task = cfg.tasks.task(index, 'train')
  known = {'index': str(index), 'stratum': curriculum.stratum(task)}
  return dataclasses.replace(task, meta={**task.meta, **known})


class _Curriculum:
  """`dispatcher.Source`: the curriculum's choice for every prompt."""

  def __init__(
      self,
      cfg: config.Experiment,
      history: Iterable[ledger_lib.StepRecord],
  ):
    self._tasks = cfg.tasks
    self._candidates = cfg.rl.candidates_per_prompt
    # (version that a step started from, what was known after it).
    self._tallies: collections.deque[tuple[int, curriculum.Tally]] = (
        collections.deque([(-1, {})], maxlen=_TALLIES)
    )
    for step in history:
      self.learn(step.version, step.trained + step.untrained)

  def learn(
      self, version: int, records: Iterable[ledger_lib.GroupRecord]
  ) -> None:
    """Takes note of the groups that a step consumed."""
    groups = [
        (g.stratum, curriculum.worth(g.mean, g.variance))
        for g in records
        if g.judged
    ]
    tally = curriculum.fold(self._tallies[-1][1], groups)
    self._tallies.append((version, tally))

  def has(self, prompt: int) -> bool:
    return curriculum.has(self._tasks, prompt, self._candidates)

  def spec(self, prompt: int, version: int) -> Mapping[str, Any]:
    """Chooses from the steps before the prompt was admitted.

    From those alone: what finished meanwhile depends on the machine's speed.
    """
    known = [t for v, t in self._tallies if v < version]
    tally = known[-1] if known else self._tallies[0][1]
    task = curriculum.choose(self._tasks, prompt, self._candidates, tally)
    return {'task': task}


async def play(
    cfg: config.Experiment, host: player.Player, lease: queue_lib.Lease
) -> trace.Trajectory:
  """Plays the task of a lease."""
  oldest = lease.version - cfg.rl.max_staleness_versions
  return await host.rollout(
      training_task(cfg, lease.spec['task']),
      lease.id,
      seed=lease.spec['seed'],
      oldest_version=max(oldest, 0),
  )


class Elsewhere(Protocol):
  """Where a run's tasks are played, if not in this process."""

  async def open(
      self, cfg: config.Experiment, run_id: str
  ) -> tuple[queue_lib.WorkQueue, blobs_lib.Blobs]:
    """Opens the run's queue and its store of payloads."""
    ...

  async def clear(self, cfg: config.Experiment, run_id: str) -> None:
    """Removes what is left of a run that is over."""
    ...


class Rollouts:
  """Dispatcher, and workers if there are any here, on the host's event loop.

  Attributes:
    dispatcher: what hands out and files.
  """

  def __init__(
      self,
      cfg: config.Experiment,
      host: player.Player,
      ledger: ledger_lib.Ledger,
      version: trace.WeightVersion,
      run_id: str,
      history: Iterable[ledger_lib.StepRecord] = (),
      elsewhere: Elsewhere | None = None,
  ):
    """Goes on behind a ledger.

    Args:
      cfg: the experiment.
      host: plays, if tasks are played here; its loop is used in any case.
      ledger: what was consumed before.
      version: weights of the ledger, which are published.
      run_id: first part of the task ids.
      history: records of all steps of the ledger.
      elsewhere: where tasks are played; None for here.
    """
    self._cfg = cfg
    self._host = host
    self._curriculum = _Curriculum(cfg, history)
    self._failed: futures.Future[None] = futures.Future()
    self._tasks: list[asyncio.Task] = []
    host.call(self._start(version, ledger, run_id, elsewhere))

  async def _start(self, version, ledger, run_id, elsewhere) -> None:
    cfg, queue, works = self._cfg, None, []
    if elsewhere is None:
      queue = inprocess.InProcessQueue(
          lease_seconds=cfg.rl.lease_seconds,
          max_attempts=worker.MAX_ATTEMPTS,
          cursor=ledger.cursor,
      )
      blobs = blobs_lib.MemoryBlobs()
      works = [
          worker.work(
              queue,
              blobs,
              functools.partial(play, cfg, self._host),
              pool=queue_lib.POOL,
              lease_seconds=cfg.rl.lease_seconds,
          )
          for _ in range(cfg.rl.workers)
      ]
    else:
      queue, blobs = await elsewhere.open(cfg, run_id)
    self.dispatcher = dispatcher_lib.Dispatcher(
        queue,
        blobs,
        self._curriculum,
        run=run_id,
        seed=cfg.seed,
        ledger=ledger,
        pacing=admission.Pacing.of(cfg.rl),
        version=version,
        stored=self._stored,
        routing_required=True,
    )
    await self.dispatcher.open(version)
    mine = self.dispatcher
    for coroutine in (mine.offer(), mine.collect(), *works):
      task = asyncio.create_task(coroutine)
      task.add_done_callback(self._done)
      self._tasks.append(task)

  def _done(self, task: asyncio.Task | futures.Future) -> None:
    """Hands the error of anything on the loop to the trainer."""
    if not task.cancelled() and task.exception():
      self._fail(task.exception())

  def _fail(self, error: BaseException) -> None:
    with contextlib.suppress(futures.InvalidStateError):  # the first one wins
      self._failed.set_exception(error)

  def _stored(self, version: int) -> str | None:
    return store_lib.Store(self._host.url).digest(version)

  async def _take(self) -> dispatcher_lib.Step | None:
    step = await self.dispatcher.take(step_record.shown)
    if step is not None:
      batch = step.consumed
      groups = batch.groups + batch.untrained
      self._curriculum.learn(batch.version, map(ledger_lib.record, groups))
    return step

  def take(self) -> dispatcher_lib.Step | None:
    """The next batch; None: every task has been played.

    Raises what a coroutine of the rollout side raised.
    """
    batch = asyncio.run_coroutine_threadsafe(self._take(), self._host.loop)
    futures.wait([batch, self._failed], return_when=futures.FIRST_COMPLETED)
    if self._failed.done():
      batch.cancel()
      self._failed.result()
    return batch.result()

  def published(self, future: futures.Future[publish.Published]) -> None:
    """Opens the gate for a version that is in the store; any thread.

    A publish that failed opens nothing; `take` raises its error.
    """
    if error := future.exception():
      self._fail(error)
      return
    opened = asyncio.run_coroutine_threadsafe(
        self.dispatcher.open(future.result().version), self._host.loop
    )
    opened.add_done_callback(self._done)

  def retire(self, steps: int) -> None:
    """Forgets what the first `steps` steps consumed; they are saved."""
    self._host.call(self.dispatcher.retire(steps))

  async def _stop(self) -> None:
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)

  def close(self) -> None:
    """Stops what runs; its rollouts will be offered again on resume."""
    self._host.call(self._stop())
