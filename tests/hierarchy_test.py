"""No judge and no penalty flips what was verified."""

import asyncio
import dataclasses
import math

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import numpy as np

from composer_jax import task as task_lib
from composer_jax import trace
from composer_jax.agents import harness
from composer_jax.rewards import hierarchy
from composer_jax.rewards import length
from composer_jax.rewards import signals
from composer_jax.rewards import verify
from composer_jax.sandbox import grading

_ANY = st.floats(allow_nan=False, allow_infinity=False)
_RANKS = st.lists(
    st.builds(verify.RewardResult, score=_ANY, valid=st.just(True)), max_size=4
)
_TASK = task_lib.Task('t', 'x', {'f.py': 'def f(x):\n  return x\n'}, ())


def _verdict(passed, fraction=0.0, weight=0.0):
  cases = (True,) * passed or (True, False)
  grade = grading.Grade(cases if passed else (fraction > 0, False))
  episode = harness.Episode((), trace.StopReason.FINISHED, {}, grade)
  return asyncio.run(verify.Verify(weight)(_TASK, episode))


def _episode(sampled, shown=0, passed=True, **meta):
  mask = np.array([False] * 3 + [True] * sampled + [False] * shown)
  window = trace.TokenTrace(
      tokens=np.zeros(len(mask), np.int32),
      sampled=mask,
      logps=np.zeros(len(mask), np.float32),
      versions=np.zeros(len(mask), np.int32),
  )
  counts = {k: str(v) for k, v in meta.items()}
  grade = grading.Grade((passed,))
  stop = trace.StopReason.FINISHED
  return harness.Episode((window,), stop, _TASK.files, grade, counts)


class HierarchyTest(parameterized.TestCase):

  @hypothesis.given(_RANKS, _RANKS, st.floats(0, 0.3), st.booleans())
  def test_any_success_ranks_above_any_failure(self, a, b, weight, partly):
    success = hierarchy.combine([*a, _verdict(True)])
    failure = hierarchy.combine([_verdict(False, partly, weight), *b])
    self.assertTrue(success.valid and failure.valid)
    self.assertGreater(success.score, failure.score)
    self.assertEqual((success.passed, failure.passed), (True, False))

  @hypothesis.given(_RANKS)
  def test_influence_is_bounded(self, ranks):
    score = hierarchy.combine([_verdict(True), *ranks]).score
    self.assertBetween(score, 1 - hierarchy.INFLUENCE, 1 + hierarchy.INFLUENCE)

  @hypothesis.given(_RANKS, st.sampled_from(['verdict', 'rank', 'number']))
  def test_whatever_is_invalid_leaves_the_group(self, ranks, which):
    results = [_verdict(True), *ranks]
    if which == 'verdict':
      results[0] = dataclasses.replace(results[0], valid=False, reason='dead')
    elif which == 'rank':
      results.append(verify.RewardResult(0.0, False, reason='no judge'))
    else:
      results.append(verify.RewardResult(math.nan, True))
    found = hierarchy.combine(results)
    self.assertFalse(found.valid)
    self.assertNotEmpty(found.reason)

  def test_sum_of_small_ones_is_exact(self):
    ranks = [verify.RewardResult(s, True) for s in (-0.1, 0.25)]
    self.assertEqual(hierarchy.combine([_verdict(True), *ranks]).score, 1.15)
    self.assertEqual(hierarchy.combine([_verdict(False), *ranks]).score, 0.15)

  def test_alone_they_only_add_up(self):
    ranks = [verify.RewardResult(s, True) for s in (2.0, 0.5)]
    found = hierarchy.combine(ranks)
    self.assertEqual(
        (found.score, found.valid, found.passed), (2.5, True, None)
    )

  def test_one_failed_verdict_is_a_failure(self):
    found = hierarchy.combine([_verdict(True), _verdict(False)])
    self.assertEqual((found.score, found.passed), (0.0, False))

  def test_nobody_overwrites_the_verdicts_parts(self):
    forged = verify.RewardResult(0.0, True, {'passed': 1.0, 'mine': 2.0})
    for order in (1, -1):
      found = hierarchy.combine([_verdict(False), forged][::order])
      self.assertEqual(found.parts['passed'], 0.0)
      self.assertEqual(found.parts['mine'], 2.0)

  def test_flags_are_kept(self):
    a = verify.RewardResult(0.0, True, flags=('b', 'a'))
    found = hierarchy.combine([_verdict(True), a, a])
    self.assertEqual(found.flags, ('a', 'b'))


