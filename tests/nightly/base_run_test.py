"""From the folder of a published model, through RL, to another folder."""

import json
import pathlib
import sys

from absl.testing import absltest
from absl.testing import parameterized
from tests import published
from tests import small_run

from composer_jax import config
from composer_jax import rope
from composer_jax.model import families
from composer_jax.model import hf
from composer_jax.runs import stored_model

_LATENT = config.ModelConfig(
    vocab=512,
    layers=3,
    embed=32,
    q_heads=4,
    kv_heads=1,
    head_dim=8,
    kv_latent=16,
    q_latent=24,
    rope_dim=8,
    value_dim=8,
    experts=8,
    top_k=2,
    moe_ffn=16,
    shared_experts=1,
    dense_layers=1,
    dense_ffn=48,
    router='sigmoid',
    routed_scale=2.5,
    expert_groups=2,
    rope_scaling=rope.Yarn(4.0, 1024),
)


def _binary(name, *arguments):
  start = [sys.executable, '-m', f'experiments.{name}']
  return small_run.finished([*start, *map(str, arguments)])


class BaseTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ('grouped', published.MODEL), ('latent', _LATENT)
  )
  def test_from_a_folder_to_a_folder(self, model):
    root = pathlib.Path(self.create_tempdir().full_path)
    folder, workdir = root / 'model', root / 'run'
    published.write(folder, model)
    done = small_run.run(
        'rl', workdir, f'base={folder}', config='tests.base_config'
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    lines = (workdir / 'metrics.jsonl').read_text().splitlines()
    records = [json.loads(line) for line in lines]
    phases = {r['phase'] for r in records}
    self.assertEqual(phases, {'midtrain', 'rl', 'eval'})
    figures = [r for r in records if 'mismatch/kl_same_version' in r]
    self.assertTrue(figures)
    # A model that was not made here keeps the contract: the same bits.
    self.assertEqual({r['mismatch/kl_same_version'] for r in figures}, {0.0})
    store = f'file://{workdir / "weights"}/'
    stored = stored_model.read(store)
    self.assertEqual(stored.model, model)
    self.assertIn('<|im_start|>', stored.template)
    out = root / 'trained'
    done = _binary('export_model', f'--store={store}', f'--folder={out}')
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(families.to_config(hf.read_config(out)), model)
    before, after = (hf.load(f, model) for f in (folder, out))
    changed = [n for n in before if (before[n] != after[n]).any()]
    self.assertIn('layers/moe/w_in', changed)


if __name__ == '__main__':
  absltest.main()
