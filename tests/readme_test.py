"""What README.md shows works: examples run, commands are known, CI runs two."""

import importlib
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from composer_jax import trace
from composer_jax.agents import tools
from composer_jax.runs import evaluate
from composer_jax.runs import stored_model
from tests import small_run

_README = (small_run.ROOT / 'README.md').read_text()
_BLOCK = re.compile(r'^```(\w*)\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_BLOCKS = [(m[1], m[2]) for m in _BLOCK.finditer(_README)]
_SHELL = [c for kind, c in _BLOCKS if kind == 'sh']
_COMMANDS = [line for text in _SHELL for line in text.splitlines()]
_EXAMPLES = {
    code.split('\n', 1)[0].removeprefix('# '): code
    for kind, code in _BLOCKS
    if kind == 'python'
}

# All examples in one experiment, of a size that a test can wait for. A model
# of this size earns nothing on its own, hence the third reward.
_TOGETHER = """
import dataclasses
from tests import small_config
import my_loss, my_reward, my_tasks

def experiment():
  small = small_config.experiment()
  return dataclasses.replace(
      small,
      loss=my_loss.experiment().loss,
      tasks=my_tasks.experiment().tasks,
      rewards=(*my_reward.experiment().rewards, small_config.SmallIds()),
  )
"""


def _read(commands: list[str]) -> subprocess.CompletedProcess[str]:
  """Reads command lines as their binaries do; prints the plans of runs."""
  arguments = [c.removeprefix('python3 -m ') for c in commands]
  return subprocess.run(
      [sys.executable, '-m', 'tests.read_command', *arguments],
      capture_output=True,
      text=True,
      cwd=small_run.ROOT,
      env=small_run.environment(),
      check=False,
  )


class ReadmeTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.folder = pathlib.Path(folder)
    for name, code in _EXAMPLES.items():
      (cls.folder / name).write_text(code)
    (cls.folder / 'together.py').write_text(_TOGETHER)
    cls.enterClassContext(mock.patch.object(sys, 'path', [*sys.path, folder]))

  def test_examples_are_there(self):
    self.assertCountEqual(
        _EXAMPLES, ['my_loss.py', 'my_tasks.py', 'my_reward.py']
    )

  def test_examples_train_together(self):
    workdir = self.folder / 'run'
    done = small_run.run(
        'rl',
        workdir,
        'loss.width=0.2',
        'rewards.1.cost=0.05',
        'rl.steps=2',
        config=str(self.folder / 'together.py'),
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    stored = json.loads((workdir / 'config.json').read_text())
    self.assertEqual(stored['loss'], {'type': 'my_loss:SoftClip', 'width': 0.2})
    self.assertEqual(stored['tasks'], {'type': 'my_tasks:WrongOperator'})
    lines = (workdir / 'metrics.jsonl').read_text().splitlines()
    first = next(r for r in map(json.loads, lines) if r['phase'] == 'rl')
    self.assertEqual(first['soft_clip/weight'], 1.0)  # exactly on-policy
    # The store says what a host anywhere needs to know.
    model = stored_model.read(f'file://{workdir}/weights/')
    self.assertEqual(model.model.vocab, model.chat_format().vocab_size)
    kept = [*(workdir / 'trajectories').glob('0*/*.traj')]
    self.assertNotEmpty(kept)
    for path in kept:
      t = trace.from_bytes(path.read_bytes())
      parts = t.reward_parts
      want = parts['passed'] - 0.05 * parts['extra_turns'] + parts['small_ids']
      self.assertAlmostEqual(t.reward, want, places=6)
      self.assertEqual(parts['extra_turns'], int(t.meta['turns']) - 1)
      self.assertIn(t.meta['family'], ('add', 'sub', 'mul', 'mod'))

  def test_environment_of_the_example_is_fair(self):
    cfg = importlib.import_module('my_tasks').experiment()
    used = {'warmup': range(300), 'train': range(300)}
    evaluate.disjoint(cfg, used)  # raises if a problem is in two splits
    for index in range(50):
      task = cfg.tasks.task(index, 'train')
      self.assertEqual(task, cfg.tasks.task(index, 'train'))
      self.assertFalse(_solved(cfg.tasks, task, task.files))
      demo, _ = cfg.tasks.demo(task, random.Random(index))
      edits = [tools.Edit(1, demo.old, new) for new in '+-*%']
      right = [
          e
          for e in edits
          if _solved(cfg.tasks, task, tools.edit(task.files, e).files)
      ]
      self.assertLen(right, 1)
      self.assertIn(demo, edits)
      self.assertNotIn(demo, right)

  def test_every_command_is_one_that_is_run_or_read_here(self):
    start = ('python3 -m experiments.', 'python3 -m pip install -e')
    strange = [c for c in _COMMANDS if not c.startswith(start)]
    self.assertEmpty(strange)
    self.assertGreater(len(_COMMANDS), 10)

  def test_flags_of_every_command_are_known(self):
    parts = [p for c in _COMMANDS for p in c.split(' && ')]
    commands = [p for p in parts if ' experiments.' in p]
    for name in _EXAMPLES:
      commands = [
          c.replace(f'={name}', f'={self.folder / name}') for c in commands
      ]
    done = _read(commands)
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn('SoftClip(width=0.2)', done.stdout)

  def test_a_wrong_command_would_be_seen(self):
    for wrong in ('--wrkdir=/tmp/x', '--workdir=/tmp/x --set=rl.stepz=1'):
      done = _read([f'python3 -m experiments.rl {wrong}'])
      self.assertNotEqual(done.returncode, 0)
      self.assertRegex(done.stderr, 'wrkdir|stepz')

  def test_ci_runs_the_two_commands(self):
    script = (small_run.ROOT / '.ci' / 'run').read_text()
    marks = re.findall(r'^<!-- ci: (\w+) -->\n```sh\n', _README, re.MULTILINE)
    self.assertEqual(marks, ['quickstart', 'test'])
    for mark in marks:
      self.assertIn(f'$(readme {mark})', script)

  def test_files_that_are_named_exist(self):
    text = _BLOCK.sub('', _README)
    names = re.findall(r'`([\w/]+\.py)`', text)
    self.assertNotEmpty(names)
    tops = ('', 'composer_jax', 'experiments')
    for name in names:
      with self.subTest(name):
        self.assertTrue(
            any((small_run.ROOT / top / name).exists() for top in tops)
        )


def _solved(source, task, files) -> bool:
  scope = {}
  exec(files['f.py'], scope)  # of the example itself
  function = scope[task.meta['entry']]
  return all(function(*c.args) == c.expected for c in source.hidden(task))


if __name__ == '__main__':
  absltest.main()
