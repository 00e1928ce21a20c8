"""Who plays: leases tasks, keeps them alive, delivers what came out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from composer_jax import trace
from composer_jax.fleet import blobs as blobs_lib
from composer_jax.fleet import facts
from composer_jax.fleet import queue as queue_lib

MAX_ATTEMPTS = 3  # leases of a task; then it counts as lost
Play = Callable[[queue_lib.Lease], Awaitable[trace.Trajectory]]


async def work(
    queue: queue_lib.WorkQueue,
    blobs: blobs_lib.Blobs,
    play: Play,
    *,
    pool: str,
    lease_seconds: float,
    patience: float = 3600.0,
    stop: Callable[[], bool] = lambda: False,
) -> None:
  """Plays one task after the other until it shall stop, or is cancelled.

  Args:
    queue: where tasks come from and results go.
    blobs: where payloads go.
    play: plays the task of a lease; INFRA_ERROR means that it has to be played
      again, as far as attempts are left.
    pool: pool of tasks.
    lease_seconds: a task counts as abandoned after so long without a sign.
    patience: seconds that it waits for a task before it asks `stop` again.
    stop: whether to begin no further task.
  """
  while not stop():
    lease = await queue.lease(pool, timeout=patience)
    if lease is not None:
      await _one(queue, blobs, play, lease, lease_seconds)


async def _one(queue, blobs, play, lease, lease_seconds) -> None:
  trajectory = await queue_lib.keep(queue, lease, lease_seconds, play(lease))
  if trajectory is None:
    return
  infra = trajectory.stop is trace.StopReason.INFRA_ERROR
  if infra and lease.attempt < MAX_ATTEMPTS:
    await queue.release(lease, retry=True)
    return
  blob = await blobs.put(lease.blob, trace.to_bytes(trajectory))
  result = queue_lib.ResultRef(lease.id, blob, facts.of(trajectory))
  if await queue.complete(lease, result) == 'duplicate':
    await blobs.delete([blob.name])
