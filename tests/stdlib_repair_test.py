"""Tasks from the standard library, built for real."""

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import unittest

from absl.testing import absltest

from composer_jax.environments import harbor
from composer_jax.environments import stdlib_repair
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool as pool_lib

_ROOT = pathlib.Path(__file__).parents[1]
_LIBRARY = pathlib.Path(sysconfig.get_path('stdlib'))
_HAS_TESTS = (_LIBRARY / 'test' / 'test_colorsys.py').exists()


def _command(out, *flags):
  return [
      *(sys.executable, '-m', 'experiments.build_tasks', f'--out={out}'),
      *('--modules=colorsys,fnmatch,getopt', '--jobs=2', *flags),
  ]


@unittest.skipUnless(_HAS_TESTS, 'this python came without its tests')
class StdlibRepairTest(absltest.TestCase):

  def test_a_fault_and_a_removal_become_fair_tasks(self):

    async def main():
      async with pool_lib.Pool(1) as pool:
        module = await stdlib_repair.load(pool, _LIBRARY, 'colorsys')
        faults = stdlib_repair.faults(module, 0)
        removal = next(f for f in faults if f.kind == 'removal')
        fault = next(f for f in faults if f.kind == 'arithmetic')
        built = [
            await stdlib_repair.build(pool, module, f) for f in (removal, fault)
        ]
        # The machine has the module, too: it must not stand in for ours.
        task = built[0].task
        async with pool.session() as session:
          gone = await grading.grade(session, task, {}, built[0].hidden)
        return module, built, gone

    module, built, gone = asyncio.run(main())
    self.assertFalse(gone.solved)
    for one, kind in zip(built, ('removal', 'arithmetic'), strict=True):
      task = one.task
      self.assertEqual(task.meta['kind'], kind)
      self.assertEqual(task.meta['family'], 'colorsys')
      self.assertNotEqual(task.files, one.solution)
      self.assertEqual(one.solution, {'colorsys.py': module.source})
      self.assertEqual(set(one.hidden.ids), set(module.suite.ids))
      self.assertTrue(one.hidden.fail_to_pass)
      self.assertLess(set(task.public_tests.ids), set(one.hidden.ids))
      self.assertIn(task.public_tests.fail_to_pass[0], task.instruction)
    name = built[0].task.instruction.split('The body of `')[1].split('`')[0]
    self.assertIn(
        f"NotImplementedError('{name}')", built[0].task.files['colorsys.py']
    )

  def test_build_is_killed_and_continues(self):
    with tempfile.TemporaryDirectory() as folder:
      out = pathlib.Path(folder, 'tasks')
      environment = {**os.environ, 'PYTHONPATH': str(_ROOT)}
      with subprocess.Popen(
          _command(out, '--tasks=6'), cwd=_ROOT, env=environment
      ) as first:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and first.poll() is None:
          if len(list(out.glob('[!.]*/task.toml'))) >= 2:
            break
          time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
      before = {p: p.stat().st_mtime_ns for p in out.glob('[!.]*/task.toml')}
      self.assertBetween(len(before), 2, 5)
      done = subprocess.run(
          _command(out, '--tasks=6'),
          cwd=_ROOT,
          env=environment,
          capture_output=True,
          text=True,
      )
      self.assertEqual(done.returncode, 0, done.stderr)
      self.assertIn(f'6 tasks in {out}', done.stdout)
      for path, stamp in before.items():  # what was built stays
        self.assertEqual(path.stat().st_mtime_ns, stamp)
      rejected = out / 'rejected.jsonl'
      if rejected.exists():
        ids = [json.loads(n)['id'] for n in rejected.read_text().splitlines()]
        self.assertLen(set(ids), len(ids))
      kinds = [
          harbor.read(p.parent).task.meta['kind']
          for p in out.glob('[!.]*/task.toml')
      ]
      self.assertIn('removal', kinds)

  def test_a_library_without_tests_is_named(self):
    with tempfile.TemporaryDirectory() as folder:
      done = subprocess.run(
          _command(f'{folder}/out', f'--library={folder}'),
          cwd=_ROOT,
          capture_output=True,
          text=True,
      )
    self.assertEqual(done.returncode, 2)
    self.assertRegex(done.stderr, 'test_colorsys.py: no such file; give')


if __name__ == '__main__':
  absltest.main()
