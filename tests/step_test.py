"""The train step: one gradient whatever the cut, replay, metrics, refusals."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.learner import batch as batch_lib
from composer_jax.learner import items
from composer_jax.learner import loss_inputs
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
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    experts=4,
    moe_ffn=32,
)
_SHAPE = packing.Shape(4, 64, contract.KEY_BLOCK)


@functools.cache
def _mesh(devices=2):
  return step.make_mesh(config.MeshConfig(devices))


@functools.cache
def _tx():
  return optimizer.AdamW(learning_rate=1e-3).build()


def _state(seed=0):
  return step.restart(fresh.params(_CFG, seed), _tx(), _mesh())


@functools.cache
def _segments(count=4, logp_noise=0.1):
  """Finished windows scored by the model itself, with small log-prob noise."""
  rng = np.random.default_rng(3)
  tokens = [
      rng.integers(0, _CFG.vocab, rng.integers(40, 60)).astype(np.int32)
      for _ in range(count)
  ]
  packed = [
      items.Item(i, items.document(t), 1.0) for i, t in enumerate(tokens, 1)
  ]
  batch, _ = packing.pack(packed, _SHAPE, now=0)
  params = step.rounded(_state().params)
  logps, routing = jax.device_get(
      step.score(params, batch, cfg=_CFG, mesh=_mesh())
  )
  out = []
  for i, t in enumerate(tokens, 1):
    row, start = np.argwhere(batch.rollouts == i)[0]
    span = slice(start, start + len(t))
    sampled = np.arange(len(t)) >= len(t) // 2
    noise = logp_noise * rng.standard_normal(len(t))
    mu = np.where(sampled, logps[row, span] + noise, 0.0)
    out.append(
        trace.TokenTrace(
            t,
            sampled,
            mu.astype(np.float32),
            np.zeros(len(t), np.int32),
            trace.RoutingTrace(routing[row, span]),
        )
    )
  return tuple(out)


def _items(segments=None, advantages=(1.0, -1.0, 0.5, -0.5)):
  segments = _segments() if segments is None else segments
  return [
      items.Item(i, s, a)
      for i, (s, a) in enumerate(zip(segments, advantages, strict=True), 1)
  ]


def _pack(packed, shape=_SHAPE, replay=_CFG, now=0):
  return packing.pack_all(packed, shape, now=now, replay=replay)[0]


def _gradients(batches, devices=2, loss=None, params=None, reference=None):
  params = _state().params if params is None else params
  params = jax.device_get(params)
  total, metrics = None, None
  for batch in batches:
    g, m = step.gradients(
        params,
        batch,
        jnp.float32(100.0),
        cfg=_CFG,
        loss=loss or losses.DppoTv(),
        mesh=_mesh(devices),
        reference=reference,
    )
    total = g if total is None else jax.tree.map(jnp.add, total, g)
    metrics = m if metrics is None else batch_lib.merge(metrics, m)
  return jax.device_get(total), jax.device_get(metrics)


def _assert_near(a, b, tolerance=1e-6):
  for (name, x), y in zip(
      params_lib.names(a).items(), jax.tree.leaves(b), strict=True
  ):
    np.testing.assert_allclose(x, y, 1e-4, tolerance, err_msg=name)


class GradientTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ('dppo', losses.DppoTv()), ('gspo', losses.Gspo(0.2, 0.2))
  )
  def test_cut_and_order_do_not_matter(self, loss):
    want, metrics = _gradients(_pack(_items()), loss=loss)
    self.assertGreater(float(np.abs(want.embedding).max()), 0)
    small = packing.Shape(2, 64, contract.KEY_BLOCK)
    micro = _pack(_items(), small)
    self.assertGreater(len(micro), 1)
    got, other = _gradients(micro, loss=loss)
    _assert_near(got, want)
    # The balance term is a product of means over one micro-batch.
    for name in set(metrics) - {'routing/balance'}:
      np.testing.assert_allclose(
          metrics[name].value(), other[name].value(), 1e-3, 1e-6, err_msg=name
      )
    _assert_near(_gradients(_pack(_items()[::-1]), loss=loss)[0], want)

  def test_split_into_segments_does_not_matter(self):
    """A token drawn in a later segment sees the same context, masked there.

    This loss reads all segments of a rollout at once.
    """
    loss = losses.Gspo(0.2, 0.2)
    cut = []
    for item in _items():
      t = item.trace
      early = np.arange(len(t)) < 3 * len(t) // 4
      for part in (early, ~early):
        drawn = t.sampled & part
        logps = np.where(drawn, t.logps, np.float32(0))
        segment = dataclasses.replace(t, sampled=drawn, logps=logps)
        self.assertTrue(drawn.any())
        cut.append(dataclasses.replace(item, trace=segment))
    want, _ = _gradients(_pack(_items()), loss=loss)
    wide = packing.Shape(8, 64, contract.KEY_BLOCK)
    _assert_near(_gradients(_pack(cut, wide), loss=loss)[0], want)
    # Over two batches as well; a rollout is never split over them.
    batches = _pack(cut)
    self.assertLen(batches, 2)
    _assert_near(_gradients(batches, loss=loss)[0], want)

  def test_number_of_devices_does_not_matter(self):
    want, _ = _gradients(_pack(_items()))
    _assert_near(_gradients(_pack(_items()), 4)[0], want)

  def test_run_to_run_bits(self):
    a, _ = _gradients(_pack(_items()))
    b, _ = _gradients(_pack(_items()))
    jax.tree.map(np.testing.assert_array_equal, a, b)

  def test_no_advantage_and_no_drift_is_no_gradient(self):
    loss = losses.DppoTv(drift=0.0)
    got, _ = _gradients(_pack(_items(advantages=(0.0,) * 4)), loss=loss)
    self.assertEqual(max(np.abs(x).max() for x in jax.tree.leaves(got)), 0.0)

  def test_gradient_is_that_of_the_rounded_weights(self):
    """Masters that round to the same bf16 values give the same gradient."""
    params = _state().params
    nudged = jax.tree.map(
        lambda x: jax.lax.reduce_precision(x, 8, 7) * (1 + 1e-4), params
    )
    rounded = jax.tree.map(lambda x: jax.lax.reduce_precision(x, 8, 7), params)
    a, _ = _gradients(_pack(_items()), params=nudged)
    b, _ = _gradients(_pack(_items()), params=rounded)
    jax.tree.map(np.testing.assert_array_equal, a, b)


class ReferenceTest(absltest.TestCase):

  def test_kl_to_itself_is_nothing_and_to_another_policy_is_not(self):
    plain, _ = _gradients(_pack(_items()), loss=losses.Composer2())
    same, _ = _gradients(
        _pack(_items()),
        loss=losses.Composer2(kl=0.1),
        reference=jax.device_get(_state().params),
    )
    jax.tree.map(np.testing.assert_array_equal, same, plain)
    other, metrics = _gradients(
        _pack(_items()),
        loss=losses.Composer2(kl=0.1),
        reference=jax.device_get(_state(seed=1).params),
    )
    self.assertNotEqual(float(metrics['loss/k1'].value()), 0.0)
    self.assertGreater(np.abs(other.embedding - plain.embedding).max(), 0)

  def test_loss_that_needs_a_reference_says_so(self):
    self.assertTrue(loss_inputs.needs_reference(losses.Composer2(kl=0.1)))
    self.assertFalse(loss_inputs.needs_reference(losses.DppoTv()))
    loss_inputs.check_loss(losses.Composer2(kl=0.1))


class ReplayTest(parameterized.TestCase):

  def test_own_routes_give_identical_bits(self):
    replayed, metrics = _gradients(_pack(_items()))
    live, _ = _gradients(_pack(_items(), replay=None))
    jax.tree.map(np.testing.assert_array_equal, replayed, live)
    self.assertEqual(metrics['routing/disagreement'].value(), 0.0)

  def test_perturbed_routes_change_the_loss_and_are_counted(self):
    def perturb(s):
      routes = (s.routing.experts + 1) % _CFG.experts
      return dataclasses.replace(
          s, routing=trace.RoutingTrace(routes.astype(np.uint8))
      )

    want, _ = _gradients(_pack(_items()))
    got, metrics = _gradients(_pack(_items([perturb(s) for s in _segments()])))
    self.assertGreater(metrics['routing/disagreement'].value(), 0.3)
    self.assertFalse(np.allclose(got.embedding, want.embedding, 1e-3, 1e-5))

  def test_router_learns_under_replay_of_other_weights(self):
    other = _state(seed=1).params
    got, metrics = _gradients(_pack(_items()), params=other)
    self.assertGreater(float(np.abs(got.layers.moe.router).max()), 1e-6)
    self.assertGreater(metrics['routing/disagreement'].value(), 0.0)

  def test_missing_routes_are_refused(self):
    bare = [dataclasses.replace(s, routing=None) for s in _segments()]
    with self.assertRaisesRegex(ValueError, 'no routing trace'):
      _pack(_items(bare))


class MetricsTest(parameterized.TestCase):

  def test_same_version_mismatch_is_exactly_zero_without_noise(self):
    _, metrics = _gradients(_pack(_items(_segments(logp_noise=0.0))))
    self.assertEqual(float(metrics['mismatch/kl_same_version'].value()), 0.0)
    self.assertGreater(metrics['mismatch/kl_same_version'].count, 50)
    self.assertEqual(float(metrics['mismatch/max_log_ratio'].value()), 0.0)

  def test_stale_context_is_not_counted_as_same_version(self):
    def older(s):
      versions = s.versions + (np.arange(len(s)) > 10)
      return dataclasses.replace(s, versions=versions.astype(np.int32))

    stale = [older(s) for s in _segments()]
    _, metrics = _gradients(_pack(_items(stale), now=1))
    # Every sampled token is of version 1, but its prompt is of version 0.
    self.assertEqual(metrics['mismatch/kl_same_version'].count, 0.0)
    self.assertEqual(metrics['mismatch/max_same_version'].value(), 0.0)
    self.assertGreater(metrics['mismatch/kl_stale'].value(), 0.0)

  def test_maximum_is_not_averaged_over_micro_batches(self):
    small = packing.Shape(2, 64, contract.KEY_BLOCK)
    each = [_gradients([b])[1] for b in _pack(_items(), small)]
    _, both = _gradients(_pack(_items(), small))
    peaks = [float(m['mismatch/max_log_ratio'].value()) for m in each]
    self.assertEqual(both['mismatch/max_log_ratio'].value(), max(peaks))


@dataclasses.dataclass(frozen=True)
class _Wrong:

  def __call__(self, stats):
    return stats.logps[:, 0], {}


@dataclasses.dataclass(frozen=True)
class _NotANumber:

  def __call__(self, stats):
    return stats.logps * jnp.nan, {}


class StepTest(parameterized.TestCase):

  def _step(self, loss, **kwargs):
    return step.train_step(
        _state(),
        _pack(_items()),
        100.0,
        cfg=_CFG,
        loss=loss,
        tx=_tx(),
        mesh=_mesh(),
        **kwargs,
    )

  def test_step_moves_parameters_and_counts(self):
    state, figures = self._step(losses.DppoTv())
    self.assertEqual(int(state.step), 1)
    self.assertGreater(figures['grad_norm'], 0)
    before = jax.device_get(_state().params.layers.moe.w_in)
    self.assertGreater(
        np.abs(jax.device_get(state.params.layers.moe.w_in) - before).max(), 0
    )

  def test_equal_losses_do_not_retrace(self):
    self._step(losses.DppoTv(width=0.21))
    programs = step.compilations()
    self._step(losses.DppoTv(width=0.21))
    self.assertEqual(step.compilations(), programs)

  def test_wrong_shape_names_the_loss(self):
    with self.assertRaisesRegex(ValueError, '_Wrong returned shape'):
      self._step(_Wrong())

  def test_nan_hands_over_the_batch(self):
    kept = []
    with self.assertRaisesRegex(FloatingPointError, 'there.npz'):
      self._step(
          _NotANumber(), on_nonfinite=lambda b: kept.append(b) or 'there.npz'
      )
    self.assertEqual(kept[0].tokens.shape, (4, 64))

  def test_mesh_larger_than_the_devices(self):
    with self.assertRaisesRegex(ValueError, 'mesh.data=64'):
      step.make_mesh(config.MeshConfig(64))


if __name__ == '__main__':
  absltest.main()
