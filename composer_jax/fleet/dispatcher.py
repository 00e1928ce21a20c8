"""Who hands out the tasks of a run and files their results; no jax."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import itertools
from typing import Any, Protocol

from composer_jax import trace
from composer_jax.fleet import admission
from composer_jax.fleet import blobs as blobs_lib
from composer_jax.fleet import facts as facts_lib
from composer_jax.fleet import gate as gate_lib
from composer_jax.fleet import ingest
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.fleet import queue as queue_lib
from composer_jax.fleet import worker

_READERS = 16  # payloads that are read at once


class Source(Protocol):
  """Which task a prompt of the run is."""

  def has(self, prompt: int) -> bool:
    """Says whether there is a task for this prompt; later ones have none."""
    ...

  def spec(self, prompt: int, version: int) -> Mapping[str, Any]:
    """The task of a prompt that was admitted with a weight version."""
    ...


@dataclasses.dataclass(frozen=True)
class Step:
  """What a step trains on.

  Attributes:
    consumed: the groups it consumes.
    payloads: task id -> rollout, of those that were asked for.
    renamed: numbers of versions that are those of others by now. A resumed run
      publishes its weights anew: what was sampled with them is not stale.
  """

  consumed: admission.Consumed
  payloads: Mapping[str, trace.Trajectory]
  renamed: Mapping[int, int] = dataclasses.field(default_factory=dict)

  def rollouts(self, group: admission.Group) -> list[trace.Trajectory]:
    """The valid members of a group, in order, to train on."""
    return [self._renamed(self.payloads[f.task_id]) for f in group.rollouts]

  def _renamed(self, t: trace.Trajectory) -> trace.Trajectory:
    if not self.renamed.keys() & t.weights.keys():
      return t
    segments = []
    for s in t.segments:
      versions = s.versions.copy()
      for old, new in self.renamed.items():
        versions[s.versions == old] = new
      segments.append(dataclasses.replace(s, versions=versions))
    return dataclasses.replace(t, segments=tuple(segments))


def renamed(version: int, before: int | None) -> dict[int, int]:
  """`Step.renamed` of a step.

  Args:
    version: number of the weights that it starts from.
    before: that of the step before it; None if there is none.
  """
  known = version if before is None else before + 1
  return {} if known == version else {known: version}


class Dispatcher:
  """Admission, offers, results and payloads of a run, on ONE event loop.

  Attributes:
    gate: admission.
  """

  def __init__(
      self,
      queue: queue_lib.WorkQueue,
      blobs: blobs_lib.Blobs,
      source: Source,
      *,
      run: str,
      seed: int,
      ledger: ledger_lib.Ledger,
      pacing: admission.Pacing,
      version: trace.WeightVersion,
      stored: Callable[[int], str | None],
      routing_required: bool,
  ):
    """Takes up a run where its ledger ends.

    Args:
      queue: tasks and results.
      blobs: payloads.
      source: tasks of the run.
      run: first part of the task ids.
      seed: seed of the run.
      ledger: what was consumed before.
      pacing: limits.
      version: weights of the ledger.
      stored: digest of a version in the weight store, or None; it may block.
      routing_required: see `ingest.check_payload`.
    """
    self.gate = gate_lib.Gate(ledger_lib.resume(ledger, pacing, version))
    self._queue, self._blobs, self._source = queue, blobs, source
    self._run, self._seed = run, seed
    self._ledger = ledger
    self._members = pacing.rollouts_per_group
    self._stored = stored
    self._routing_required = routing_required
    self._first = version.step  # of this life of the run
    last = ledger.digests[-1][0] if ledger.digests else None
    self._renamed = renamed(version.step, last)
    self._opening = asyncio.Lock()
    self._void: collections.Counter[str] = collections.Counter()
    self._offered: set[int] = set()  # prompts, until they are consumed
    # Results of an earlier life whose prompts are not offered yet.
    self._early: dict[str, tuple[int, queue_lib.ResultRef]] = {}
    # Consumed prompts whose payloads are still there, by step.
    self._spent: list[tuple[int, list[int]]] = []

  async def open(self, version: trace.WeightVersion) -> None:
    """Tells workers and the gate of weights that are in the store."""
    # One after the other: a queue that was away must not hear of the next
    # version before it has heard of this one.
    async with self._opening:
      await self._queue.publish_version(version)
      self.gate.publish(version)

  def _ids(self, prompt: int) -> list[str]:
    return [
        admission.task_id(self._run, prompt, member)
        for member in range(self._members)
    ]

  def _spec(self, task_id: str) -> Mapping[str, Any]:
    prompt, member = admission.parse_task_id(task_id)
    admitted = self.gate.state.groups[prompt].version
    seed = admission.rollout_seed(self._seed, prompt, member)
    return {**self._source.spec(prompt, admitted), 'seed': seed}

  async def offer(self) -> None:
    """Offers every task that the gate admits; returns with the last one.

    What was in flight when the ledger was saved comes first, under the same
    ids and seeds; a queue that survived may have it already, or even results.
    """
    again = [prompt for prompt, _ in self._ledger.in_flight]
    fresh = itertools.count(self._ledger.next_prompt)
    for prompt in itertools.chain(again, fresh):
      if not self._source.has(prompt):
        self.gate.exhaust()
        return
      await self.gate.admit(self._ids(prompt)[0])
      await asyncio.gather(*map(self._offer, self._ids(prompt)))
      self._offered.add(prompt)
      for task_id in self._ids(prompt):
        if task_id in self._early:
          await self._file(*self._early.pop(task_id))

  async def _offer(self, task_id: str) -> None:
    if await self._queue.offer(task_id, self._spec(task_id)):
      self._early.pop(task_id, None)  # of another task under this id

  async def collect(self) -> None:
    """Files results until it is cancelled."""
    left: set[int] = set()
    # All that the queue still has: the ledger decides what is known.
    async for cursor, result in self._queue.results(0):
      prompt, _ = admission.parse_task_id(result.task_id)
      state = self.gate.state
      if prompt in self._offered:
        await self._file(cursor, result)
      elif prompt in state.groups or prompt >= state.next_prompt:
        self._early[result.task_id] = (cursor, result)
      elif prompt not in left:  # an earlier life had no time to forget it
        left.add(prompt)
        await self._forget(prompt)

  async def _file(self, cursor: int, result: queue_lib.ResultRef) -> None:
    if result.facts is not None:
      await self._reach(result.facts.weights)
      if self._is_void(result):
        await self._queue.again(result.task_id, self._spec(result.task_id))
        return
    prompt, member = admission.parse_task_id(result.task_id)
    seed = admission.rollout_seed(self._seed, prompt, member)
    self.gate.add(cursor, result, seed=seed)

  async def _reach(self, weights: Mapping[int, str]) -> None:
    """Waits until the gate knows the versions that a result was sampled with.

    Hosts see a version in the store before its publisher has said so. One that
    the store does not have waits for nothing, and is refused.
    """
    for version, digest in weights.items():
      if version > self.gate.state.published:
        if await asyncio.to_thread(self._stored, version) == digest:
          await self.gate.reaches(version)

  def _is_void(self, result: queue_lib.ResultRef) -> bool:
    """Says whether a result has to be played again, and is nobody's fault.

    A trainer that died had published versions after its last checkpoint; the
    resumed run goes on from other weights, under newer numbers. What hosts
    sampled with the lost ones must not be trained, but was sampled in good
    faith: it costs no attempt. A host that goes on claiming such numbers is
    refused in the end.
    """
    if not self.gate.check(result):
      return False
    if all(v >= self._first for v in result.facts.weights):
      return False
    self._void[result.task_id] += 1
    return self._void[result.task_id] < worker.MAX_ATTEMPTS

  async def take(
      self, shown: Callable[[admission.Consumed], Iterable[facts_lib.Facts]]
  ) -> Step | None:
    """The next batch with its payloads; None: every task has been played.

    Args:
      shown: which rollouts of a batch to read besides those that train.
    """
    while (batch := await self.gate.take()) is not None:
      wanted = [f for g in batch.groups for f in g.rollouts]
      ids = {f.task_id for f in (*wanted, *shown(batch))}
      members = [
          m
          for g in batch.groups + batch.untrained
          for m in g.members.values()
          if m.facts is not None and m.facts.task_id in ids
      ]
      payloads, refused = await self._read(members)
      if not refused:
        prompts = [g.prompt for g in batch.groups + batch.untrained]
        self._spent.append((batch.step, prompts))
        self._offered.difference_update(prompts)
        return Step(batch, payloads, self._renamed)
      self.gate.put_back(batch, refused)
    return None

  async def _read(
      self, members: Sequence[admission.Member]
  ) -> tuple[dict[str, trace.Trajectory], dict[str, str]]:
    """Payloads by task id, and why some are refused."""
    payloads: dict[str, trace.Trajectory] = {}
    refused: dict[str, str] = {}
    few = asyncio.Semaphore(_READERS)

    async def read(blob: blobs_lib.BlobRef, facts: facts_lib.Facts) -> None:
      try:
        async with few:
          payload = trace.from_bytes(await self._blobs.get(blob))
      except ValueError as e:
        refused[facts.task_id] = str(e)
        return
      payloads[facts.task_id] = payload
      if why := ingest.check_payload(
          payload, facts, routing_required=self._routing_required
      ):
        refused[facts.task_id] = why

    await asyncio.gather(
        *(read(m.blob, m.facts) for m in members if m.blob and m.facts)
    )
    return payloads, refused

  async def retire(self, steps: int) -> None:
    """Forgets tasks and payloads that were consumed.

    Args:
      steps: so many steps are in a checkpoint that nothing can lose any more.
    """
    done = [prompts for step, prompts in self._spent if step < steps]
    self._spent = self._spent[len(done) :]
    for prompt in itertools.chain.from_iterable(done):
      await self._forget(prompt)

  async def _forget(self, prompt: int) -> None:
    ids = self._ids(prompt)
    await self._queue.retire(ids)
    group = ids[0].rpartition('/')[0]
    # Also what attempts left whose lease was lost.
    await self._blobs.delete(await self._blobs.names(f'{group}/'))
