"""Slow runs: other numbers of cores, the shipped experiment, many kills."""

import pathlib
import random
import subprocess

from absl.testing import absltest

from composer_jax import config_text
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.runs import digest
from composer_jax.weights import checkpoint
from experiments import flags
from tests import small_config
from tests import small_run

_SYNC = 'rl.max_staleness_versions=0'


def _digests(cfg, workdir, *edits):
  return dict(digest.of_run(config_text.override(cfg, *edits), workdir))


class NightlyRunsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def test_one_core_and_two_cores_give_equal_digests(self):
    found = []
    for cores in ('0', '0,1'):
      workdir = self.folder / f'cores{cores}'
      subprocess.run(
          ['taskset', '-c', cores, *small_run.command('rl', workdir, _SYNC)],
          cwd=small_run.ROOT,
          env=small_run.environment(),
          capture_output=True,
          check=True,
      )
      found.append(_digests(small_config.experiment(), workdir, _SYNC))
    self.assertEqual(*found)

  def test_shipped_experiment_is_bit_equal_in_fresh_processes(self):
    edits = (_SYNC, 'midtrain.steps=10', 'warmup.steps=120', 'rl.steps=4')
    found = []
    for name in 'ab':
      done = small_run.run('rl', self.folder / name, *edits, config='tiny')
      self.assertEqual(done.returncode, 0, done.stderr)
      found.append(_digests(flags.load('tiny'), self.folder / name, *edits))
    self.assertEqual(*found)

  def test_many_kills_lose_and_repeat_nothing(self):
    workdir = self.folder / 'killed'
    edits = ('rl.steps=60', 'rl.checkpoint_every_steps=2')
    rng = random.Random(1)
    for _ in range(15):
      small_run.kill_after(rng.uniform(6.0, 15.0), 'rl', workdir, *edits)
    done = small_run.run('rl', workdir, *edits)
    self.assertEqual(done.returncode, 0, done.stderr)
    extra = checkpoint.read_extra(workdir / 'checkpoints' / 'rl')
    ledger = ledger_lib.from_json(extra['ledger'])
    self.assertLen(ledger.steps, 60)
    self.assertEqual(ledger_lib.lost(ledger), ())


if __name__ == '__main__':
  absltest.main()
