"""Work queue: tasks go down, results come up by reference, versions go down.

What a queue is, for dispatchers and workers; `inprocess` has the one of a
single machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
import dataclasses
from typing import Any, Literal, Protocol, TypeVar

from composer_jax import trace
from composer_jax.fleet import blobs as blobs_lib
from composer_jax.fleet import facts as facts_lib

POOL = 'rollout'  # of tasks that do not name one
T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class ResultRef:
  """A result: where its payload lies; messages never carry it.

  Attributes:
    task_id: `run/prompt/member`.
    blob: the payload; None if every attempt was lost.
    facts: what the payload says of the rollout; None if there is none.
  """

  task_id: str
  blob: blobs_lib.BlobRef | None = None
  facts: facts_lib.Facts | None = None

  @property
  def lost(self) -> bool:
    """An infrastructure failure: no attempt returned anything."""
    return self.blob is None


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

  @property
  def blob(self) -> str:
    """Name of its result's payload.

    An attempt whose lease was lost can neither overwrite nor delete the
    payload that was accepted.
    """
    return f'{self.id}/{self.token}'


class WorkQueue(Protocol):
  """Tasks at least once, a resumable result stream and a version pointer."""

  async def offer(self, task_id: str, spec: Mapping[str, Any]) -> bool:
    """Adds a task; whoever offers has admitted it.

    A queue may outlive the dispatcher that filled it. A task that is there
    with another spec is replaced, and what became of it forgotten.

    Returns:
      False if it was there already, with or without a result.
    """
    ...

  async def again(self, task_id: str, spec: Mapping[str, Any]) -> None:
    """Offers a task whose result is void once more, as if never offered."""
    ...

  async def retire(self, task_ids: Sequence[str]) -> None:
    """Forgets tasks and their results, whatever their state."""
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
    """Results after `cursor` that are not retired, each with its cursor.

    Cursors grow, and may skip numbers.
    """
    ...

  async def publish_version(self, version: trace.WeightVersion) -> None:
    """Moves the version pointer forward; trainer only.

    Raises:
      ValueError: the step does not grow, or a delta has another parent.
    """
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
