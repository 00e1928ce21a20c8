"""A whole asynchronous run in virtual time: no test ever sleeps."""

import asyncio
from collections.abc import Callable
import dataclasses
import selectors

import numpy as np

from composer_jax import trace
from composer_jax.fleet import admission
from composer_jax.fleet import blobs as blobs_lib
from composer_jax.fleet import dispatcher as dispatcher_lib
from composer_jax.fleet import facts
from composer_jax.fleet import inprocess
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.fleet import queue as queue_lib

RUN = 'run'


class _Selector(selectors.DefaultSelector):
  """Turns waiting for a timer into moving the clock."""

  def __init__(self):
    super().__init__()
    self.now = 0.0

  def select(self, timeout=None):
    events = super().select(0)
    if events:
      return events
    if timeout is None:
      raise AssertionError('deadlock: every task waits and no timer is set')
    self.now += max(0.0, timeout)
    if self.now > 1e8:
      raise AssertionError('livelock: years pass and the test does not end')
    return []


class VirtualLoop(asyncio.SelectorEventLoop):
  """Its clock jumps to the next timer; a loop that can never go on raises."""

  def __init__(self):
    self._virtual = _Selector()
    super().__init__(self._virtual)

  def time(self) -> float:
    return self._virtual.now

  def stall(self, seconds: float) -> None:
    """Lets time pass while no task runs, like a long compilation."""
    self._virtual.now += seconds

  def shut(self) -> None:
    """Cancels what still runs, then closes."""
    tasks = asyncio.all_tasks(self)
    for task in tasks:
      task.cancel()
    if tasks:
      self.run_until_complete(asyncio.wait(tasks))
    self.run_until_complete(self.shutdown_asyncgens())
    self.close()


def run(coroutine):
  """Runs a coroutine to its end on a fresh virtual loop."""
  loop = VirtualLoop()
  try:
    return loop.run_until_complete(coroutine)
  finally:
    loop.shut()


def weights(step):
  return trace.WeightVersion(step, f'digest{step}', None)


def rollout(
    task_id, reward, versions=(0,), stop=trace.StopReason.FINISHED, experts=0
):
  """A trajectory with one prompt token, then one token per version."""
  versions = np.array((*versions[:1], *versions), np.int32)
  n = len(versions)
  sampled = np.arange(n) > 0
  segment = trace.TokenTrace(
      tokens=np.arange(n, dtype=np.int32),
      sampled=sampled,
      logps=np.where(sampled, -1.0, 0.0).astype(np.float32),
      versions=versions,
      routing=trace.RoutingTrace(np.full((n, 2, 2), experts, np.uint8)),
  )
  return trace.Trajectory(
      task_id=task_id,
      group_id=task_id.rpartition('/')[0],
      segments=(segment,),
      reward=reward,
      reward_parts={},
      stop=stop,
      weights={int(v): f'digest{v}' for v in versions},
  )


@dataclasses.dataclass(frozen=True)
class Source:
  """So many prompts, each with a task of its own."""

  prompts: int = 1 << 30
  tasks: int = 0  # number of the first

  def has(self, prompt):
    return prompt < self.prompts

  def spec(self, prompt, version):
    del version
    return {'task': self.tasks + prompt}


def dispatcher(
    queue, blobs, ledger, pacing, version, *, prompts=1 << 30, tasks=0
):
  """A run's dispatcher."""
  return dispatcher_lib.Dispatcher(
      queue,
      blobs,
      Source(prompts, tasks),
      run=RUN,
      seed=0,
      ledger=ledger,
      pacing=pacing,
      version=version,
      stored={}.get,
      routing_required=True,
  )


@dataclasses.dataclass
class Run:
  """One life of a trainer with its queue and its workers.

  Attributes:
    pacing: limits.
    reward: (prompt, member) -> reward.
    seconds: (prompt, member, attempt) -> duration; inf hangs.
    ledger: what the restored weights have consumed.
    prompts: how many the source has.
    workers: rollouts at a time.
    batches: (time of the take, batch), filled by `train`.
  """

  pacing: admission.Pacing
  reward: Callable[[int, int], float]
  seconds: Callable[[int, int, int], float]
  ledger: ledger_lib.Ledger = ledger_lib.Ledger()
  prompts: int = 1 << 30
  workers: int = 64
  lease_seconds: float = 20.0
  train_seconds: float = 1.0
  batches: list = dataclasses.field(default_factory=list)

  async def _follow(self):
    async for version in self.queue.versions():
      self.serving = version.step

  async def _work(self):
    while True:
      lease = await self.queue.lease('rollout', 1e6)
      if lease is not None:
        await self._roll(lease)

  async def _roll(self, lease):
    prompt, member = admission.parse_task_id(lease.id)
    left = self.seconds(prompt, member, lease.attempt)
    versions = []
    while left > 0:
      versions.append(self.serving)
      if left == float('inf'):
        await asyncio.sleep(1.5 * self.lease_seconds)
      await asyncio.sleep(min(left, 1.0))
      left -= 1.0
      if not await self.queue.extend(lease):
        return
    trajectory = rollout(lease.id, self.reward(prompt, member), versions)
    data = trace.to_bytes(trajectory)
    blob = await self.blobs.put(lease.blob, data)
    ref = queue_lib.ResultRef(lease.id, blob, facts.of(trajectory))
    if await self.queue.complete(lease, ref) == 'duplicate':
      await self.blobs.delete([blob.name])

  async def _train(self, steps):
    for _ in range(steps):
      step = await self.dispatcher.take(lambda batch: ())
      if step is None:
        return
      batch = step.consumed
      self.batches.append((asyncio.get_running_loop().time(), batch))
      version = weights(batch.version)
      self.ledger = ledger_lib.commit(self.ledger, batch, version.digest)
      await asyncio.sleep(self.train_seconds)
      await self.dispatcher.open(weights(batch.version + 1))

  async def train(self, steps: int) -> ledger_lib.Ledger:
    """Runs a life of at most `steps` steps; everything dies at its end."""
    version = weights(self.ledger.done)
    self.serving = version.step
    self.queue = inprocess.InProcessQueue(
        lease_seconds=self.lease_seconds,
        cursor=self.ledger.cursor,
    )
    self.blobs = blobs_lib.MemoryBlobs()
    self.dispatcher = dispatcher(
        self.queue,
        self.blobs,
        self.ledger,
        self.pacing,
        version,
        prompts=self.prompts,
    )
    await self.dispatcher.open(version)
    async with asyncio.TaskGroup() as group:
      others = [
          group.create_task(c())
          for c in (
              self.dispatcher.offer,
              self._follow,
              self.dispatcher.collect,
          )
          + (self._work,) * self.workers
      ]
      await self._train(steps)
      for task in others:
        task.cancel()
    return self.ledger
