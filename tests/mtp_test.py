"""Multi-token prediction: what it sees, what it changes and what it does not."""

import dataclasses
import functools

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax.learner import items
from composer_jax.learner import losses
from composer_jax.learner import mtp_loss
from composer_jax.learner import optimizer
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.model import mtp
from composer_jax.model import params as params_lib
from composer_jax.model import transformer
from composer_jax.runs import rl
from kernels_triton import contract
from tests import fresh

_CFG = config.ModelConfig(
    vocab=64,
    layers=1,
    embed=32,
    q_heads=2,
    kv_heads=1,
    head_dim=16,
    experts=4,
    moe_ffn=32,
    mtp_layers=2,
)
_ONE = dataclasses.replace(_CFG, mtp_layers=1)
_PLAIN = dataclasses.replace(_CFG, mtp_layers=0)
_SHAPE = packing.Shape(2, 64, contract.KEY_BLOCK)
_TWO = config.MeshConfig(2)


@functools.cache
def _params(cfg=_CFG):
  return fresh.params(cfg, 1)


def _pack(*documents, masks=None, shape=_SHAPE):
  masks = masks or [None] * len(documents)
  packed = [
      items.Item(i, items.document(np.asarray(d, np.int32), m), 1.0)
      for i, (d, m) in enumerate(zip(documents, masks, strict=True), 1)
  ]
  return packing.pack(packed, shape, now=0)[0]


def _documents(*lengths, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(0, 64, n) for n in lengths]


@jax.jit
def _run(params, batch):
  """(states of the modules, loss of tokens, loss of distributions)."""
  packed = batch.tokens, batch.segments, batch.positions
  out = transformer.forward(params, *packed, cfg=_CFG)
  found = tuple(mtp.states(params, out.hidden, *packed, cfg=_CFG))
  tokens, whole = (
      mtp_loss.loss(params, out.hidden, batch, config.Mtp(1.0, distill), _CFG)
      for distill in (False, True)
  )
  return found, tokens, whole


def _loss(batch, distill=False):
  return _run(_params(), batch)[1 + distill]


def _states(batch):
  return _run(_params(), batch)[0]


def _gradients(objective, cfg=_ONE, mesh=_TWO):
  grads, metrics = step.gradients(
      _params(cfg),
      _pack(
          *_documents(20, 60, 30),
          shape=packing.Shape(4, 64, contract.KEY_BLOCK),
      ),
      jnp.float32(100.0),
      cfg=cfg,
      loss=losses.NextToken(),
      mesh=step.make_mesh(mesh),
      mtp=objective,
  )
  return jax.device_get(grads), jax.device_get(metrics)


def _assert_same_model(a, b):
  a, b = (params_lib.names(params_lib.without_mtp(x)) for x in (a, b))
  for name, want in b.items():
    np.testing.assert_array_equal(a[name], want, err_msg=name)


class MtpTest(absltest.TestCase):

  def test_a_module_never_sees_what_it_predicts(self):
    (text,) = _documents(30)
    for k in (1, 2):
      # At t, module k has seen tokens up to t + k, and predicts the next one.
      other = text.copy()
      other[20] = (other[20] + 1) % 64
      a, b = (np.asarray(_states(_pack(d))[k - 1][0]) for d in (text, other))
      np.testing.assert_array_equal(a[: 20 - k], b[: 20 - k])
      self.assertGreater(np.abs(a[20 - k] - b[20 - k]).max(), 1e-6)

  def test_documents_do_not_see_each_other_and_ends_are_not_predicted(self):
    one, two = _documents(25, 31)
    for distill in (False, True):
      both, count = _loss(_pack(one, two), distill)
      apart = [_loss(_pack(d), distill) for d in (one, two)]
      np.testing.assert_allclose(both, sum(x for x, _ in apart), 1e-5)
      # The first k + 1 tokens have no state that far behind them.
      self.assertEqual(float(count), np.mean([23 + 29, 22 + 28]))

  def test_prompts_are_masked(self):
    (text,) = _documents(30)
    mask = np.arange(30) >= 20
    _, count = _loss(_pack(text, masks=[mask]))
    self.assertEqual(float(count), 10)

  def test_at_first_it_knows_nothing(self):
    total, count = _loss(_pack(*_documents(60, 60)))
    self.assertAlmostEqual(float(total / count), np.log(64), delta=0.7)
    total, count = _loss(_pack(*_documents(60, 60)), True)
    self.assertBetween(float(total / count), 0.01, 2.0)

  def test_weight_zero_and_distillation_leave_the_model_alone(self):
    want, metrics = _gradients(config.Mtp(), _PLAIN)
    none, same = _gradients(config.Mtp())
    _assert_same_model(none, want)
    self.assertNotIn('loss/mtp', same)
    for name, metric in metrics.items():
      np.testing.assert_array_equal(same[name].value(), metric.value())
    self.assertEqual(max(np.abs(x).max() for x in jax.tree.leaves(none.mtp)), 0)
    distilled, figures = _gradients(config.Mtp(0.3, distill=True))
    _assert_same_model(distilled, want)
    self.assertEqual(figures['loss'].value(), metrics['loss'].value())
    still = {
        name
        for name, g in params_lib.names(distilled.mtp).items()
        if not np.abs(g).max() > 0
    }
    self.assertEmpty(still)
    joint, figures = _gradients(config.Mtp(0.3))
    split, _ = _gradients(
        config.Mtp(0.3), mesh=config.MeshConfig(1, fsdp=2, expert=2)
    )
    for (name, a), b in zip(
        params_lib.names(split).items(), jax.tree.leaves(joint), strict=True
    ):
      np.testing.assert_allclose(a, b, 1e-4, 1e-6, err_msg=name)
    self.assertEqual(figures['loss'].value(), metrics['loss'].value())
    moved = np.abs(joint.embedding - want.embedding).max()
    self.assertGreater(moved, 1e-4)

  def test_it_learns(self):
    mesh = step.make_mesh(config.MeshConfig(2))
    tx = optimizer.AdamW(1e-2).build()
    state = step.restart(jax.tree.map(jnp.asarray, _params(_ONE)), tx, mesh)
    batch = _pack(*[(np.arange(60) + 9 * i) % 64 for i in range(2)])
    seen = []
    for _ in range(25):
      state, figures = step.train_step(
          state,
          [batch],
          100.0,
          cfg=_ONE,
          loss=losses.NextToken(),
          tx=tx,
          mesh=mesh,
          mtp=config.Mtp(0.3),
      )
      seen.append(figures['loss/mtp'])
    self.assertGreater(seen[0], 3.5)
    self.assertLess(seen[-1], 1.5)

  def test_a_policy_is_published_without_it(self):
    named = rl.published_arrays(_params())
    self.assertEqual(
        set(named), set(params_lib.names(params_lib.abstract(_PLAIN)))
    )
    self.assertEqual(params_lib.count(_CFG), params_lib.count(_PLAIN))
    back = params_lib.from_names(params_lib.names(_params()))
    jax.tree.map(np.testing.assert_array_equal, back, _params())
    phase = config.PhaseConfig('p', None, 1, 1, 32, mtp=config.Mtp(0.3))
    args = dict.fromkeys(('loss', 'advantage', 'tasks', 'rl_optimizer'))
    with self.assertRaisesRegex(ValueError, 'phases.p.mtp.weight=0.3: needs'):
      config.Experiment('x', rewards=(), phases=(phase,), **args)


if __name__ == '__main__':
  absltest.main()
