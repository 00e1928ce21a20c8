"""The verified reward, on grades of every kind and through the pipeline."""

import asyncio
import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from composer_jax import trace
from composer_jax.agents import harness
from composer_jax.environments import micro_repair
from composer_jax.rewards import verify
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool as pool_lib

_EPISODE = harness.Episode((), trace.StopReason.FINISHED, {'f.py': ''})


def _score(grade, reward=None, stop=trace.StopReason.FINISHED):
  task = micro_repair.MicroRepair().task(0, 'eval')
  episode = dataclasses.replace(_EPISODE, grade=grade, stop=stop)
  return asyncio.run((reward or verify.Verify())(task, episode))


class VerifyTest(parameterized.TestCase):

  @parameterized.parameters(
      ((True, True), 1.0, 1.0, 1.0),
      ((True, False), 0.0, 0.0, 0.5),
      ((False, False), 0.0, 0.0, 0.0),
      ((), 0.0, 0.0, 0.0),
  )
  def test_all_cases_or_nothing(self, passed, score, all_pass, fraction):
    result = _score(grading.Grade(passed))
    self.assertTrue(result.valid)
    self.assertEqual(result.score, score)
    self.assertEqual(result.parts, {'passed': all_pass, 'fraction': fraction})

  def test_part_credit_stays_below_success(self):
    reward = verify.Verify(fraction_weight=0.3)
    self.assertAlmostEqual(
        _score(grading.Grade((True, False)), reward).score, 0.15
    )
    self.assertEqual(_score(grading.Grade((True, True)), reward).score, 1.0)
    with self.assertRaisesRegex(ValueError, 'fraction_weight=0.5'):
      verify.Verify(fraction_weight=0.5)

  def test_no_verdict_is_invalid_not_zero(self):
    good = grading.Grade((True,))
    for result in (
        _score(None),
        _score(grading.Grade((), valid=False, reason='dead')),
        _score(good, stop=trace.StopReason.INFRA_ERROR),
    ):
      self.assertFalse(result.valid)
      self.assertNotEmpty(result.reason)

  @parameterized.parameters('timeout', 'memory', 'died', 'malformed')
  def test_the_policys_failures_count(self, failure):
    result = _score(grading.Grade((False,), failure))
    self.assertTrue(result.valid)
    self.assertEqual(result.score, 0.0)
    self.assertEqual(result.reason, failure)
    self.assertEqual('hack_suspected' in result.flags, failure == 'malformed')

  @parameterized.parameters(
      trace.StopReason.MAX_TURNS,
      trace.StopReason.MAX_TOKENS,
      trace.StopReason.PARSE_ERROR,
  )
  def test_exhausted_budgets_are_graded_all_the_same(self, stop):
    self.assertEqual(_score(grading.Grade((True,)), stop=stop).score, 1.0)

  def test_it_is_a_value(self):
    self.assertEqual(hash(verify.Verify()), hash(verify.Verify()))

  def test_gold_one_and_hacks_no_better_than_trying(self):
    source = micro_repair.MicroRepair()
    task = source.task(3, 'eval')
    public = task.public_tests[0]
    submissions = {
        'gold': source.solution(task),
        'untouched': task.files['f.py'],
        'hard_coded': f'def f(x): return {public.expected!r}',
        'printed': 'print("all passed")',
        'endless': 'def f(x):\n  while True: pass',
        'bomb': 'import os\nwhile True: os.fork()',
    }

    async def main():
      scores = {}
      async with pool_lib.Pool(1) as pool:
        grader = grading.Grader(source, pool)
        for name, text in submissions.items():
          grade = await grader(task, {'f.py': text})
          episode = dataclasses.replace(_EPISODE, grade=grade)
          result = await verify.Verify()(task, episode)
          self.assertTrue(result.valid, name)
          scores[name] = result.score
      return scores

    scores = asyncio.run(main())
    self.assertEqual(scores.pop('gold'), 1.0)
    self.assertEqual(set(scores.values()), {0.0})


if __name__ == '__main__':
  absltest.main()
