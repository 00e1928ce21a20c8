"""Decoder and trainer, bit for bit: claims 2, 3 and 5 about determinism.

A claim that fails names the first op, layer and token that differ.
"""

import dataclasses
import functools
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.inspect import divergence
from composer_jax.inspect import ops
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.model import params as params_lib
from composer_jax.rollout import engine as engine_lib
from kernels_triton import contract
from kernels_triton import rows
from tests import bitwise_test
from tests import small_config

_MODEL = small_config.experiment().model
_PROMPT = 9
_SHAPE = packing.Shape(8, 96, contract.KEY_BLOCK)


def _model(dtype):
  return dataclasses.replace(_MODEL, dtype=dtype)


@functools.cache
def _near_ties(seed):
  """Published weights whose routers see ties, and all but ties, all the time.

  Expert 1 is a copy of expert 0 in the router, expert 3 is one bf16 step from
  expert 2: a last bit that differs anywhere shows up in the routing, too.
  """
  params = params_lib.init(_MODEL, jax.random.key(seed))
  w = params.layers.moe.router
  w = w.at[..., 1].set(w[..., 0]).at[..., 3].set(w[..., 2])
  w = step.rounded(w).at[:, 0, 3].multiply(1 + 2**-7)
  moe = params.layers.moe.replace(router=w)
  params = params.replace(layers=params.layers.replace(moe=moe))
  return step.rounded(params)


def _texts(count):
  rng = np.random.default_rng(4)
  lengths = rng.integers(33, 90, count)
  return [rng.integers(0, _MODEL.vocab, n).astype(np.int32) for n in lengths]


