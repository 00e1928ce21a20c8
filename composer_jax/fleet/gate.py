"""The one mutable admission state of a run, and how coroutines wait for it."""

from __future__ import annotations

from collections.abc import Mapping

from composer_jax import trace
from composer_jax.fleet import admission
from composer_jax.fleet import ingest
from composer_jax.fleet import queue
from composer_jax.fleet import signal


class Gate:
  """Admits prompts, files results, hands out batches.

  It belongs to ONE event loop: another thread calls it through
  `asyncio.run_coroutine_threadsafe(gate.take(), loop).result()`.
  """

  def __init__(self, state: admission.Assembly):
    self.state = state
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

  def check(self, result: queue.ResultRef) -> str:
    """Says why a result must be refused; '' if it may count."""
    prompt, _ = admission.parse_task_id(result.task_id)
    group = self.state.groups.get(prompt)
    if result.facts is None or group is None:
      return ''
    staleness = self.state.pacing.max_staleness_versions
    return ingest.check(
        result.facts,
        task_id=result.task_id,
        digests=self.state.digests,
        oldest_version=group.version - staleness,
    )

  def add(self, cursor: int, result: queue.ResultRef, *, seed: int) -> None:
    """Files one result; one without a payload means that it was lost."""
    prompt, number = admission.parse_task_id(result.task_id)
    refused = self.check(result)
    facts = None if refused else result.facts
    member = admission.Member(cursor, seed, result.blob, facts, refused)
    self._set(admission.add(self.state, prompt, number, member))

  def put_back(
      self, batch: admission.Consumed, refused: Mapping[str, str]
  ) -> None:
    """Undoes `take`: payloads turned out not to be what was said of them.

    Args:
      batch: what was taken last.
      refused: task id -> why.
    """
    self._set(admission.put_back(self.state, batch, refused))

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
