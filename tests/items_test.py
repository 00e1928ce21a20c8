"""A bad trace stops here: nothing is repaired on its way to the device."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.learner import items

_MODEL = config.ModelConfig(layers=2, experts=4, top_k=2)
_BLANK = 255


def _good():
  experts = np.tile(np.array([1, 3], np.uint8), (6, 2, 1))
  experts[-1] = _BLANK
  return trace.TokenTrace(
      tokens=np.arange(6, dtype=np.int32),
      sampled=np.array([0, 0, 1, 1, 0, 1], np.bool_),
      logps=np.array([0, 0, -1, -2, 0, -1], np.float32),
      versions=np.array([3, 3, 3, 4, 4, 4], np.int32),
      routing=trace.RoutingTrace(experts),
  )


def _with(name, index, value):
  t = _good()
  array = getattr(t, name).copy()
  array[index] = value
  return dataclasses.replace(t, **{name: array})


def _routed(edit):
  experts = _good().routing.experts.copy()
  experts = edit(experts)
  return dataclasses.replace(_good(), routing=trace.RoutingTrace(experts))


def _set(index, value):
  def edit(experts):
    experts[index] = value
    return experts

  return edit


def _check(t, advantage=0.5, longest=8, now=4, replay=_MODEL, rollout=1):
  items.check(
      [items.Item(rollout, t, advantage)],
      longest=longest,
      now=now,
      replay=replay,
  )


class CheckTest(parameterized.TestCase):

  def test_accepts_what_an_engine_records(self):
    _check(_good())
    _check(_routed(_set(0, _BLANK)))  # a prompt token
    _check(_routed(_set(3, _BLANK)))  # its successor was not sampled
    _check(dataclasses.replace(_good(), routing=None), replay=None)

  @parameterized.named_parameters(
      ('never_recorded', dataclasses.replace(_good(), routing=None), 'no rout'),
      ('hole', _routed(_set(2, _BLANK)), 'between two sampled'),
      ('all_blank', _routed(lambda e: np.full_like(e, _BLANK)), 'between two'),
      ('partly_blank', _routed(_set((2, 1, 0), _BLANK)), 'partly blank'),
      ('unknown_expert', _routed(_set((0, 0, 0), 4)), 'expert >= experts=4'),
      ('layer_missing', _routed(lambda e: e[:, :1]), 'want uint8'),
      ('k_missing', _routed(lambda e: e[:, :, :1]), 'want uint8'),
      ('wrong_type', _routed(lambda e: e.astype(np.uint16)), 'want uint8'),
  )
  def test_refuses_routing(self, t, message):
    with self.assertRaisesRegex(ValueError, message):
      _check(t)

  def test_refuses_a_misaligned_trace_at_birth(self):
    with self.assertRaisesRegex(ValueError, 'misaligned'):
      _routed(lambda e: e[1:])

  @parameterized.named_parameters(
      ('first_token_sampled', _with('sampled', 0, True), {}, r'sampled\[0\]'),
      ('from_the_future', _good(), dict(now=3), 'newer than the trainer'),
      ('too_long', _good(), dict(longest=5), 'tokens_per_row=5'),
      ('nan_logp', _with('logps', 2, np.nan), {}, 'not finite'),
      ('inf_logp', _with('logps', 5, -np.inf), {}, 'not finite'),
      ('nan_advantage', _good(), dict(advantage=np.nan), 'one finite'),
      ('inf_advantage', _good(), dict(advantage=np.inf), 'one finite'),
      ('rollout_zero', _good(), dict(rollout=0), 'start at 1'),
  )
  def test_refuses(self, t, options, message):
    with self.assertRaisesRegex(ValueError, message):
      _check(t, **options)

  def test_refuses_advantages_that_differ_within_a_rollout(self):
    pair = [items.Item(2, _good(), 0.5), items.Item(2, _good(), 0.25)]
    with self.assertRaisesRegex(ValueError, 'rollout 2.*first has 0.5'):
      items.check(pair, longest=8, now=4, replay=_MODEL)


class TrajectoriesTest(absltest.TestCase):

  def _trajectory(self, *segments, stop=trace.StopReason.FINISHED):
    return trace.Trajectory('r/1/0', 'r/1', segments, 1.0, {}, stop)

  def test_segments_share_a_number_and_an_advantage(self):
    context_only = _good()
    context_only = dataclasses.replace(
        context_only, sampled=np.zeros(6, np.bool_)
    )
    got = items.from_trajectories(
        [
            self._trajectory(_good(), context_only, _good()),
            self._trajectory(_good()),
        ],
        np.array([0.5, -0.5]),
    )
    self.assertEqual(
        [(i.rollout, i.advantage) for i in got], [(1, 0.5), (1, 0.5), (2, -0.5)]
    )

  def test_refuses_lost_rollouts(self):
    lost = self._trajectory(_good(), stop=trace.StopReason.INFRA_ERROR)
    with self.assertRaisesRegex(ValueError, 'must leave its group'):
      items.from_trajectories([lost], [0.0])
    with self.assertRaises(ValueError):
      items.from_trajectories([self._trajectory(_good())], [0.0, 1.0])


if __name__ == '__main__':
  absltest.main()
