"""A run that starts from a published model, and the folder that comes out."""

import dataclasses
import json
import pathlib
import sys

from absl.testing import absltest
import jax
import numpy as np
from tests import published
from tests import small_config
from tests import small_run

from composer_jax.learner import step
from composer_jax.model import families
from composer_jax.model import hf
from composer_jax.model import params as params_lib
from composer_jax.runs import base
from composer_jax.runs import stored_model


def _binary(name, *arguments):
  start = [sys.executable, '-m', f'experiments.{name}']
  return small_run.finished([*start, *map(str, arguments)])


class BaseTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.create_tempdir().full_path)
    self.folder = self.root / 'model'
    published.write(self.folder)

  def test_from_a_folder_to_a_folder(self):
    workdir = self.root / 'run'
    done = small_run.run(
        'rl', workdir, f'base={self.folder}', config='tests.base_config'
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    records = [
        json.loads(line)
        for line in (workdir / 'metrics.jsonl').read_text().splitlines()
    ]
    phases = {r['phase'] for r in records}
    self.assertEqual(phases, {'midtrain', 'rl', 'eval'})
    figures = [r for r in records if 'mismatch/kl_same_version' in r]
    self.assertTrue(figures)
    # A model that was not made here keeps the contract: the same bits.
    self.assertEqual({r['mismatch/kl_same_version'] for r in figures}, {0.0})
    store = f'file://{workdir / "weights"}/'
    stored = stored_model.read(store)
    self.assertEqual(stored.model, published.MODEL)
    self.assertIn('<|im_start|>', stored.template)
    out = self.root / 'trained'
    done = _binary('export_model', f'--store={store}', f'--folder={out}')
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(families.to_config(hf.read_config(out)), published.MODEL)
    before, after = (hf.load(f, published.MODEL) for f in (self.folder, out))
    for name, array in before.items():
      self.assertEqual(array.shape, after[name].shape)
    changed = [n for n in before if (before[n] != after[n]).any()]
    self.assertIn('layers/moe/w_in', changed)

  def test_it_starts_at_the_weights_of_the_folder(self):
    cfg = small_config.experiment()
    cfg = base.adopt(dataclasses.replace(cfg, base=str(self.folder)))
    mesh = step.make_mesh(cfg.mesh)
    found = params_lib.names(base.weights(cfg, mesh))
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
