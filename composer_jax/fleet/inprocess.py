"""Work queue of one process, the default on one machine.

Time is the event loop's clock, so a test that owns the loop owns the time.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Mapping, Sequence
import dataclasses
import itertools
import secrets
from typing import Any, Literal

from composer_jax import trace
from composer_jax.fleet import queue
from composer_jax.fleet import signal


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
      *,
      lease_seconds: float = 60.0,
      max_attempts: int = 3,
      cursor: int = 0,
  ):
    """Makes an empty queue.

    Args:
      lease_seconds: a worker that neither completes nor extends for so long
        loses its lease.
      max_attempts: leases per task; then it counts as lost.
      cursor: position of the ledger, so that cursors grow over restarts.
    """
    self._lease_seconds = lease_seconds
    self._max_attempts = max_attempts
    self._order = itertools.count()
    self._tasks: dict[str, _Task] = {}
    self._specs: dict[str, Mapping[str, Any]] = {}
    self._done: dict[str, int] = {}  # task -> cursor of its result
    self._pools = collections.defaultdict(asyncio.PriorityQueue)
    self._log: dict[int, queue.ResultRef] = {}
    self._last = cursor
    self._version: trace.WeightVersion | None = None
    self._changed = signal.Signal()

  async def offer(self, task_id: str, spec: Mapping[str, Any]) -> bool:
    if self._specs.get(task_id) == spec:
      return False
    await self.again(task_id, spec)
    return True

  async def again(self, task_id: str, spec: Mapping[str, Any]) -> None:
    await self.retire([task_id])
    self._specs[task_id] = spec
    self._tasks[task_id] = _Task(next(self._order), spec)
    self._enqueue(task_id)

  async def retire(self, task_ids: Sequence[str]) -> None:
    for task_id in task_ids:
      self._specs.pop(task_id, None)
      self._log.pop(self._done.pop(task_id, 0), None)
      task = self._tasks.pop(task_id, None)
      if task is not None and task.timer is not None:
        task.timer.cancel()

  def _enqueue(self, task_id: str) -> None:
    task = self._tasks[task_id]
    pool = task.spec.get('pool', queue.POOL)
    # By order of offering: a redelivered task goes before all younger ones.
    self._pools[pool].put_nowait((task.order, task_id))

  async def lease(self, pool: str, timeout: float) -> queue.Lease | None:
    waiting = self._pools[pool]
    try:
      async with asyncio.timeout(timeout):
        while True:
          order, task_id = await waiting.get()
          task = self._tasks.get(task_id)
          if task is not None and task.order == order:  # else it was retired
            break
    except TimeoutError:
      return None
    task.attempt += 1
    task.token = secrets.token_hex(8)
    self._arm(task_id, task)
    version = None if self._version is None else self._version.step
    return queue.Lease(task_id, task.spec, task.token, version, task.attempt)

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
      self._finish(queue.ResultRef(task_id, None))

  def _finish(self, result: queue.ResultRef) -> None:
    self._tasks.pop(result.task_id).timer.cancel()
    self._last += 1
    self._done[result.task_id] = self._last
    self._log[self._last] = result
    self._changed.fire()

  def _held(self, lease: queue.Lease) -> _Task | None:
    task = self._tasks.get(lease.id)
    return task if task is not None and task.token == lease.token else None

  async def extend(self, lease: queue.Lease) -> bool:
    task = self._held(lease)
    if task is None:
      return False
    self._arm(lease.id, task)
    return True

  async def release(self, lease: queue.Lease, retry: bool) -> None:
    task = self._held(lease)
    if task is not None:
      self._give_back(lease.id, task, retry)

  async def complete(
      self, lease: queue.Lease, result: queue.ResultRef
  ) -> Literal['accepted', 'duplicate']:
    if result.task_id != lease.id:
      raise ValueError(f'result of {result.task_id!r} for lease {lease.id!r}')
    if self._held(lease) is None:
      return 'duplicate'
    self._finish(result)
    return 'accepted'

  async def results(
      self, cursor: int
  ) -> AsyncIterator[tuple[int, queue.ResultRef]]:
    if cursor > self._last:
      raise ValueError(f'cursor={cursor}: the newest result is {self._last}')
    while True:
      while cursor == self._last:
        await self._changed.wait()
      cursor += 1
      if (result := self._log.get(cursor)) is not None:
        yield cursor, result

  async def publish_version(self, version: trace.WeightVersion) -> None:
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
    self._changed.fire()

  async def versions(self) -> AsyncIterator[trace.WeightVersion]:
    seen = None
    while True:
      while self._version == seen:
        await self._changed.wait()
      seen = self._version
      yield seen
