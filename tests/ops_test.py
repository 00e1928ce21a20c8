"""Recorded ops: the recorder changes no bit and finds the op that differs."""

import dataclasses
import functools
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import ad_checkpoint
from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from composer_jax import config
from composer_jax.inspect import divergence
from composer_jax.inspect import named_values
from composer_jax.inspect import ops
from composer_jax.learner import items
from composer_jax.learner import losses
from composer_jax.learner import optimizer
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.model import params as params_lib
from kernels_triton import contract
from tests import fresh

_SHAPE = packing.Shape(2, 128, contract.KEY_BLOCK)
_PROMPT = 6


def _cfg(dtype='float32'):
  return config.ModelConfig(
      vocab=64,
      layers=2,
      embed=32,
      q_heads=2,
      kv_heads=1,
      head_dim=16,
      experts=4,
      moe_ffn=32,
      dtype=dtype,
  )


@functools.cache
def _params():
  masters = fresh.params(_cfg())
  return step.rounded(masters)


def _texts(count=3):
  rng = np.random.default_rng(0)
  return [
      rng.integers(0, 64, 33 + 7 * i).astype(np.int32) for i in range(count)
  ]


def _bytes(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


class NamedTest(absltest.TestCase):

  def test_values_in_loops_and_in_scans_are_stacked(self):
    name = ad_checkpoint.checkpoint_name

    @jax.jit
    def inner(x):
      return name(x + 1, 'more')

    def f(x, w):
      def body(x, w):
        x = name(x * w, 'product')
        return x, x.sum()

      x, sums = lax.scan(body, x, w)
      return inner(inner(x)), sums

    x, w = jnp.arange(3.0), jnp.array([2.0, 3.0])
    got, found = named_values.capture(f)(x, w)
    self.assertEqual(_bytes(got), _bytes(f(x, w)))
    self.assertEqual(list(found), ['product', 'more'])
    np.testing.assert_array_equal(found['product'], [[0, 2, 4], [0, 6, 12]])
    np.testing.assert_array_equal(found['more'], [[1, 7, 13], [2, 8, 14]])

  def test_a_name_that_cannot_be_taken_out_is_refused(self):
    def f(x):
      body = lambda x: ad_checkpoint.checkpoint_name(x * 2, 'twice')
      return lax.while_loop(lambda x: x < 9, body, x)

    with self.assertRaisesRegex(ValueError, "twice.*inside 'while'"):
      named_values.capture(f)(1.0)


class OpsTest(parameterized.TestCase):

  @parameterized.parameters('float32', 'bfloat16')
  def test_decoder_and_trainer_compute_the_same_values(self, dtype):
    cfg = _cfg(dtype)
    trained = ops.trainer(_params(), _texts(), _PROMPT, cfg=cfg, shape=_SHAPE)
    decoded = ops.decoder(_params(), _texts(), _PROMPT, cfg=cfg, chunk=3)
    for a, b in zip(trained, decoded, strict=True):
      self.assertIsNone(divergence.first(a, b))
      self.assertEqual(list(a.digests().items()), list(b.digests().items()))
    names = list(trained[0].ops)
    self.assertEqual(names[0], 'layer 0, layer input')
    self.assertEqual(names[-1], 'log-prob')
    self.assertIn('layer 1, attention', names)
    self.assertLen(names, 2 * 10 + 1)

  @parameterized.parameters('float32', 'bfloat16')
  def test_recording_changes_no_bit(self, dtype):
    """The values come from a second program; its results are the first's."""
    cfg = _cfg(dtype)
    packed = [
        items.Item(i, items.document(t), 0.0) for i, t in enumerate(_texts(), 1)
    ]
    batch, _ = packing.pack(packed, _SHAPE, now=0)
    mesh = step.make_mesh(config.MeshConfig(2))
    logps, routing = step.score(_params(), batch, cfg=cfg, mesh=mesh)
    records = ops.trainer(_params(), _texts(), 1, cfg=cfg, shape=_SHAPE)
    for i, record in enumerate(records, 1):
      row, start = np.argwhere(batch.rollouts == i)[0]
      span = slice(start, start + len(_texts()[i - 1]))
      want = np.asarray(logps)[row, span]
      self.assertEqual(record.ops['log-prob'].tobytes(), want[1:].tobytes())
      for layer in range(cfg.layers):
        np.testing.assert_array_equal(
            record.ops[f'layer {layer}, experts'],
            np.asarray(routing)[row, span, layer],
        )

  def test_names_compile_to_nothing(self):
    f = lambda x: ad_checkpoint.checkpoint_name(x * 2, 'twice') + 1
    plain = lambda x: x * 2 + 1
    text = lambda f: jax.jit(f).lower(1.0).as_text().split('\n', 1)[1]
    self.assertEqual(text(f), text(plain))

  def test_train_step_is_the_one_that_trains(self):
    first = dict(layers=3, dense_layers=1, dense_ffn=16)
    cfg = dataclasses.replace(_cfg(), **first)
    mesh = step.make_mesh(config.MeshConfig(2))
    tx = optimizer.AdamW(learning_rate=1e-3).build()
    state = step.restart(fresh.params(cfg), tx, mesh)
    batch, packed = packing.pack_documents(_texts(), _SHAPE)
    args = dict(cfg=cfg, loss=losses.NextToken(), tx=tx, mesh=mesh)
    record = ops.train_step(state, batch, packed.sampled_tokens, **args)
    again = ops.train_step(state, batch, packed.sampled_tokens, **args)
    self.assertIsNone(divergence.first(record, again))
    after, _ = step.train_step(
        state, [batch], float(packed.sampled_tokens), **args
    )
    for name, want in params_lib.names(jax.device_get(after.params)).items():
      got = record.leaves[f'new params/{name}']
      self.assertEqual(got.tobytes(), want.tobytes(), name)
    order = [k for k in record.leaves if k.startswith('gradient')]
    self.assertEqual(order[0], 'gradient of unembed')
    self.assertEqual(order[2], 'gradient of layers/moe/w_out, layer 2')
    self.assertEqual(
        order[-2:],
        [
            'gradient of dense_layers/attention/norm, layer 0',
            'gradient of embedding',
        ],
    )


class DivergenceTest(parameterized.TestCase):

  def _difference(self, name, change):
    record = ops.trainer(
        _params(), _texts(1), _PROMPT, cfg=_cfg(), shape=_SHAPE
    )[0]
    values = record.ops[name].copy()
    change(values)
    later = {k: x + 1 for k, x in record.ops.items() if k == 'log-prob'}
    other = divergence.Record(dict(record.ops) | {name: values} | later)
    return str(divergence.first(record, other))

  def test_names_layer_op_token_and_bits(self):
    def change(x):
      x.view(np.uint32)[17, 1, 3] += 5
      x.view(np.uint32)[20] += 1

    self.assertRegex(
        self._difference('layer 1, attention', change),
        r'^layer 1, attention, token 17, element \[1, 3\], float32:'
        r' 0x[0-9a-f]{8} vs 0x[0-9a-f]{8}, 5 ulp \(33 of 1056 elements differ',
    )

  def test_names_the_weights_that_differ(self):
    """One bf16 step of one weight: the op that reads it, on the first token."""
    w = _params().layers.moe.w_out
    moved = w.at[1, 2, 3, 4].multiply(1 + 2**-7)
    moe = _params().layers.moe.replace(w_out=moved)
    other = _params().replace(layers=_params().layers.replace(moe=moe))
    a, b = (
        ops.trainer(p, _texts(1), _PROMPT, cfg=_cfg(), shape=_SHAPE)[0]
        for p in (_params(), other)
    )
    found = divergence.first(a, b)
    self.assertEqual(found.name, 'layer 1, expert output')
    self.assertEqual(found.element, (4,))
    (token,) = np.flatnonzero((a.ops['layer 1, experts'] == 2).any(1))[:1]
    self.assertEqual(found.token, token)

  @parameterized.parameters(
      (np.float32, 0.0, -0.0, '0 ulp'),
      (np.float32, 1e-45, -1e-45, '2 ulp'),
      (ml_dtypes.bfloat16, 1.0, 1.0078125, '1 ulp'),
      (np.int32, 3, 5, '0x00000003 vs 0x00000005 ('),
      (np.float32, np.nan, 1.0, '0x7fc00000 vs 0x3f800000 ('),
  )
  def test_distance(self, dtype, a, b, text):
    records = (divergence.Record({}, {'x': np.array(v, dtype)}) for v in (a, b))
    self.assertIn(text, str(divergence.first(*records)))

  def test_file_round_trip(self):
    leaves = {
        'a/b': np.array([-0.0, 1e-45], np.float32),
        'scalar': np.array(3, np.int32),
        'half': np.array([1.5], ml_dtypes.bfloat16),
    }
    record = divergence.Record({'layer 0, x': np.ones((2, 3))}, leaves)
    path = pathlib.Path(self.create_tempdir().full_path) / 'r.npz'
    divergence.save(path, {'trainer': record})
    got = divergence.load(path)['trainer']
    self.assertIsNone(divergence.first(record, got))
    self.assertEqual(
        divergence.digest({'x': record}), divergence.digest({'x': got})
    )

  def test_records_of_different_computations_are_refused(self):
    a = divergence.Record({'x': np.zeros(2)})
    for b in (
        divergence.Record({'y': np.zeros(2)}),
        divergence.Record({'x': np.zeros(3)}),
    ):
      with self.assertRaisesRegex(ValueError, 'different computations'):
        divergence.first(a, b)


if __name__ == '__main__':
  absltest.main()