class RolesTest(parameterized.TestCase):

  def _assert_equal(self, got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
      difference = divergence.first(a, b)
      self.assertIsNone(difference, f'text {i}: {difference}')

  def _decoded(self, texts, dtype, **kwargs):
    return ops.decoder(
        _near_ties(0), texts, _PROMPT, cfg=_model(dtype), **kwargs
    )

  def _trained(self, texts, dtype):
    return ops.trainer(
        _near_ties(0), texts, _PROMPT, cfg=_model(dtype), shape=_SHAPE
    )

  @parameterized.product(dtype=('float32', 'bfloat16'), batch=(1, 3, 7))
  def test_2_decoder_equals_trainer(self, dtype, batch):
    """Shuffled pages, odd chunks; every op of every token, not just log-probs.

    The trainer packs all seven texts, the decoder runs the first few.
    """
    want = self._trained(_texts(7), dtype)[:batch]
    for seed, chunk in ((0, 3), (1, 7)):
      got = self._decoded(_texts(7)[:batch], dtype, seed=seed, chunk=chunk)
      self._assert_equal(got, want)

  @parameterized.product(
      dtype=('float32', 'bfloat16'),
      kind=('sigmoid', 'dense', 'deepseek'),
      batch=bitwise_test.BATCHES,
  )
  def test_2_other_models_too(self, dtype, kind, batch):
    bitwise_test.check_decode_equals_trainer(dtype, kind, *batch)

  @parameterized.product(dtype=('float32', 'bfloat16'), batch=(1, 3, 7))
  def test_2_every_op_of_latent_attention(self, dtype, batch):
    cfg = dataclasses.replace(
        _MODEL, layers=3, dtype=dtype, **bitwise_test.KINDS['deepseek']
    )
    params = step.rounded(params_lib.init(cfg, jax.random.key(0)))
    want = ops.trainer(params, _texts(7), _PROMPT, cfg=cfg, shape=_SHAPE)
    self.assertIn('layer 0, key', want[0].ops)
    self.assertNotIn('layer 0, experts', want[0].ops)
    self.assertIn('layer 2, experts', want[0].ops)
    got = ops.decoder(
        params, _texts(7)[:batch], _PROMPT, cfg=cfg, chunk=5, seed=batch
    )
    self._assert_equal(got, want[:batch])

  @parameterized.product(dtype=('float32', 'bfloat16'), batch=(1, 3, 7))
  def test_2_weights_are_swapped_in_mid_flight(self, dtype, batch):
    """Every token that has seen one version only has that version's bits.

    What a window draws after a swap rests on keys and values of both versions,
    which no trainer has; but it leaves no trace in windows that follow.
    """
    cfg, texts = _model(dtype), _texts(batch)
    swap = threading.Event()

    def refresh():
      if not swap.is_set():
        return None
      swap.clear()
      return trace.WeightVersion(1, 'one', None), _near_ties(1)

    def context(text):
      n = len(text)
      return trace.TokenTrace(
          text,
          np.zeros(n, bool),
          np.zeros(n, np.float32),
          np.full(n, -1, np.int32),
      )

    with engine_lib.Engine(
        cfg,
        config.RolloutConfig(slots=8, context_tokens=96),
        trace.WeightVersion(0, 'zero', None),
        _near_ties(0),
        devices=jax.devices()[:1],
        refresh=refresh,
    ) as engine:
      engine.warmup()
      requests = [
          engine_lib.Request(context(t[:20]), 70, frozenset(), i)
          for i, t in enumerate(texts)
      ]
      early = [engine.submit(r) for r in requests]
      before = engine.stats().decoded_tokens
      while engine.stats().decoded_tokens < before + 10 * batch:
        time.sleep(0.001)
      swap.set()
      early = [f.result(timeout=300) for f in early]
      late = [engine.submit(r).result(timeout=300) for r in requests]
    for windows, params, version in (
        (early, _near_ties(0), 0),
        (late, _near_ties(1), 1),
    ):
      tokens = [w.tokens for w in windows]
      records = ops.trainer(params, tokens, 20, cfg=cfg, shape=_SHAPE)
      for window, record in zip(windows, records, strict=True):
        mine = int((window.versions == version).sum())
        self.assertGreater(mine, 25)
        self.assertEqual(
            record.ops['log-prob'][: mine - 20].tobytes(),
            window.logps[20:mine].tobytes(),
        )
        for layer in range(cfg.layers):
          np.testing.assert_array_equal(
              record.ops[f'layer {layer}, experts'][: mine - 1],
              window.routing.experts[: mine - 1, layer],
          )
    self.assertEqual({*early[0].versions}, {0, 1})
    self.assertEqual({*late[0].versions}, {1})

  def test_3_negative_control(self):
    """The same model without row blocks MUST fail 2, and is caught at once."""

    def naive(f, params, *xs, **unused):
      return f(params, *xs)

    jax.clear_caches()
    with mock.patch.object(rows, 'run_rows', naive):
      want = self._trained(_texts(3), 'float32')
      got = self._decoded(_texts(3), 'float32', chunk=3)
    jax.clear_caches()
    found = [divergence.first(*pair) for pair in zip(got, want, strict=True)]
    self.assertNotIn(None, found)
    for difference in found:
      self.assertRegex(
          str(difference),
          r'^layer 0, (query|key|value), token \d+, element \[\d+, \d+\],'
          r' float32: 0x[0-9a-f]{8} vs 0x[0-9a-f]{8}, \d+ ulp',
      )

  @parameterized.parameters('float32', 'bfloat16')
  def test_5_ties_and_order(self, dtype):
    texts = _texts(7)
    records = self._decoded(texts, dtype, chunk=5)
    for record in records:
      for layer in range(_MODEL.layers):
        logits = record.ops[f'layer {layer}, router logits']
        np.testing.assert_array_equal(logits[:, 0], logits[:, 1])
        # A stable sort: among equals the lowest index is first.
        order = np.argsort(-logits, axis=1, kind='stable')
        np.testing.assert_array_equal(
            record.ops[f'layer {layer}, experts'], order[:, : _MODEL.top_k]
        )
    order = np.random.default_rng(0).permutation(7)
    shuffled = [texts[i] for i in order]
    want = [records[i] for i in order]
    self._assert_equal(self._decoded(shuffled, dtype, chunk=5, seed=2), want)
    self._assert_equal(self._trained(shuffled, dtype), want)


if __name__ == '__main__':
  absltest.main()
