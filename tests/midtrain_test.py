"""Phases on mixtures: exact resume, f32 masters, figures of every source."""

import dataclasses
import json
import pathlib

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax.data import mixture
from composer_jax.data import stream
from composer_jax.learner import optimizer
from composer_jax.learner import step
from composer_jax.model import params as params_lib
from composer_jax.runs import midtrain
from composer_jax.runs import writer as writer_lib
from kernels_triton import contract
import optax

_CFG = config.ModelConfig(
    vocab=64,
    layers=1,
    embed=32,
    q_heads=2,
    kv_heads=1,
    head_dim=16,
    experts=4,
    moe_ffn=32,
    router='sigmoid',
    dtype='bfloat16',
)
_PHASE = config.PhaseConfig(
    'long',
    optimizer.Muon(1e-2, schedule=optimizer.Wsd(2, 2, warmup_steps=1)),
    steps=4,
    rows_per_step=4,
    tokens_per_row=64,
    mix=(('text', 3), ('chats', 1)),
    balancing=config.Balancing(z=1e-3, bias_speed=1e-3),
    eval_every_steps=2,
)


def _texts(seed: int, masked: bool) -> stream.Tokens:
  """Counting from random starts: quickly learned."""
  rng = np.random.default_rng(seed)
  parts = [
      (rng.integers(64) + np.arange(rng.integers(20, 90))) % 64
      for _ in range(30)
  ]
  ids = np.concatenate(parts).astype(np.uint16)
  starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
  trained = rng.random(len(ids)) < 0.5 if masked else None
  return stream.Tokens(ids, starts, len(ids), trained)


class MidtrainTest(absltest.TestCase):

  def _run(self, name, stop_after=None, steps=4):
    folder = pathlib.Path(self.folder) / name
    weights = dict(_PHASE.mix)
    sources = {
        'text': stream.Stream(_texts(0, False), 64, contract.KEY_BLOCK, 0),
        'chats': stream.Stream(_texts(1, True), 64, contract.KEY_BLOCK, 0),
    }
    mesh = step.make_mesh(config.MeshConfig(2))
    asked = iter(range(100))
    with writer_lib.Writer(folder) as writer:
      return midtrain.run(
          dataclasses.replace(_PHASE, steps=steps),
          mixture.Mixture(sources, weights),
          step.init_state(_CFG, optax.identity(), 0, mesh),
          model=_CFG,
          mesh=mesh,
          heldout={'text': _texts(2, False), 'chats': _texts(3, True)},
          checkpoints=folder / 'checkpoints',
          writer=writer,
          stop=lambda: stop_after is not None and next(asked) >= stop_after,
      )

  def _records(self, name):
    path = pathlib.Path(self.folder) / name / 'metrics.jsonl'
    return [json.loads(line) for line in path.read_text().splitlines()]

  def test_phase(self):
    self.folder = self.create_tempdir().full_path
    whole, complete = self._run('whole')
    self.assertTrue(complete)
    _, complete = self._run('cut', stop_after=3)
    self.assertFalse(complete)
    resumed, complete = self._run('cut')
    self.assertTrue(complete)
    for x, y in zip(
        jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True
    ):
      np.testing.assert_array_equal(x, y)

    # Activations are bf16; masters and moments are not, and hold values that
    # bf16 cannot.
    kinds = {x.dtype for x in jax.tree.leaves(whole.params)}
    self.assertEqual(kinds, {jnp.dtype('float32')})
    floats = [x.dtype for x in jax.tree.leaves(whole.opt_state) if x.ndim]
    self.assertEqual(set(floats), {jnp.dtype('float32')})
    rounded = jax.device_get(step.rounded(whole.params))
    finer = {
        name: np.mean(np.asarray(x) != np.asarray(y))
        for (name, x), y in zip(
            params_lib.names(whole.params).items(),
            jax.tree.leaves(rounded),
            strict=True,
        )
    }
    self.assertGreater(finer['layers/moe/w_in'], 0.9)

    records = self._records('whole')
    self.assertEqual([r['step'] for r in records], [0, 1, 2, 3, 4])
    measured = [r for r in records if 'bits_per_byte' in r]
    self.assertEqual([r['step'] for r in measured], [0, 2, 4])
    for r in measured:
      parts = [r['bits_per_byte/text'], r['bits_per_byte/chats']]
      self.assertBetween(r['bits_per_byte'], min(parts), max(parts))
      self.assertNotAlmostEqual(*parts)
    for name in ('bits_per_byte/text', 'bits_per_byte/chats'):
      self.assertLess(measured[-1][name], measured[0][name])
    self.assertEqual({r['phase'] for r in records}, {'long'})
    extra = midtrain.checkpoint.read_extra(
        pathlib.Path(self.folder) / 'whole' / 'checkpoints'
    )
    rows = {k: c['rows'] for k, c in extra['cursors'].items()}
    self.assertEqual(rows, {'text': 12, 'chats': 4})


if __name__ == '__main__':
  absltest.main()
