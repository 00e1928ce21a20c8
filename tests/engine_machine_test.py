"""Requests come, go and are given up under new weights; no page is lost."""

from concurrent import futures
import random

from absl.testing import absltest
import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st
import numpy as np

from composer_jax import config
from tests import engine_requests as lib

# The shapes of `engine_pages_test`: seven pages for twelve slots.
_ROLLOUT = config.RolloutConfig(
    slots=12,
    context_tokens=96,
    steps_per_sync=3,
    prefill_tokens=20,
    cache_tokens=7 * 32,
)


class EngineMachine(stateful.RuleBasedStateMachine):
  """An engine, and what it still owes."""

  def __init__(self):
    super().__init__()
    self.fresh = []
    self.engine = lib.engine(_ROLLOUT, lanes=1, refresh=self._refresh)
    self.start = self.engine.free()
    self.pending = []  # (request, future)
    self.version = 0

  def _refresh(self):
    return self.fresh.pop(0) if self.fresh else None

  @stateful.rule(
      seed=st.integers(0, 99),
      size=st.integers(1, 90),
      max_tokens=st.integers(1, 60),
      count=st.integers(1, 5),
  )
  def submit(self, seed, size, max_tokens, count):
    tokens = np.random.default_rng(size).integers(0, 64, size)
    group = [
        lib.request(seed + i, tokens=tokens, max_tokens=max_tokens)
        for i in range(count)
    ]
    pending = self.engine.submit_group(group)
    self.pending += zip(group, pending, strict=True)

  @stateful.precondition(lambda self: self.pending)
  @stateful.rule(seed=st.integers(0, 99), share=st.floats(0, 1))
  def give_up(self, seed, share):
    for _, future in self.pending:
      if random.Random(seed).random() < share:
        future.cancel()
      seed += 1

  @stateful.rule()
  def swap(self):
    self.version += 1
    params = lib.PARAMS[self.version % len(lib.PARAMS)]
    self.fresh.append((lib.version(self.version), params))

  @stateful.rule()
  def drain(self):
    for request, future in self.pending:
      try:
        window = future.result(timeout=600)
      except futures.CancelledError:
        continue
      n, known = len(window), len(request.context)
      assert window.sampled.sum() == n - known > 0
      assert len(window.routing.experts) == n
      assert (window.routing.experts[:-1] != lib.BLANK).all()
      assert (np.diff(window.versions[known:]) >= 0).all()
    self.pending.clear()
    # A last request: what was given up before it is gone once it is answered.
    lib.run(self.engine, [lib.request(0, max_tokens=1)])
    assert self.engine.free() == self.start

  @stateful.invariant()
  def nothing_is_held_twice(self):
    pages, slots = self.engine.free()
    assert 0 <= pages <= self.start[0] and 0 <= slots <= self.start[1]
    assert self.engine.alive

  def teardown(self):
    self.drain()
    self.engine.close()
    assert self.engine.stats().aborted == 0


EngineMachine.TestCase.settings = hypothesis.settings(
    max_examples=5, stateful_step_count=12, deadline=None
)
EngineMachineTest = EngineMachine.TestCase


if __name__ == '__main__':
  absltest.main()
