"""A lease says that somebody is alive, a budget how long an episode may take."""

import asyncio
import collections
import dataclasses

from absl.testing import absltest
from tests import hostile_turns
from tests import small_config

from composer_jax import trace
from composer_jax.chat import compact_renderer
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.rewards import verify
from composer_jax.runs import rollouts as rollouts_lib


class _SlowPolicy(hostile_turns._Policy):
  """Takes its time over every turn but the first."""

  def __init__(self, renderer, vocab: int, seconds: float):
    super().__init__(renderer, vocab)
    self._seconds = seconds
    self.begun: collections.Counter[int] = collections.Counter()

  async def complete(self, context, **kwargs):
    if context.sampled.any():
      await asyncio.sleep(self._seconds)
    else:
      self.begun[kwargs['seed']] += 1
    return await super().complete(context, **kwargs)


def _first_batch(seconds, lease_seconds, episode_seconds):
  cfg = small_config.experiment()
  cfg = dataclasses.replace(
      cfg,
      rewards=(verify.Verify(),),
      harness=dataclasses.replace(cfg.harness, episode_seconds=episode_seconds),
      rl=dataclasses.replace(cfg.rl, lease_seconds=lease_seconds),
  )
  texts = [cfg.tasks.task(k, 'warmup').files['f.py'] for k in range(300)]
  renderer = compact_renderer.CompactRenderer(
      compact_renderer.train_tokenizer(texts, cfg.model.vocab)
  )
  version = trace.WeightVersion(0, 'd', None)
  with hostile_turns.Host(cfg, 'none:', renderer, device=None) as host:
    host._policy = _SlowPolicy(renderer, cfg.model.vocab, seconds)
    rollouts = rollouts_lib.Rollouts(
        cfg, host, ledger_lib.Ledger(), version, 'run'
    )
    step = rollouts.take()
    rollouts.close()
  groups = step.consumed.groups + step.consumed.untrained
  outcomes = {m.outcome for g in groups for m in g.members.values()}
  played = [t for g in groups for t in g.rollouts]
  return outcomes, played, set(host._policy.begun.values())


class ClocksTest(absltest.TestCase):

  def test_a_long_rollout_outlives_its_lease(self):
    outcomes, played, begun = _first_batch(3.0, 0.3, 600.0)
    self.assertEqual(outcomes, {'valid'})
    self.assertEqual(begun, {1})  # none was played again
    turns = {int(t.meta['turns']) for t in played}
    self.assertGreater(max(turns), 1)  # so it took ten times its lease

  def test_a_policy_that_sleeps_has_failed_and_is_not_played_again(self):
    outcomes, played, begun = _first_batch(600.0, 0.5, 2.0)
    self.assertEqual(outcomes, {'valid'})
    self.assertEqual(begun, {1})
    late = [t for t in played if t.stop is trace.StopReason.TIMEOUT]
    self.assertNotEmpty(late)
    for t in late:
      self.assertEqual(t.reward, 0.0)
      self.assertIn('harness.episode_seconds=2.0', t.meta['failure'])
      self.assertTrue(t.windows[0].sampled)  # it is trained on


if __name__ == '__main__':
  absltest.main()
