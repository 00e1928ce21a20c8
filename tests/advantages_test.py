"""Group advantages: the formulas, who counts, and when there is no signal."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from composer_jax import trace
from composer_jax.learner import advantages


def _rollout(reward, group='run/7', stop=trace.StopReason.FINISHED):
  return trace.Trajectory(
      task_id='run/7/0',
      group_id=group,
      segments=(),
      reward=reward,
      reward_parts={},
      stop=stop,
  )


_LOST = _rollout(None, stop=trace.StopReason.INFRA_ERROR)


class GroupTest(parameterized.TestCase):

  def _advantages(self, group, advantage=None):
    advantage = advantage or advantages.GroupMean()
    return advantages.group_advantages(group, advantage)

  def test_reward_minus_the_mean_of_the_group(self):
    got = self._advantages([_rollout(r) for r in (1.0, 0.0, 0.0, 0.5)])
    np.testing.assert_allclose(got, [0.625, -0.375, -0.375, 0.125])
    self.assertEqual(got.dtype, np.float64)

  def test_leave_one_out_compares_with_the_others(self):
    rewards = np.array([1.0, 0.0, 0.25, 0.5])
    got = self._advantages(
        [_rollout(r) for r in rewards], advantages.GroupMean(leave_one_out=True)
    )
    others = [np.mean(np.delete(rewards, i)) for i in range(4)]
    np.testing.assert_allclose(got, rewards - others, rtol=1e-14)

  def test_standard_divides_by_the_deviation(self):
    rewards = np.array([1.0, 0.0, 0.0, 0.0])
    got = self._advantages(
        [_rollout(r) for r in rewards], advantages.GroupStandard(epsilon=0.0)
    )
    np.testing.assert_allclose(np.std(got), 1.0, rtol=1e-14)
    self.assertAlmostEqual(got.sum(), 0.0)

  @parameterized.parameters(
      advantages.GroupMean(),
      advantages.GroupMean(leave_one_out=True),
      advantages.GroupStandard(),
  )
  def test_a_lost_rollout_is_not_a_failed_one(self, advantage):
    kept = self._advantages([_rollout(1.0), _rollout(0.0)], advantage)
    got = self._advantages([_LOST, _rollout(1.0), _rollout(0.0)], advantage)
    np.testing.assert_allclose(got, [0.0, *kept])
    failed = self._advantages(
        [_rollout(0.0), _rollout(1.0), _rollout(0.0)], advantage
    )
    self.assertNotAlmostEqual(failed[2], got[2])

  @parameterized.parameters(
      trace.StopReason.TIMEOUT,
      trace.StopReason.MAX_TOKENS,
      trace.StopReason.PARSE_ERROR,
      trace.StopReason.POLICY_FAILURE,
  )
  def test_the_policys_own_failures_count(self, stop):
    got = self._advantages([_rollout(1.0), _rollout(0.0, stop=stop)])
    np.testing.assert_allclose(got, [0.5, -0.5])

  def test_shifting_all_rewards_changes_nothing(self):
    rewards = np.array([0.3, 0.9, 0.1])
    base = self._advantages([_rollout(r) for r in rewards])
    moved = self._advantages([_rollout(r + 5.0) for r in rewards])
    np.testing.assert_allclose(base, moved, atol=1e-14)

  @parameterized.named_parameters(
      ('agreeing', [_rollout(1.0)] * 4),
      ('agreeing_but_for_noise', [_rollout(0.5), _rollout(0.5 + 1e-7)]),
      ('one_valid', [_rollout(1.0), _LOST, _LOST]),
      ('none_valid', [_LOST, _LOST]),
      ('valid_agree_lost_would_not', [_rollout(1.0), _rollout(1.0), _LOST]),
      ('ungraded', [_rollout(1.0), _rollout(None)]),
      ('empty', []),
  )
  def test_no_signal(self, group):
    self.assertIsNone(self._advantages(group))

  def test_refuses_mixed_groups_and_broken_rewards(self):
    with self.assertRaisesRegex(ValueError, 'one prompt'):
      self._advantages([_rollout(1.0), _rollout(0.0, group='run/8')])
    with self.assertRaisesRegex(ValueError, 'finite'):
      self._advantages([_rollout(1.0), _rollout(float('nan'))])

  def test_is_configuration(self):
    self.assertEqual(advantages.GroupMean(), advantages.GroupMean())
    self.assertLen({advantages.GroupMean(), advantages.GroupMean()}, 1)


if __name__ == '__main__':
  absltest.main()
