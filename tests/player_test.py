"""Rewards of real rollouts on a host: a judge ranks, and its outage is no zero."""

import asyncio
import collections
import dataclasses
import pathlib
import tempfile

from absl.testing import absltest
import jax
from tests import fresh
from tests import judge_server
from tests import sampled_policy
from tests import sandbox_attacks
from tests import small_config

from composer_jax import trace
from composer_jax.agents import tools
from composer_jax.chat import compact_renderer
from composer_jax.rewards import judge as judge_lib
from composer_jax.rewards import verify
from composer_jax.runs import player
from composer_jax.runs import rl
from composer_jax.weights import publish

_RUBRIC = pathlib.Path(__file__).parents[1] / 'experiments/rubrics/repair.yaml'


class _Policy(sampled_policy.ScriptedPolicy):
  digests = collections.defaultdict(str)


class JudgedTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.server = cls.enterClassContext(judge_server.JudgeServer())
    cls.cfg = small_config.experiment()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.store = f'file://{folder}/'
    texts = [cls.cfg.tasks.task(k, 'warmup').files['f.py'] for k in range(300)]
    tokenizer = compact_renderer.train_tokenizer(texts, 512)
    cls.renderer = compact_renderer.CompactRenderer(tokenizer)
    params = fresh.params(cls.cfg.model)
    publisher = publish.Publisher(cls.store, cls.cfg.weights, 'test')
    publisher.publish(0, rl.published_arrays(params))
    task = cls.cfg.tasks.task(0, 'train')
    right = next(
        edit
        for edit in cls.cfg.tasks.legal_edits(task)
        if cls.cfg.tasks._repairs(task, edit)
    )
    encode = cls.renderer.encode_turn
    cls.task, cls.gold = task, encode([right, tools.Done()])
    cls.nothing = encode([tools.Done()])

  def _play(self, model, *turns, deadline=300.0):
    judge = judge_lib.Judge(
        str(_RUBRIC), self.server.url, model, deadline_seconds=deadline
    )
    cfg = dataclasses.replace(self.cfg, rewards=(verify.Verify(), judge))
    with player.Player(
        cfg, self.store, self.renderer, device=jax.devices()[3]
    ) as host:

      async def group():
        return await asyncio.gather(
            *(
                host.rollout(
                    self.task, f'r/0/{i}', seed=i, policy=_Policy([turn])
                )
                for i, turn in enumerate(turns)
            )
        )

      out = host.call(group())
    return out

  def test_a_judge_ranks_successes_below_the_best_and_above_failures(self):
    best, failed = self._play('correct', self.gold, self.nothing)
    self.assertEqual((best.reward, failed.reward), (1.0, 0.0))
    self.assertEqual(best.reward_parts['judge'], 1.0)
    self.assertEqual(best.reward_parts['behavior/edits'], 1.0)
    self.assertNotIn('judge', failed.reward_parts)
    worst, failed = self._play('obeys', self.gold, self.nothing)
    self.assertAlmostEqual(worst.reward, 0.7)
    self.assertEqual(worst.reward_parts['passed'], 1.0)
    self.assertEqual(failed.reward, 0.0)

  def test_an_outage_takes_successes_out_of_the_group_by_its_deadline(self):
    rollouts = self._play('hangs', *[self.gold, self.nothing] * 8, deadline=0.5)
    for lost, failed in zip(rollouts[::2], rollouts[1::2], strict=True):
      self.assertIsNone(lost.reward)
      self.assertFalse(lost.valid)
      # Not played again: the judge has had its tries.
      self.assertEqual(lost.stop, trace.StopReason.FINISHED)
      self.assertIn('judge_failed', lost.meta['flags'])
      self.assertTrue(failed.valid)
      self.assertEqual(failed.reward, 0.0)

  def test_a_sandbox_that_dies_twice_under_a_rollout_is_its_doing(self):
    cfg = dataclasses.replace(self.cfg, rewards=(verify.Verify(),))
    with player.Player(
        cfg, self.store, self.renderer, device=jax.devices()[3]
    ) as host:

      def play(turn, name, dying):
        for pool in dying:
          for box in pool._idle:
            sandbox_attacks.dies_when_used(box)
        return host.call(
            host.rollout(self.task, name, seed=0, policy=_Policy([turn]))
        )

      # One pool is the episode's, one the grader's.
      runs = self.renderer.encode_turn([tools.Run(), tools.Done()])
      for turn, pool in ((self.gold, host._pools[1]), (runs, host._pools[0])):
        first, second = (play(turn, 'r/0/0', [pool]) for _ in range(2))
        self.assertEqual(first.stop, trace.StopReason.INFRA_ERROR)
        self.assertIsNone(first.reward)
        self.assertEqual(second.stop, trace.StopReason.POLICY_FAILURE)
        self.assertEqual((second.valid, second.reward), (True, 0.0))
        self.assertEqual(second.reward_parts['passed'], 0.0)
        # Each rollout on its own, and what was booked is forgotten.
        for name in ('r/0/1', 'r/0/0'):
          other = play(turn, name, [pool])
          self.assertEqual(other.stop, trace.StopReason.INFRA_ERROR)
        for name in ('r/0/1', 'r/0/0'):
          fine = play(self.gold, name, [])
          self.assertEqual((fine.valid, fine.reward), (True, 1.0))


if __name__ == '__main__':
  absltest.main()
