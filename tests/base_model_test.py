"""A run that starts from a published model, and the folder that comes out."""

import dataclasses
import pathlib
import sys

from absl.testing import absltest
import jax
import numpy as np
from tests import published
from tests import small_config
from tests import small_run

from composer_jax import config_text
from composer_jax.learner import step
from composer_jax.model import hf
from composer_jax.model import params as params_lib
from composer_jax.runs import base_model
from composer_jax.runs import run_digest


def _binary(name, *arguments):
  start = [sys.executable, '-m', f'experiments.{name}']
  return small_run.finished([*start, *map(str, arguments)])


class BaseTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.create_tempdir().full_path)
    self.folder = self.root / 'model'
    published.write(self.folder)

  def test_a_phase_starts_from_it_with_its_tokenizer(self):
    workdir = self.root / 'run'
    done = small_run.run(
        'midtrain', workdir, f'base={self.folder}', config='tests.base_config'
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(
        (workdir / 'tokenizer.json').read_text().strip(),
        (self.folder / 'tokenizer.json').read_text().strip(),
    )
    cfg = config_text.from_json((workdir / 'config.json').read_text())
    self.assertEqual(cfg.model, published.MODEL)
    state = run_digest.restored(
        cfg, workdir, 'midtrain', step.make_mesh(cfg.mesh)
    )
    before = hf.load(self.folder, cfg.model, np.float32)
    # Two steps from there; not from somewhere else.
    for name, leaf in params_lib.names(state.params).items():
      distance = np.abs(jax.device_get(leaf) - before[name]).max()
      self.assertBetween(distance, 1e-5, 0.02, name)

  def test_it_starts_at_the_weights_of_the_folder(self):
    cfg = small_config.experiment()
    cfg = base_model.adopt(dataclasses.replace(cfg, base=str(self.folder)))
    mesh = step.make_mesh(cfg.mesh)
    found = params_lib.names(base_model.weights(cfg, mesh))
    want = hf.load(self.folder, published.MODEL, np.float32)
    for name, leaf in found.items():
      self.assertEqual(jax.device_get(leaf).tobytes(), want[name].tobytes())

  def test_what_the_base_decides_cannot_be_set(self):
    flags = ['--workdir=/nowhere', '--dry_run', f'--set=base={self.folder}']
    done = _binary('rl', *flags, '--set=model.layers=7')
    self.assertEqual(done.returncode, 2)
    self.assertIn('--set=model.layers=7: the base decides it', done.stderr)
    done = _binary('rl', *flags, '--set=model.dtype=bfloat16')
    self.assertEqual(done.returncode, 0, done.stderr)
    done = _binary('rl', '--workdir=/nowhere', '--dry_run', '--set=base=/no')
    self.assertEqual(done.returncode, 2)
    self.assertIn('name a folder of a model', done.stderr)
    self.assertLen(done.stderr.splitlines(), 1)


if __name__ == '__main__':
  absltest.main()
