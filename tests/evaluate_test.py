"""Evaluation of a stored version: the run's own figures, and nothing changed."""

import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
from composer_jax.runs import evaluate
from composer_jax.runs import pipeline
from composer_jax.runs import run_digest
import jax
import numpy as np
from tests import small_config
from tests import small_run


def _content(folder: pathlib.Path) -> dict[str, str]:
  return {
      str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
      for p in folder.rglob('*')
      if p.is_file()
  }


def _evaluate(workdir, *arguments) -> subprocess.CompletedProcess:
  command = [
      *(sys.executable, '-m', 'experiments.evaluate'),
      f'--workdir={workdir}',
      f'--compilation_cache={small_run.CACHE}',
  ]
  return subprocess.run(
      [*command, *arguments],
      cwd=small_run.ROOT,
      env=small_run.environment(),
      capture_output=True,
      text=True,
  )


class StoredRunTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.base = pathlib.Path(tempfile.mkdtemp())
    cls.run_dir = cls.base / 'run'
    done = small_run.run('rl', cls.run_dir, 'rl.steps=2')
    assert done.returncode == 0, done.stderr

  @classmethod
  def tearDownClass(cls):
    shutil.rmtree(cls.base)
    super().tearDownClass()

  def _episodes(self, version):
    cfg = small_config.experiment()
    host = evaluate.stored_host(cfg, self.run_dir, version, jax.devices()[3])
    with host:
      played, _ = host.feed.first
      return played, evaluate.showcase(cfg, host, played.step)

  def test_a_version_plays_the_episodes_that_the_run_kept(self):
    kept = [pipeline.load_showcase(self.run_dir, at) for at in (0, 2)]
    # The first version although there are later ones; then the newest.
    for version, want in zip((0, None), kept, strict=True):
      played, episodes = self._episodes(version)
      self.assertEqual(
          [run_digest.of_trajectory(t) for t in episodes],
          [run_digest.of_trajectory(t) for t in want],
      )
      for t in episodes:
        self.assertEqual(dict(t.weights), {played.step: played.digest})
        self.assertEqual(dict(t.weights), dict(want[0].weights))
    self.assertNotEqual(
        *([run_digest.of_trajectory(t) for t in side] for side in kept)
    )

  def test_figures_are_those_of_the_run_which_stays_as_it_was(self):
    before = _content(self.run_dir)
    path = self.base / 'figures.json'
    done = _evaluate(self.run_dir, f'--json={path}')
    self.assertEqual((done.returncode, done.stderr), (0, ''))
    self.assertEqual(_content(self.run_dir), before)
    lines = (self.run_dir / 'metrics.jsonl').read_text().splitlines()
    *_, metrics = (r for r in map(json.loads, lines) if r['phase'] == 'eval')
    found = json.loads(path.read_text())
    self.assertEqual(found['version'], metrics['eval/version'])
    for split, name in evaluate.SPLITS.items():
      rates = found['splits'][split]['rates']
      for kind in ('sampled', 'greedy'):
        self.assertEqual(rates['all'][kind], metrics[f'{name}/pass1_{kind}'])
      families = {k: v['tasks'] for k, v in rates.items() if k != 'all'}
      self.assertEqual(sum(families.values()), rates['all']['tasks'])
      for family in families:
        self.assertIn(family, done.stdout)
    self.assertIn('version 2, ', done.stdout)

  def test_one_split(self):
    path = self.base / 'one.json'
    done = _evaluate(self.run_dir, '--split=heldout', f'--json={path}')
    self.assertEqual((done.returncode, done.stderr), (0, ''))
    self.assertEqual([*json.loads(path.read_text())['splits']], ['heldout'])

  def _assert_one_line(self, done, code, text):
    self.assertEqual((done.returncode, done.stdout), (code, ''))
    self.assertLen(done.stderr.splitlines(), 1)
    self.assertIn(text, done.stderr)

  def test_unknown_version(self):
    done = _evaluate(self.run_dir, '--version=7')
    self._assert_one_line(done, 2, 'which has 3 versions from 0 to 2')

  def test_no_store(self):
    empty = self.base / 'empty'
    kept = ('config.json', 'manifest.json', 'tokenizer.json')
    empty.mkdir()
    for name in kept:
      shutil.copy(self.run_dir / name, empty)
    done = _evaluate(empty)
    self._assert_one_line(done, 2, 'no version has been published')
    self.assertCountEqual(_content(empty), kept)

  def test_damaged_store(self):
    damaged = self.base / 'damaged'
    shutil.copytree(self.run_dir, damaged)
    for path in (damaged / 'weights' / 'base').rglob('*.seg.0'):
      data = bytearray(path.read_bytes())
      data[100] ^= 1
      path.write_bytes(data)
    self._assert_one_line(_evaluate(damaged), 1, 'damaged store')

  def test_json_in_a_missing_folder_is_refused_before_any_work(self):
    done = _evaluate(self.run_dir, f'--json={self.base}/none/x.json')
    self._assert_one_line(done, 2, 'there is no directory')

  @parameterized.parameters(
      ('tests.small_config:SmallIds', 'my_reward:Mine', 'to PYTHONPATH'),
      ('"groups_per_step"', '"groups"', 'another version of composer_jax'),
  )
  def test_config_that_cannot_be_read(self, old, new, text):
    moved = pathlib.Path(self.create_tempdir().full_path) / 'moved'
    shutil.copytree(self.run_dir, moved)
    path = moved / 'config.json'
    path.write_text(path.read_text().replace(old, new))
    self._assert_one_line(_evaluate(moved), 2, text)


class BreakdownTest(absltest.TestCase):

  def test_rates_and_standard_errors_by_family(self):
    cfg = small_config.experiment()
    tasks = evaluate.tasks_of(cfg, 'eval')
    chances = [cfg.tasks.chance(t) for t in tasks]
    score = evaluate.Score(
        sampled=np.array([True, False, True, True]),
        greedy=np.array([True, False, False, False]),
        invalid=0,
    )
    rates = evaluate.breakdown(cfg, 'eval', score)
    total = rates.pop('all')
    self.assertEqual(total['tasks'], 4)
    self.assertEqual((total['sampled'], total['greedy']), (0.75, 0.25))
    self.assertAlmostEqual(total['sampled_error'], (0.1875 / 4) ** 0.5)
    self.assertAlmostEqual(total['chance'], np.mean(chances))
    self.assertEqual({*rates}, {t.meta['family'] for t in tasks})
    for task in tasks:
      same = [j for j, t in enumerate(tasks) if t.meta == task.meta]
      row = rates[task.meta['family']]
      self.assertEqual(row['tasks'], len(same))
      self.assertAlmostEqual(row['sampled'], score.sampled[same].mean())
      self.assertAlmostEqual(row['greedy'], score.greedy[same].mean())
      self.assertAlmostEqual(row['chance'], np.mean(np.take(chances, same)))


if __name__ == '__main__':
  absltest.main()
