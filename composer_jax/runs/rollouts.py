"""Rollouts of a run on one machine: who dispatches, who plays, who collects.

Everything here lives on the host's event loop; the trainer's thread calls
`take`, `published` and `close` only.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Mapping
from concurrent import futures
import contextlib
import dataclasses
import itertools

from composer_jax import config
from composer_jax import task as task_lib
from composer_jax import trace
from composer_jax.environments import curriculum
from composer_jax.fleet import admission
from composer_jax.fleet import blobs as blobs_lib
from composer_jax.fleet import gate as gate_lib
from composer_jax.fleet import inprocess
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.fleet import queue as queue_lib
from composer_jax.runs import player
from composer_jax.weights import publish
from composer_jax.weights import store as store_lib

_MAX_ATTEMPTS = 3
_TALLIES = 32  # kept; more than a prompt's admission can lag behind


def training_task(cfg: config.Experiment, index: int) -> task_lib.Task:
  """A training task that says which it is, for the ledger."""
  task = cfg.tasks.task(index, 'train')
  known = {'index': str(index), 'stratum': curriculum.stratum(task)}
  return dataclasses.replace(task, meta={**task.meta, **known})


class Rollouts:
  """Dispatcher, workers and collector on the host's event loop.

  Attributes:
    gate: admission.
    queue: tasks and results.
  """

  def __init__(
      self,
      cfg: config.Experiment,
      host: player.Player,
      ledger: ledger_lib.Ledger,
      version: trace.WeightVersion,
      run_id: str,
  ):
    self._cfg = cfg
    self._run_id = run_id
    self._host = host
    self._ledger = ledger
    state = ledger_lib.resume(ledger, admission.Pacing.of(cfg.rl), version)
    self.gate = gate_lib.Gate(state, routing_required=True)
    self.queue = inprocess.InProcessQueue(
        lease_seconds=cfg.rl.lease_seconds,
        max_attempts=_MAX_ATTEMPTS,
        cursor=ledger.cursor,
    )
    self._blobs = blobs_lib.MemoryBlobs()
    # (version that a step started from, what was known after it).
    self._tallies: collections.deque[tuple[int, curriculum.Tally]] = (
        collections.deque([(-1, {})], maxlen=_TALLIES)
    )
    for step in ledger.steps:
      self._learn(step.version, step.trained + step.untrained)
    self._failed: futures.Future[None] = futures.Future()
    self._tasks: list[asyncio.Task] = []
    host.call(self._start(version))

  async def _start(self, version: trace.WeightVersion) -> None:
    await self.open(version)
    works = [self._work() for _ in range(self._cfg.rl.workers)]
    for coroutine in (self._dispatch(), self._collect(), *works):
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

  def _learn(
      self, version: int, records: tuple[ledger_lib.GroupRecord, ...]
  ) -> None:
    groups = [
        (g.stratum, curriculum.worth(g.mean, g.variance))
        for g in records
        if g.judged
    ]
    tally = curriculum.fold(self._tallies[-1][1], groups)
    self._tallies.append((version, tally))

  def _choose(self, prompt: int) -> int:
    """Task of a prompt, from the steps before it was admitted.

    Of those alone: what finished meanwhile depends on the machine's speed.
    """
    admitted = self.gate.state.groups[prompt].version
    known = [t for version, t in self._tallies if version < admitted]
    return curriculum.choose(
        self._cfg.tasks,
        prompt,
        self._cfg.rl.candidates_per_prompt,
        known[-1] if known else self._tallies[0][1],
    )

  async def _dispatch(self) -> None:
    rl = self._cfg.rl
    again = [prompt for prompt, _ in self._ledger.in_flight]
    fresh = itertools.count(self._ledger.next_prompt)
    for prompt in itertools.chain(again, fresh):
      if not curriculum.has(self._cfg.tasks, prompt, rl.candidates_per_prompt):
        self.gate.exhaust()
        return
      await self.gate.admit(admission.task_id(self._run_id, prompt, 0))
      task = self._choose(prompt)
      for member in range(rl.rollouts_per_group):
        seed = admission.rollout_seed(self._cfg.seed, prompt, member)
        task_id = admission.task_id(self._run_id, prompt, member)
        await self.queue.offer(task_id, {'task': task, 'seed': seed})

  async def _work(self) -> None:
    while True:
      lease = await self.queue.lease('rollout', timeout=3600.0)
      if lease is not None:
        await self._roll(lease)

  async def _roll(self, lease: queue_lib.Lease) -> None:
    rl = self._cfg.rl
    task = training_task(self._cfg, lease.spec['task'])
    trajectory = await queue_lib.keep(
        self.queue,
        lease,
        rl.lease_seconds,
        self._host.rollout(
            task,
            lease.id,
            seed=lease.spec['seed'],
            oldest_version=max(lease.version - rl.max_staleness_versions, 0),
        ),
    )
    if trajectory is None:
      return
    if (
        trajectory.stop is trace.StopReason.INFRA_ERROR
        and lease.attempt < _MAX_ATTEMPTS
    ):
      await self.queue.release(lease, retry=True)
      return
    blob = await self._blobs.put(lease.blob, trace.to_bytes(trajectory))
    ref = queue_lib.ResultRef(lease.id, blob)
    if await self.queue.complete(lease, ref) == 'duplicate':
      await self._blobs.delete([blob.name])

  async def _collect(self) -> None:
    async for cursor, ref in self.queue.results(self._ledger.cursor):
      trajectory = None
      if ref.blob is not None:
        trajectory = trace.from_bytes(await self._blobs.get(ref.blob))
        await self._blobs.delete([ref.blob.name])
        await self._reach(trajectory.weights)
      prompt, member = admission.parse_task_id(ref.task_id)
      self.gate.add(
          cursor,
          ref.task_id,
          trajectory,
          seed=admission.rollout_seed(self._cfg.seed, prompt, member),
          sha256=ref.sha256,
      )

  async def _reach(self, weights: Mapping[int, str]) -> None:
    """Waits until the gate knows the versions that a result was sampled with.

    Hosts see a version in the store before its publisher has said so. One that
    the store does not have waits for nothing, and is refused.
    """
    for version, digest in weights.items():
      if version > self.gate.state.published:
        if await asyncio.to_thread(self._stored, version) == digest:
          await self.gate.reaches(version)

  def _stored(self, version: int) -> str | None:
    return store_lib.Store(self._host.url).digest(version)

  async def _take(self) -> admission.Consumed | None:
    batch = await self.gate.take()
    if batch is not None:
      groups = batch.groups + batch.untrained
      self._learn(batch.version, tuple(map(ledger_lib.record, groups)))
    return batch

  def take(self) -> admission.Consumed | None:
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
        self.open(future.result().version), self._host.loop
    )
    opened.add_done_callback(self._done)

  async def open(self, version: trace.WeightVersion) -> None:
    """Tells workers and the gate of weights that are in the store."""
    await self.queue.publish_version(version)
    self.gate.publish(version)

  async def _stop(self) -> None:
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)

  def close(self) -> None:
    """Stops what runs; its rollouts will be offered again on resume."""
    self._host.call(self._stop())
