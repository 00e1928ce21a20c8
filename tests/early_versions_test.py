"""Hosts use a version before the trainer hears that it was published."""

import dataclasses
import time

from absl.testing import absltest
import ml_dtypes
import numpy as np
from tests import hostile_turns
from tests import small_config

from composer_jax import trace
from composer_jax.chat import compact_renderer
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.runs import rollouts as rollouts_lib
from composer_jax.weights import publish


class _Policy(hostile_turns._Policy):
  """Samples with a version of its own, under its digest."""

  def __init__(self, renderer, vocab: int, version: trace.WeightVersion):
    super().__init__(renderer, vocab)
    self.version = version.step
    self.digests = {version.step: version.digest}


class EarlyVersionsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.cfg = small_config.experiment()
    self.url = f'file://{self.create_tempdir().full_path}/'
    publisher = publish.Publisher(self.url, self.cfg.weights, 'test')
    self.versions = [
        publisher.publish(step, {'x': np.full(64, step, ml_dtypes.bfloat16)})
        for step in (0, 1)
    ]
    texts = [self.cfg.tasks.task(k, 'warmup').files['f.py'] for k in range(300)]
    self.renderer = compact_renderer.CompactRenderer(
        compact_renderer.train_tokenizer(texts, self.cfg.model.vocab)
    )

  def _outcomes(self, version, hear):
    """Outcomes of a first few results that were sampled with a version."""
    first, second = (v.version for v in self.versions)
    with hostile_turns.Host(
        self.cfg, self.url, self.renderer, device=None
    ) as host:
      host._policy = _Policy(self.renderer, self.cfg.model.vocab, version)
      rollouts = rollouts_lib.Rollouts(
          self.cfg, host, ledger_lib.Ledger(), first, 'run'
      )

      def booked():
        state = rollouts.dispatcher.gate.state
        groups = (*state.groups.values(), *state.untrained)
        return [m.outcome for g in groups for m in g.members.values()]

      def wait(condition):
        end = time.monotonic() + 600
        while not condition() and time.monotonic() < end:
          time.sleep(0.05)
        self.assertTrue(condition())

      wait(lambda: len(rollouts.dispatcher._queue._log) >= 4)
      before = booked()
      if hear:
        host.call(rollouts.dispatcher.open(second))
      wait(lambda: len(booked()) >= 4)
      after = booked()
      rollouts.close()
    return before, set(after)

  def test_a_result_of_a_version_in_the_store_waits(self):
    before, after = self._outcomes(self.versions[1].version, hear=True)
    self.assertEqual(before, [])
    self.assertEqual(after, {'valid'})

  def test_a_result_of_no_version_of_the_store_is_refused(self):
    second = self.versions[1].version
    for fake in (
        dataclasses.replace(second, digest=self.versions[0].version.digest),
        dataclasses.replace(second, step=2),
    ):
      _, after = self._outcomes(fake, hear=False)
      self.assertEqual(after, {'refused'})


if __name__ == '__main__':
  absltest.main()
