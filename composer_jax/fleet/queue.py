"""Work queue: tasks go down, result references come up, versions go down.

`InProcessQueue` is the default for one machine. Time is the event loop's
clock, so a test that owns the loop owns the time.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Coroutine, Mapping
import dataclasses
import hashlib
import itertools
import secrets
from typing import Any, Literal, Protocol, TypeVar

from composer_jax import trace
from composer_jax.fleet import gate as gate_lib

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class ResultRef:
  """Where the payload of a result lies; messages never carry the payload.

  Attributes:
    task_id: `run/prompt/member`.
    key: name in the blob store; '' if every attempt was lost.
    size: bytes.
    sha256: digest of the payload, hex.
  """

  task_id: str
  key: str
  size: int
  sha256: str

  @classmethod
  def nothing(cls, task_id: str) -> ResultRef:
    """An infrastructure failure: no attempt returned anything."""
    return cls(task_id, '', 0, '')

  @property
  def lost(self) -> bool:
    return not self.key


@dataclasses.dataclass(frozen=True)
class Lease:
  """The right to work on a task until the lease's deadline.

  Attributes:
    id: task id.
    spec: what to do, as offered.
    token: identifies this lease; a later lease of the task has another.
    version: newest weights published at lease time; work must not start on
      older ones. None before the first publication.
    attempt: number of the lease of this task, from 1.
  """

  id: str
  spec: Mapping[str, Any]
  token: str
  version: int | None
  attempt: int


class WorkQueue(Protocol):
  """Tasks at least once, a resumable result stream and a version pointer."""

  async def offer(self, task_id: str, spec: Mapping[str, Any]) -> None:
    """Adds a task; waits until the admission gate has headroom for it."""
    ...

  async def lease(self, pool: str, timeout: float) -> Lease | None:
    """The oldest waiting task of a pool; None after `timeout` seconds."""
    ...

  async def extend(self, lease: Lease) -> bool:
    """Renews the deadline. False: the lease is lost, abandon the work."""
    ...

  async def release(self, lease: Lease, retry: bool) -> None:
    """Gives a task back, for another attempt or as a failure."""
    ...

  async def complete(
      self, lease: Lease, result: ResultRef
  ) -> Literal['accepted', 'duplicate']:
    """Delivers a result; 'duplicate' if the lease was lost meanwhile."""
    ...

  def results(self, cursor: int) -> AsyncIterator[tuple[int, ResultRef]]:
    """Results after `cursor`, each with the cursor to resume after it."""
    ...

  async def publish_version(
      self, version: trace.WeightVersion, manifest: str
  ) -> None:
    """Moves the version pointer forward; trainer only."""
    ...

  def versions(self) -> AsyncIterator[trace.WeightVersion]:
    """The current version, then newer ones; may skip to the newest."""
    ...


async def keep(
    queue: WorkQueue, lease: Lease, seconds: float, work: Coroutine[Any, Any, T]
) -> T | None:
  """Does the work of a lease, with a sign of life every third of it.

  Args:
    queue: where the lease is from.
    lease: the lease.
    seconds: its length without a sign of life.
    work: may take any time. It is cancelled if the lease is lost nevertheless:
      somebody else does it by then.

  Returns:
    What the work returns; None if the lease was lost.
  """
  task = asyncio.ensure_future(work)
  try:
    while not task.done():
      await asyncio.wait([task], timeout=seconds / 3)
      if not task.done() and not await queue.extend(lease):
        return None
    return task.result()
  finally:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Gate(Protocol):
  """The part of the admission gate that a queue needs."""

  async def admit(self, task_id: str) -> None:
    ...

  def publish(self, version: trace.WeightVersion) -> None:
    ...


class Blobs:
  """Payload store in memory, verified on read.

  A payload's name holds the token of the lease that produced it: an attempt
  whose lease was lost can neither overwrite nor delete the accepted payload.
  """

  def __init__(self):
    self._data: dict[str, bytes] = {}

  async def put(self, lease: Lease, data: bytes) -> ResultRef:
    key = f'{lease.id}/{lease.token}'
    self._data[key] = data
    sha256 = hashlib.sha256(data).hexdigest()
    return ResultRef(lease.id, key, len(data), sha256)

  async def get(self, ref: ResultRef) -> bytes:
    """Returns the payload.

    Raises:
      ValueError: it is missing, or not what was delivered.
    """
    data = self._data.get(ref.key)
    if data is None:
      raise ValueError(f'blob {ref.key!r}: missing')
    if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
      raise ValueError(f'blob {ref.key!r}: size or sha256 differs; damaged')
    return data

  async def delete(self, ref: ResultRef) -> None:
    self._data.pop(ref.key, None)


@dataclasses.dataclass
class _Task:
  """A task without a result. `token` is None while it waits in its pool."""

  order: int
  spec: Mapping[str, Any]
  attempt: int = 0
  token: str | None = None
  deadline: float = 0.0
  timer: asyncio.TimerHandle | None = None


class InProcessQueue:
  """`WorkQueue` of one process and ONE event loop.

  Other threads call it through `asyncio.run_coroutine_threadsafe`.
  """

  def __init__(
      self,
      gate: Gate,
      *,
      lease_seconds: float = 60.0,
      max_attempts: int = 3,
      cursor: int = 0,
  ):
    """Makes an empty queue.

    Args:
      gate: decides when an offer may enter.
      lease_seconds: a worker that neither completes nor extends for so long
        loses its lease.
      max_attempts: leases per task; then it counts as lost.
      cursor: position of the ledger, so that cursors grow over restarts.
    """
    self._gate = gate
    self._lease_seconds = lease_seconds
    self._max_attempts = max_attempts
    self._first = cursor
    self._order = itertools.count()
    self._tasks: dict[str, _Task] = {}
    self._done: set[str] = set()
    self._pools = collections.defaultdict(asyncio.PriorityQueue)
    self._log: list[ResultRef] = []
    self._version: trace.WeightVersion | None = None
    self._changed = gate_lib.Signal()
    self.manifests: dict[int, str] = {}

  async def offer(self, task_id: str, spec: Mapping[str, Any]) -> None:
    await self._gate.admit(task_id)
    if task_id in self._tasks or task_id in self._done:
      raise ValueError(f'task {task_id!r}: offered twice')
    self._tasks[task_id] = _Task(next(self._order), spec)
    self._enqueue(task_id)

  def _enqueue(self, task_id: str) -> None:
    task = self._tasks[task_id]
    pool = task.spec.get('pool', 'rollout')
    # By order of offering: a redelivered task goes before all younger ones.
    self._pools[pool].put_nowait((task.order, task_id))

  async def lease(self, pool: str, timeout: float) -> Lease | None:
    try:
      async with asyncio.timeout(timeout):
        _, task_id = await self._pools[pool].get()
    except TimeoutError:
      return None
    task = self._tasks[task_id]
    task.attempt += 1
    task.token = secrets.token_hex(8)
    self._arm(task_id, task)
    version = None if self._version is None else self._version.step
    return Lease(task_id, task.spec, task.token, version, task.attempt)

  def _arm(self, task_id: str, task: _Task) -> None:
    loop = asyncio.get_running_loop()
    if task.timer is not None:
      task.timer.cancel()
    task.deadline = loop.time() + self._lease_seconds
    task.timer = loop.call_at(task.deadline, self._expire, task_id)

  def _expire(self, task_id: str) -> None:
    task = self._tasks[task_id]
    late = asyncio.get_running_loop().time() - task.deadline
    if late > self._lease_seconds / 10:
      # The loop itself stood still, so nobody could extend: expiring now
      # would take the lease of every healthy worker at once.
      self._arm(task_id, task)
    else:
      self._give_back(task_id, task, retry=True)

  def _give_back(self, task_id: str, task: _Task, retry: bool) -> None:
    task.token = None
    if retry and task.attempt < self._max_attempts:
      task.timer.cancel()
      self._enqueue(task_id)
    else:
      self._finish(ResultRef.nothing(task_id))

  def _finish(self, result: ResultRef) -> None:
    self._tasks.pop(result.task_id).timer.cancel()
    self._done.add(result.task_id)
    self._log.append(result)
    self._changed.fire()

  def _held(self, lease: Lease) -> _Task | None:
    task = self._tasks.get(lease.id)
    return task if task is not None and task.token == lease.token else None

  async def extend(self, lease: Lease) -> bool:
    task = self._held(lease)
    if task is None:
      return False
    self._arm(lease.id, task)
    return True

  async def release(self, lease: Lease, retry: bool) -> None:
    task = self._held(lease)
    if task is not None:
      self._give_back(lease.id, task, retry)

  async def complete(
      self, lease: Lease, result: ResultRef
  ) -> Literal['accepted', 'duplicate']:
    if result.task_id != lease.id:
      raise ValueError(f'result of {result.task_id!r} for lease {lease.id!r}')
    if self._held(lease) is None:
      return 'duplicate'
    self._finish(result)
    return 'accepted'

  async def results(self, cursor: int) -> AsyncIterator[tuple[int, ResultRef]]:
    if not self._first <= cursor <= self._first + len(self._log):
      raise ValueError(
          f'cursor={cursor}: this queue holds results from {self._first} to'
          f' {self._first + len(self._log)}'
      )
    index = cursor - self._first
    while True:
      while index == len(self._log):
        await self._changed.wait()
      index += 1
      yield self._first + index, self._log[index - 1]

  async def publish_version(
      self, version: trace.WeightVersion, manifest: str
  ) -> None:
    """Moves the pointer if `version` follows the current one.

    Raises:
      ValueError: the step does not grow, or a delta has another parent.
    """
    current = self._version
    if version == current:
      return
    if current is not None and (
        version.step <= current.step
        or version.parent not in (None, current.digest)
    ):
      raise ValueError(f'version {version}: does not follow {current}')
    self._version = version
    self.manifests[version.step] = manifest
    self._gate.publish(version)
    self._changed.fire()

  async def versions(self) -> AsyncIterator[trace.WeightVersion]:
    seen = None
    while True:
      while self._version == seen:
        await self._changed.wait()
      seen = self._version
      yield seen
