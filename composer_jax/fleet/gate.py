"""The one mutable admission state of a run, and how coroutines wait for it."""

from __future__ import annotations

from composer_jax import trace
from composer_jax.fleet import admission
from composer_jax.fleet import ingest
from composer_jax.fleet import signal


class Gate:
  """Admits prompts, files results, hands out batches.

  It belongs to ONE event loop: another thread calls it through
  `asyncio.run_coroutine_threadsafe(gate.take(), loop).result()`.
  """

  def __init__(self, state: admission.Assembly, *, routing_required: bool):
    self.state = state
    self._routing_required = routing_required
    self._changed = signal.Signal()

  def _set(self, state: admission.Assembly) -> None:
    self.state = state
    self._changed.fire()

  async def admit(self, task_id: str) -> None:
    """Returns once the task's group is admitted; the group counts once.

    Raises:
      ValueError: its prompt was consumed before, or is not the next one.
    """
    prompt, _ = admission.parse_task_id(task_id)
    if prompt in self.state.groups:
      return
    while self.state.headroom <= 0:
      await self._changed.wait()
    self._set(admission.admit(self.state, prompt))

  def publish(self, version: trace.WeightVersion) -> None:
    self._set(admission.publish(self.state, version))

  async def reaches(self, version: int) -> None:
    """Returns once that version, or a newer one, is published."""
    while self.state.published < version:
      await self._changed.wait()

  def exhaust(self) -> None:
    """Declares that no further prompt will be offered."""
    self._set(admission.exhaust(self.state))

  def add(
      self,
      cursor: int,
      task_id: str,
      trajectory: trace.Trajectory | None,
      *,
      seed: int,
      sha256: str = '',
  ) -> None:
    """Files one result; None means that every attempt at it was lost."""
    prompt, member = admission.parse_task_id(task_id)
    refused = ''
    group = self.state.groups.get(prompt)
    if trajectory is not None and group is not None:
      staleness = self.state.pacing.max_staleness_versions
      refused = ingest.check(
          trajectory,
          task_id=task_id,
          digests=self.state.digests,
          oldest_version=group.version - staleness,
          routing_required=self._routing_required,
      )
    if refused:
      trajectory = None
    result = admission.Member(cursor, seed, sha256, trajectory, refused)
    self._set(admission.add(self.state, prompt, member, result))

  async def take(self) -> admission.Consumed | None:
    """Waits for the next batch; None: the source is exhausted and consumed."""
    while not self.state.finished:
      taken = admission.take(self.state)
      if taken is not None:
        batch, state = taken
        self._set(state)
        return batch
      await self._changed.wait()
    return None
