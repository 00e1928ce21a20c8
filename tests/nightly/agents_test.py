"""Agents at length: many sandboxes, all of HumanEval, a source that ends."""

import asyncio
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest

from composer_jax.environments import human_eval
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.sandbox import box
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool as pool_lib
from composer_jax.weights import checkpoint
from tests import finite_config
from tests import small_run


class SandboxTest(absltest.TestCase):

  def test_200_sandboxes_leave_nothing(self):
    files = len(os.listdir('/proc/self/fd'))
    place = self.create_tempdir().full_path
    self.enter_context(mock.patch.object(tempfile, 'tempdir', place))

    async def main(name):
      for _ in range(25):
        async with pool_lib.Pool(8, level=box.Level(name, '')) as pool:
          async with pool.session() as session:
            self.assertTrue((await session.exec('sleep 99 & true')).ok)

    for name in box.LEVELS:
      asyncio.run(main(name))
    self.assertEqual(len(os.listdir('/proc/self/fd')), files)
    self.assertNotIn(place, pathlib.Path('/proc/self/mounts').read_text())
    self.assertEmpty(os.listdir(place))


class HumanEvalTest(absltest.TestCase):

  def test_every_solution_passes_and_no_prompt_does(self):
    source = human_eval.HumanEval()
    drawn = [source.task(k, 'eval') for k in range(164)]

    async def main():
      async with pool_lib.Pool(2) as pool:
        grader = grading.Grader(source, pool)
        gold = [grader(t, {'solution.py': source.solution(t)}) for t in drawn]
        empty = [grader(t, t.files) for t in drawn]
        return await asyncio.gather(*gold), await asyncio.gather(*empty)

    gold, empty = asyncio.run(main())
    self.assertEqual(sum(g.solved for g in gold), 164)
    self.assertEqual(sum(g.solved for g in empty), 0)


class FiniteSourceTest(absltest.TestCase):

  def test_a_run_ends_with_its_tasks_and_none_is_played_twice(self):
    workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'
    done = small_run.run('rl', workdir, config='tests.finite_config')
    self.assertIn('every task was played once', done.stdout, done.stderr)
    extra = checkpoint.read_extra(workdir / 'checkpoints' / 'rl')
    ledger = ledger_lib.from_json(extra['ledger'])
    played = ledger_lib.played(ledger)
    self.assertLen(set(played), len(played))
    self.assertEqual(ledger_lib.lost(ledger), ())
    self.assertLen(played, finite_config.TASKS // 4)


if __name__ == '__main__':
  absltest.main()
