"""Tasks as directories: what is written is read, here and by a shell."""

import asyncio
import dataclasses
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from composer_jax import task as task_lib
from composer_jax.agents import tools
from composer_jax.environments import harbor
from composer_jax.runs import preflight
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool as pool_lib
from tests import small_config
from tests import small_run

_GOOD = 'def add(a, b):\n  return a + b  # é\n'
_BAD = _GOOD.replace('+', '-')
_TEST = """
import unittest
import sol
class AddTest(unittest.TestCase):
  def test_a(self): self.assertEqual(sol.add(1, 2), 3)
  def test_b(self): self.assertEqual(sol.add(5, 5), 10)
  def test_zero(self): self.assertEqual(sol.add(5, 0), 5)
"""
_SUITE = task_lib.Suite(
    {'test_sol.py': _TEST},
    ('test_sol',),
    ('test_sol.AddTest.test_a', 'test_sol.AddTest.test_b'),
    ('test_sol.AddTest.test_zero',),
    {'files': 2},
)


def _built(number=0, split='train', note=''):
  public = dataclasses.replace(
      _SUITE, fail_to_pass=_SUITE.fail_to_pass[:1], pass_to_pass=()
  )
  task = task_lib.Task(
      f'set/{split}/{number}',
      'Repair "sol.py".\n\\ → é\n',
      {'sol.py': _BAD, 'data/note.txt': f'{note}{number}\n'},
      public,
      task_lib.Limits(2.0, 10.0),
      meta={'family': 'add', 'split': split, 'quote': '"\\\n'},
  )
  return harbor.Built(task, _SUITE, {'sol.py': _GOOD})


class HarborTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def _write(self, built):
    folder = self.root / harbor.folder_name(built.task.id)
    harbor.write(folder, built)
    return folder

  def test_round_trip(self):
    built = _built()
    self.assertEqual(harbor.read(self._write(built)), built)

  def test_a_killed_writer_leaves_no_task(self):
    built = _built()
    part = self.root / '.set-train-0.part'
    part.mkdir()
    (part / 'task.toml').write_text('half')
    (part / 'stale').write_text('x')
    self.assertFalse((self.root / 'set-train-0').exists())
    folder = self._write(built)
    self.assertFalse((folder / 'stale').exists())
    self.assertFalse(part.exists())

  @parameterized.parameters(('solution', 0), ('nothing', 1), ('exit', 1))
  def test_its_own_script_grades_it(self, what, code):
    # What test.sh does in Harbor's container, with /app in another place.
    folder = self._write(_built())
    app = self.root / 'app'
    app.mkdir()
    source = {'solution': _GOOD, 'nothing': _BAD, 'exit': 'raise SystemExit'}
    (app / 'sol.py').write_text(source[what])
    done = subprocess.run(
        [sys.executable, '-I', folder / 'tests' / 'run.py', app],
        capture_output=True,
        text=True,
    )
    self.assertEqual(done.returncode, code, done.stderr)

  def test_scripts_are_valid_shell(self):
    folder = self._write(_built())
    for script in ('tests/test.sh', 'solution/solve.sh'):
      subprocess.run(['bash', '-n', folder / script], check=True)
    text = (folder / 'environment' / 'Dockerfile').read_text()
    self.assertIn('COPY app/ /app/', text)

  def test_directory_is_a_task_source(self):
    for split, count in (('train', 5), ('eval', 2)):
      for k in range(count):
        self._write(_built(k, split, split))
    killed = self.root / '.set-train-9.part'
    killed.mkdir()
    (killed / 'task.toml').write_text('half')
    source = harbor.HarborDirectory(str(self.root))
    drawn = [source.task(k, 'train') for k in range(5)]
    self.assertLen({t.id for t in drawn}, 5)
    with self.assertRaises(IndexError):
      source.task(5, 'train')
    self.assertEqual(source.task(7, 'eval'), source.task(1, 'eval'))
    with self.assertRaisesRegex(ValueError, 'heldout'):
      source.task(0, 'heldout')
    prints = {source.fingerprint(t) for t in drawn}
    prints |= {source.fingerprint(source.task(k, 'eval')) for k in range(2)}
    self.assertLen(prints, 7)
    edit, done = source.demo(drawn[0], random.Random(0))
    outcome = tools.edit({'sol.py': _BAD}, edit)
    self.assertFalse(outcome.failed)
    self.assertNotIn('a + b', outcome.files['sol.py'])
    self.assertEqual(done, tools.Done())
    self.assertBetween(source.chance(drawn[0]), 0.1, 1.0)
    other = harbor.HarborDirectory(str(self.root), seed=1)
    self.assertNotEqual([other.task(k, 'train') for k in range(5)], drawn)

    async def grade():
      async with pool_lib.Pool(1) as pool:
        grader = grading.Grader(source, pool)
        bad = await grader(drawn[0], drawn[0].files)
        good = await grader(drawn[0], {**drawn[0].files, 'sol.py': _GOOD})
        return bad.solved, good.solved

    self.assertEqual(asyncio.run(grade()), (False, True))

  def _preflight(self, number, **counts):
    """A config file with tasks of some splits, and what refuses it, if so."""
    top, self.root = self.root, self.root / f'tasks_{number}'
    for split, count in counts.items():
      for k in range(count):
        self._write(_built(k, split))
    file = top / f'tasks_{number}.py'
    file.write_text(
        'import dataclasses\n'
        'from composer_jax.environments import harbor\n'
        'from tests import small_config\n'
        'def experiment():\n'
        '  return dataclasses.replace(small_config.experiment(),'
        f' tasks=harbor.HarborDirectory({str(self.root)!r}))\n'
    )
    cfg = dataclasses.replace(
        small_config.experiment(), tasks=harbor.HarborDirectory(str(self.root))
    )
    self.root = top
    try:
      preflight.check(cfg, rl=True, memory_bytes=None)
    except ValueError as e:
      return file, str(e)
    return file, ''

  def test_a_dry_run_refuses_a_directory_without_every_split(self):
    counts = dict(warmup=1, train=4, eval=1, heldout=1)
    for i, split in enumerate(counts):
      file, error = self._preflight(i, **{**counts, split: 0})
      self.assertRegex(error, f"'{split}': .* has no such tasks")
    done = small_run.finished(
        [*small_run.command('rl', self.root / 'run', config=file), '--dry_run']
    )
    self.assertEqual(done.returncode, 2, done.stdout)
    self.assertLen(done.stderr.splitlines(), 1)
    self.assertIn("split='heldout'", done.stderr)
    _, error = self._preflight(4, **{**counts, 'train': 3})
    self.assertIn("split 'train' ends too early", error)
    self.assertEqual(self._preflight(5, **counts)[1], '')

  def test_a_dry_run_refuses_tasks_that_nothing_here_grades(self):
    for name, text in {
        'instruction.md': 'Say hello.',
        'task.toml': (
            '[metadata]\nsplit = "warmup"\n[verifier]\ntimeout_sec = 30.0\n'
            '[agent]\ntimeout_sec = 60.0\n'
        ),
        'environment/hello.py': 'print()',
    }.items():
      path = self.root / 'tasks_0' / 'hello' / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)
    _, error = self._preflight(0, train=4, eval=1, heldout=1)
    self.assertIn('hello: has no tests/suite.json', error)

  def test_two_tasks_of_one_id_are_refused(self):
    harbor.write(self.root / 'a', _built())
    harbor.write(self.root / 'b', _built(note='other'))
    source = harbor.HarborDirectory(str(self.root))
    with self.assertRaisesRegex(ValueError, "set/train/0.*'a' and 'b'"):
      source.task(0, 'train')

  def test_a_folder_may_have_another_name_than_its_task(self):
    harbor.write(self.root / 'set-train-1', _built(0))
    harbor.write(self.root / 'x', _built(1))
    source = harbor.HarborDirectory(str(self.root))
    for task in (source.task(k, 'train') for k in range(2)):
      self.assertEqual(source._built(task).task, task)

  def test_a_task_from_elsewhere(self):
    folder = self.root / 'hello'
    for name, text in {
        'instruction.md': 'Say hello.',
        'task.toml': (
            'version = "1.0"\n[metadata]\ndifficulty = "easy"\ntags = ["a"]\n'
            '[verifier]\ntimeout_sec = 30.0\n[agent]\ntimeout_sec = 60.0\n'
        ),
        'environment/Dockerfile': 'FROM alpine',
        'environment/hello.py': 'print()',
        'tests/test.sh': 'exit 0',
    }.items():
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      (folder / name).write_text(text)
    source = harbor.HarborDirectory(str(self.root))
    task = source.task(0, 'train')
    self.assertEqual((task.id, task.instruction), ('hello', 'Say hello.'))
    self.assertEqual(task.files['hello.py'], 'print()')
    self.assertEqual(task.meta['difficulty'], 'easy')
    self.assertEqual(task.limits.wall_seconds, 30.0)
    with self.assertRaisesRegex(ValueError, 'hello: has no tests/suite.json'):
      source.hidden(task)
    bare = shutil.copytree(folder, self.root / 'bare')
    (bare / 'task.toml').write_text('version = "1.0"')
    self.assertEqual(harbor.read(bare).task.limits, task_lib.Limits())
    with self.assertRaisesRegex(ValueError, 'no task of Harbor'):
      harbor.read(self.root / 'nothing')


if __name__ == '__main__':
  absltest.main()