class LengthTest(parameterized.TestCase):

  @parameterized.parameters(0.0, 0.5, 1.0, 1.5, 3.0)
  def test_cost_is_the_integral_of_its_slope(self, q):
    # dC/dx = (1 + k x)^-q, by the trapezoid rule.
    k, x = 0.3, np.linspace(0, 50, 200_001)
    slope = (1 + k * x) ** -q
    want = np.sum((slope[1:] + slope[:-1]) / 2 * np.diff(x))
    self.assertAlmostEqual(length.cost(50.0, k, q), want, places=5)
    self.assertEqual(length.cost(0.0, k, q), 0.0)
    self.assertEqual(length.cost(7.0, 0.0, q), 7.0)

  def _score(self, episode, **kwargs):
    return asyncio.run(length.LengthPenalty(**kwargs)(_TASK, episode))

  def test_longer_successes_are_worth_less_and_failures_the_same(self):
    scores = [self._score(_episode(n)).score for n in (10, 100, 1000, 5000)]
    self.assertEqual(scores, sorted(scores, reverse=True))
    self.assertAlmostEqual(scores[-1], -0.1)
    first, second = scores[0] - scores[1], scores[1] - scores[2]
    self.assertGreater(first / 90, second / 900)  # concave
    for n in (10, 5000):
      self.assertEqual(self._score(_episode(n, passed=False)).score, 0.0)

  def test_what_counts(self):
    episode = _episode(5, shown=20, turns=3, edits=2, runs=1, bad_turns=1)
    penalty = length.LengthPenalty(shown=0.5, call=10.0, turn=100.0)
    self.assertEqual(penalty.length(episode), 5 + 10 + 30 + 300)
    result = self._score(episode)
    self.assertEqual(result.parts, {'length': 7.0})

  def test_fields_are_checked(self):
    for kwargs in ({'influence': 0.4}, {'full_at': 0.0}, {'q': -1.0}):
      with self.assertRaisesRegex(ValueError, next(iter(kwargs))):
        length.LengthPenalty(**kwargs)


class SignalsTest(parameterized.TestCase):

  def _measure(self, source, **meta):
    episode = dataclasses.replace(
        _episode(4, **meta), submission={'f.py': source}
    )
    found = signals.measure(_TASK, episode)
    return {k.removeprefix(signals.PREFIX): v for k, v in found.items()}

  def test_rates(self):
    found = self._measure(
        _TASK.files['f.py'],
        turns=4,
        asks=2,
        bad_turns=1,
        edits=2,
        failed_calls=1,
    )
    self.assertEqual(found['edits'], 0.0)
    self.assertEqual(found['asks'], 0.5)
    self.assertEqual(found['invalid'], 0.25)
    self.assertEqual(found['failed_calls'], 0.25)
    self.assertEqual(found['sampled_tokens'], 4.0)

  def test_what_a_submission_adds(self):
    source = 'def f(x):\n  # TODO: think\n  raise NotImplementedError\n'
    found = self._measure(source)
    self.assertEqual(found['edits'], 1.0)
    self.assertEqual(found['todos'], 2.0)
    self.assertEqual(found['comment_chars'], len('# TODO: think'))
    self.assertEqual(self._measure('def f(x): return "# no"\n')['todos'], 0.0)
    broken = self._measure('def f(:\n  # 5678\n "')
    self.assertGreater(broken['comment_chars'], 0)

  def test_what_was_there_before_is_not_counted(self):
    task = dataclasses.replace(_TASK, files={'f.py': '# TODO\nx = 1\n'})
    episode = dataclasses.replace(
        _episode(4), submission={'f.py': '# TODO\nx = 2\n'}
    )
    found = signals.measure(task, episode)
    self.assertEqual(found['behavior/todos'], 0.0)
    self.assertEqual(found['behavior/comment_chars'], 0.0)

  def test_a_lost_episode_says_nothing(self):
    episode = dataclasses.replace(_episode(4), submission=None)
    self.assertEqual(signals.measure(_TASK, episode), {})

  def _records(self, name, values):
    return [{name: v} for v in values]

  @parameterized.parameters(
      ('behavior/asks', 0.05, 0.4, True),
      ('behavior/asks', 0.05, 0.1, False),  # doubled, but still rare
      ('behavior/asks', 0.4, 0.1, False),
      ('behavior/edits', 0.9, 0.2, True),
      ('behavior/edits', 0.3, 1.0, False),  # which is what it should learn
      ('behavior/invalid', 0.1, 0.5, True),
      ('behavior/todos', 0.0, 0.3, True),
      ('entropy', 1.0, 0.05, True),
      ('entropy', 1.0, 0.3, False),
      ('mismatch/kl_stale', 0.001, 0.2, True),
      ('reward/mean', 0.1, 9.0, False),  # not watched
  )
  def test_alarms(self, name, start, now, want):
    records = self._records(name, [start] * 10 + [start] * 20 + [now] * 5)
    found = signals.alarms(records)
    self.assertEqual(list(found), [name] if want else [])
    if want:
      np.testing.assert_allclose(found[name], (start, now))
    self.assertEmpty(signals.alarms(records[:30]))

  def test_short_runs_and_gaps_raise_none(self):
    records = self._records('behavior/asks', [0.0] * 10 + [1.0] * 4)
    self.assertEmpty(signals.alarms(records))
    records = self._records('behavior/asks', [None] * 20)
    self.assertEmpty(signals.alarms(records))
    self.assertEmpty(signals.alarms([{}] * 20))

  @parameterized.parameters(
      ('no_signal', 'tokens/trained', 0, 1),
      ('all_invalid', 'behavior/invalid', 1.0, 0.99),
      ('all_truncated', 'rollouts/truncated_fraction', 1.0, 0.99),
  )
  def test_steps_that_teach_nothing(self, name, figure, bad, good):
    bad, good = {figure: bad}, {figure: good}
    self.assertEqual(list(signals.alarms([good, bad, bad, bad])), [name])
    self.assertEmpty(signals.alarms([bad, bad]))
    self.assertEmpty(signals.alarms([bad, bad, bad, good]))

  def test_a_mismatch_is_one_whatever_its_size(self):
    quiet, apart = (
        {'mismatch/max_same_version': value} for value in (0.0, 1e-9)
    )
    self.assertEmpty(signals.alarms([apart, quiet]))
    self.assertEqual(signals.alarms([apart]), {'mismatch': (0.0, 1e-9)})


if __name__ == '__main__':
  absltest.main()
