"""What README.md and docs/ show works.

Examples run, commands are known, links lead somewhere, CI runs two commands.
"""

import ast
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
import composer_jax as cj
from composer_jax import trace
from composer_jax.agents import tools
from composer_jax.rewards import calibration
from composer_jax.rewards import rubric
from composer_jax.runs import evaluate
from composer_jax.runs import stored_model
from tests import layers
from tests import small_run

_FRONT = small_run.ROOT / 'README.md'
_CHAPTERS = sorted((small_run.ROOT / 'docs').rglob('*.md'))
_PAGES = {p: p.read_text() for p in (_FRONT, *_CHAPTERS)}
# Every fence ends a block or begins one, so that no block can hide.
_BLOCK = re.compile(r'^ *```(.*)\n((?:.*\n)*?) *```$', re.MULTILINE)
_BLOCKS = [
    (m[1], m[2]) for text in _PAGES.values() for m in _BLOCK.finditer(text)
]
_SHELL = [c for kind, c in _BLOCKS if kind == 'sh']
_COMMANDS = [line for text in _SHELL for line in text.splitlines()]
_PYTHON = [code for kind, code in _BLOCKS if kind == 'python']
_EXAMPLES = {
    code.split('\n', 1)[0].removeprefix('# '): code for code in _PYTHON
}
# What an example may import besides the standard library and jax.
_OURS = ('composer_jax', 'experiments.configs.tiny')

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
    self.assertLen(_PYTHON, len(_EXAMPLES), 'two examples of one name')

  def test_examples_use_the_public_face_only(self):
    for name, code in _EXAMPLES.items():
      tree = ast.parse(code)
      for node in ast.walk(tree):
        imported = []
        if isinstance(node, ast.Import):
          imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
          imported = [f'{node.module}.{alias.name}' for alias in node.names]
        for full in imported:
          top = full.partition('.')[0]
          known = top == 'jax' or top in sys.stdlib_module_names
          self.assertTrue(known or full in _OURS, f'{name}: {full}')
      used = re.findall(r'\bcj\.(\w+)', code)
      self.assertNotEmpty(used, name)
      self.assertContainsSubset(used, cj.__all__)

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
    self.assertGreater(len(_COMMANDS), 30)
    # A command stands in a block of its own, where it is read.
    kinds = {kind for kind, _ in _BLOCKS}
    self.assertContainsSubset(kinds, ('', 'json', 'python', 'sh'))
    rest = [code for kind, code in _BLOCKS if kind != 'sh']
    rest += [_BLOCK.sub('', text) for text in _PAGES.values()]
    for text in rest:
      self.assertNotIn('python3 -m', text)
      self.assertNotIn('```', text)

  def test_every_binary_is_shown(self):
    binaries = filter(layers.is_binary, layers.files('experiments'))
    shown = re.findall(r'-m experiments\.(\w+)', '\n'.join(_COMMANDS))
    self.assertEqual({*shown}, {path.stem for path in binaries})

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
    mark = re.compile(r'^<!-- ci: (\w+) -->\n```sh\n', re.MULTILINE)
    marks = mark.findall(_PAGES[_FRONT])
    self.assertEqual(marks, ['quickstart', 'test'])
    for page in _CHAPTERS:  # They would be ignored there.
      self.assertNotIn('<!-- ci:', _PAGES[page])
    for mark in marks:
      self.assertIn(f'$(readme {mark})', script)

  def test_files_that_are_named_exist(self):
    guide = small_run.ROOT / 'CONTRIBUTING.md'
    tops = ('', 'composer_jax', 'experiments', 'kernels_triton')
    for page, text in (_PAGES | {guide: guide.read_text()}).items():
      text = _BLOCK.sub('', text)
      names = re.findall(r'`([\w/]+\.(?:py|yaml))`', text)
      names += re.findall(r'`(\w+/)`', text) if page == guide else []
      for name in {*names} - set(_EXAMPLES):
        with self.subTest(name):
          self.assertTrue(
              any((small_run.ROOT / top / name).exists() for top in tops), page
          )

  def test_links_lead_somewhere(self):
    others = ('CONTRIBUTING.md', 'CHANGELOG.md')
    texts = _PAGES | {
        path: path.read_text() for path in map(small_run.ROOT.joinpath, others)
    }
    followed = set()
    for page, text in texts.items():
      text = _BLOCK.sub('', text)
      for target in re.findall(r'\]\(([^)]*)\)', text):
        if target.startswith('https://'):
          continue
        name, _, anchor = target.partition('#')
        path = (page.parent / name).resolve() if name else page
        with self.subTest(page=page.name, target=target):
          self.assertTrue(path.is_file())
          if anchor:
            self.assertIn(anchor, _anchors(path.read_text()))
        if page == _FRONT:
          followed.add(path)
    self.assertContainsSubset([c.resolve() for c in _CHAPTERS], followed)
    listed = _PAGES[small_run.ROOT / 'docs' / 'index.md']
    for page in _CHAPTERS:
      if page.name != 'index.md':
        self.assertIn(f'({page.name})', listed)

  def test_the_front_door_is_short(self):
    self.assertLessEqual(len(_PAGES[_FRONT].splitlines()), 150)

  def test_labels_that_are_shown_can_be_read(self):
    (row,) = (text for kind, text in _BLOCKS if kind == 'json')
    path = self.folder / 'labels.jsonl'
    path.write_text(row)
    found = rubric.load(small_run.ROOT / 'experiments/rubrics/repair.yaml')
    self.assertLen(calibration.load(path, found), 1)


def _anchors(text: str) -> set[str]:
  """Anchors of a page's headings, as the usual code hosts make them."""
  titles = re.findall(r'^#+ (.*)$', _BLOCK.sub('', text), re.MULTILINE)
  return {re.sub(r'[^\w -]', '', t).lower().replace(' ', '-') for t in titles}


def _solved(source, task, files) -> bool:
  scope = {}
  exec(files['f.py'], scope)  # of the example itself
  function = scope[task.meta['entry']]
  return all(function(*c.args) == c.expected for c in source.hidden(task))


if __name__ == '__main__':
  absltest.main()
