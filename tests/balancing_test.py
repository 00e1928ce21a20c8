"""Router losses and biases: exact values, and what they must not depend on."""

import dataclasses
import functools
import math

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax.learner import batch as batch_lib
from composer_jax.learner import items
from composer_jax.learner import losses
from composer_jax.learner import optimizer
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.model import params as params_lib
from kernels_triton import contract
from tests import fresh

_CFG = config.ModelConfig(
    vocab=64,
    layers=2,
    embed=32,
    q_heads=2,
    kv_heads=1,
    head_dim=16,
    experts=4,
    moe_ffn=32,
    router='sigmoid',
)
_ALL = config.Balancing(aux=0.1, z=0.1, bias_speed=0.25)
_SHAPE = packing.Shape(4, 64, contract.KEY_BLOCK)


def _documents():
  rng = np.random.default_rng(5)
  return [rng.integers(0, 64, n).astype(np.int32) for n in (50, 33, 20, 9)]


def _pack(documents, shape=_SHAPE):
  packed = [
      items.Item(i, items.document(d), 1.0) for i, d in enumerate(documents, 1)
  ]
  return packing.pack(packed, shape, now=0)[0]


@functools.cache
def _params():
  return fresh.params(_CFG, 3)


def _tokens(batches):
  return float(sum(np.count_nonzero(b.segments) for b in batches))


def _gradients(batches, params=None, balancing=_ALL):
  total = metrics = None
  for batch in batches:
    g, m = step.gradients(
        params or _params(),
        batch,
        jnp.float32(100.0),
        cfg=_CFG,
        loss=losses.NextToken(),
        mesh=step.make_mesh(config.MeshConfig(2)),
        balancing=balancing,
        tokens=_tokens(batches),
    )
    total = g if total is None else jax.tree.map(jnp.add, total, g)
    metrics = m if metrics is None else batch_lib.merge(metrics, m)
  return jax.device_get(total), jax.device_get(metrics)


def _near(a, b):
  for (name, x), y in zip(
      params_lib.names(a).items(), jax.tree.leaves(b), strict=True
  ):
    np.testing.assert_allclose(x, y, 1e-4, 1e-6, err_msg=name)


_ROUTING = ('routing/balance', 'routing/z', 'routing/load')


class BalancingTest(parameterized.TestCase):

  def test_values_of_a_router_that_knows_nothing(self):
    params = _params()
    moe = params.layers.moe
    moe = moe.replace(router=np.zeros_like(moe.router))
    blank = params.replace(layers=params.layers.replace(moe=moe))
    _, metrics = _gradients([_pack(_documents())], params=blank)
    # All scores are equal: the first two of four experts get everything.
    self.assertAlmostEqual(float(metrics['routing/balance'].value()), 1.0, 5)
    z = float(metrics['routing/z'].value())
    self.assertAlmostEqual(z, math.log(4) ** 2, 5)
    n = sum(map(len, _documents()))
    np.testing.assert_array_equal(
        metrics['routing/load'].total, [[n, n, 0, 0]] * 2
    )

  def test_pads_never_count(self):
    want, metrics = _gradients([_pack(_documents())])
    more = packing.Shape(8, 64, contract.KEY_BLOCK)
    got, padded = _gradients([_pack(_documents(), more)])
    _near(got, want)
    for name in _ROUTING:
      np.testing.assert_allclose(
          padded[name].value(), metrics[name].value(), 1e-6, err_msg=name
      )
    np.testing.assert_array_equal(
        padded['routing/load'].total, metrics['routing/load'].total
    )
    # The router's losses do something: it is not only the text that it learns.
    alone, _ = _gradients([_pack(_documents())], balancing=config.Balancing())
    moved = np.abs(alone.layers.moe.router - want.layers.moe.router).max()
    self.assertGreater(moved, 1e-4)

  def test_cut_into_batches_matters_for_the_product_of_means_only(self):
    documents = _documents()
    parts = [_pack(documents[:1]), _pack(documents[1:])]
    _, whole = _gradients([_pack(documents)])
    _, cut = _gradients(parts)
    for name in ('routing/z', 'routing/load'):
      np.testing.assert_allclose(
          cut[name].value(), whole[name].value(), 1e-5, err_msg=name
      )
    z = config.Balancing(z=0.1)
    want, _ = _gradients([_pack(documents)], balancing=z)
    _near(_gradients(parts, balancing=z)[0], want)
    # A batch that says nothing new does not count twice.
    same, _ = _gradients([_pack(documents)] * 2)
    once, _ = _gradients([_pack(documents)])
    plain, _ = _gradients([_pack(documents)], balancing=config.Balancing())
    np.testing.assert_allclose(
        same.layers.moe.router - 2 * plain.layers.moe.router,
        once.layers.moe.router - plain.layers.moe.router,
        1e-3,
        1e-6,
    )

  def test_bias_moves_by_the_sign_of_the_load_and_by_nothing_else(self):
    tx = optimizer.AdamW(weight_decay=0.5).build()
    mesh = step.make_mesh(config.MeshConfig(2))
    moe = _params().layers.moe
    bias = np.float32([[0.5, 0, 0, 0], [0, 0, 0, -0.5]])
    params = _params().replace(
        layers=_params().layers.replace(moe=moe.replace(bias=bias))
    )
    documents = _documents()
    parts = [_pack(documents[:1]), _pack(documents[1:])]
    _, metrics = _gradients(parts, params=params)
    load = metrics['routing/load'].total
    self.assertEqual(load.sum(), 2 * 2 * sum(map(len, documents)))

    def stepped(balancing):
      state, figures = step.train_step(
          step.restart(jax.tree.map(jnp.asarray, params), tx, mesh),
          parts,
          100.0,
          cfg=_CFG,
          loss=losses.NextToken(),
          tx=tx,
          mesh=mesh,
          balancing=balancing,
      )
      return jax.device_get(state.params.layers.moe.bias), figures

    got, figures = stepped(_ALL)
    want = bias + 0.25 * np.sign(load.mean(1, keepdims=True) - load)
    np.testing.assert_array_equal(got, want)
    self.assertNotEqual(np.abs(want - bias).max(), 0)
    peak = (load / load.mean(1, keepdims=True)).max()
    self.assertAlmostEqual(figures['routing/max_load'], float(peak), 5)
    still, _ = stepped(dataclasses.replace(_ALL, bias_speed=0.0))
    np.testing.assert_array_equal(still, bias)

  def test_a_bias_that_the_router_lacks_is_refused(self):
    phase = config.PhaseConfig('p', None, 1, 1, 32, balancing=_ALL)
    args = dict.fromkeys(('loss', 'advantage', 'tasks', 'rl_optimizer'))
    with self.assertRaisesRegex(ValueError, "phases.p.*router='sigmoid'"):
      config.Experiment('x', rewards=(), phases=(phase,), **args)
    with self.assertRaisesRegex(ValueError, 'Balancing.z=-1'):
      config.Balancing(z=-1)


if __name__ == '__main__':
  absltest.main()
