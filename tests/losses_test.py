"""Losses against float64 references written from the formulas, and invariants."""

import dataclasses
import functools
import math

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import trace
from composer_jax.learner import batch
from composer_jax.learner import items
from composer_jax.learner import losses
from composer_jax.learner import packing

# Widths small enough that every branch is taken on the data below.
_POLICY_LOSSES = (
    losses.DppoTv(width=0.1, max_ratio=1.5, drift=0.02),
    losses.DppoTv(width=0.1, drift=0.0, sequence_drift=0.1),
    losses.Composer2(),
    losses.Composer2(kl=0.3),
    losses.GrpoClip(),
    losses.Cispo(min_ratio=0.6, max_ratio=1.5),
    losses.Gspo(low=0.1, high=0.1),
    losses.IcePop(),
    losses.M2po(),
    losses.Ipo(width=0.1, drift=0.02),
)
_LOSSES = (losses.NextToken(), *_POLICY_LOSSES)
_SHAPE = (8, 32)  # one shape everywhere: every loss compiles once


def _stats(seed=0, dtype=np.float64, poison=None):
  """Random stats; rollouts are scattered over all rows."""
  rng = np.random.default_rng(seed)
  mask = rng.random(_SHAPE) < 0.6
  rollouts = rng.choice([1, 2, 3, 4, 5, 700], _SHAPE)
  shift = np.zeros(701)
  shift[:5] = 0, 0.25, -0.25, 0.3, -0.3
  advantage = np.zeros(701)
  advantage[[1, 2, 3, 4, 5, 700]] = 0.7, 0.5, -0.4, -0.9, 1.3, -1.1
  mu = -rng.exponential(0.8, _SHAPE)
  pi = np.minimum(mu + shift[rollouts] + rng.normal(0, 0.5, _SHAPE), -1e-3)
  fields = dict(
      logps=pi,
      behaviour_logps=mu,
      advantages=advantage[rollouts],
      ref_logps=np.minimum(mu + rng.normal(0, 0.3, _SHAPE), -1e-3),
      entropy=rng.random(_SHAPE),
  )
  fill = 0.0 if poison is None else poison
  return batch.TokenStats(
      **{k: np.where(mask, v, fill).astype(dtype) for k, v in fields.items()},
      mask=mask.astype(dtype),
      staleness=np.zeros(_SHAPE, np.int32),
      rollouts=rollouts.astype(np.int32),
  )


@functools.cache
def _compiled(loss):

  def total(logps, stats):
    per_token, metrics = loss(stats.replace(logps=logps))
    return jnp.sum(jnp.where(stats.mask > 0, per_token, 0.0)), metrics

  return jax.jit(jax.value_and_grad(total, has_aux=True))


def _value_and_grad(loss, stats):
  """(sum over trained tokens, d / d logps, metrics)."""
  (value, metrics), grad = _compiled(loss)(stats.logps, stats)
  return np.asarray(value), np.asarray(grad), jax.device_get(metrics)


def _reference(loss, stats):
  """d loss / d log pi of every token, one token at a time, in float64."""
  out = np.zeros(_SHAPE)
  where = [tuple(i) for i in np.argwhere(stats.mask > 0)]
  members = {}
  for i in where:
    members.setdefault(stats.rollouts[i], []).append(i)
  moment_kept = _second_moment_kept(stats, where, loss)
  for i in where:
    pi, mu = stats.logps[i], stats.behaviour_logps[i]
    a, r = stats.advantages[i], math.exp(pi - mu)
    moved = math.exp(pi) - math.exp(mu)
    mates = members[stats.rollouts[i]]
    drift = [stats.logps[j] - stats.behaviour_logps[j] for j in mates]
    match loss:
      case losses.NextToken():
        out[i] = -1
      case losses.DppoTv():
        keep = not (a > 0 and moved > loss.width)
        keep &= not (a < 0 and -moved > loss.width)
        if loss.sequence_drift is not None and a < 0:
          keep &= bool(-np.mean(drift) <= loss.sequence_drift)
        out[i] = -keep * min(r, loss.max_ratio) * a
        out[i] += 2 * loss.drift * (pi - mu)
      case losses.Composer2():
        k1 = sum(stats.logps[j] - stats.ref_logps[j] for j in mates)
        out[i] = -(a - loss.kl * k1)
      case losses.GrpoClip():
        active = r <= 1 + loss.high if a > 0 else r >= 1 - loss.low
        out[i] = -active * r * a
      case losses.Cispo():
        out[i] = -min(max(r, loss.min_ratio), loss.max_ratio) * a
      case losses.Gspo():
        s = math.exp(np.mean(drift))
        active = s <= 1 + loss.high if a > 0 else s >= 1 - loss.low
        out[i] = -int(active) * s * a / len(mates)
      case losses.IcePop():
        out[i] = -(loss.low <= r <= loss.high) * r * a
      case losses.M2po():
        out[i] = -(i in moment_kept) * r * a
      case losses.Ipo():
        out[i] = -(abs(moved) <= loss.width) * r * a
        out[i] += 2 * loss.drift * (pi - mu)
  return out


def _second_moment_kept(stats, where, loss):
  def square(i):
    return (stats.logps[i] - stats.behaviour_logps[i]) ** 2

  kept = sorted(where, key=square)
  while (
      isinstance(loss, losses.M2po)
      and kept
      and np.mean([square(i) for i in kept]) > loss.second_moment
  ):
    kept.pop()
  return set(kept)


def _objective(loss, logps, stats):
  """The published objectives of the clipped losses, to be differenced."""
  total = 0.0
  for rollout in np.unique(stats.rollouts):
    on = (stats.mask > 0) & (stats.rollouts == rollout)
    if not on.any():
      continue
    ratio = np.exp(logps[on] - stats.behaviour_logps[on])
    a = stats.advantages[on]
    if isinstance(loss, losses.Gspo):
      ratio, a = np.exp(np.mean(np.log(ratio))), a[0]
    clipped = np.clip(ratio, 1 - loss.low, 1 + loss.high)
    total -= np.sum(np.minimum(ratio * a, clipped * a))
  return total


class GradientTest(parameterized.TestCase):

  @parameterized.product(loss=_LOSSES, seed=(0, 1))
  def test_matches_the_reference_in_float64(self, loss, seed):
    stats = _stats(seed)
    with jax.enable_x64(True):
      _, grad, _ = _value_and_grad(loss, stats)
    np.testing.assert_allclose(
        grad, _reference(loss, stats), rtol=1e-12, atol=1e-13
    )

  @parameterized.parameters(*_LOSSES)
  def test_float32_is_close_to_float64(self, loss):
    stats = _stats(dtype=np.float32)
    _, grad, _ = _value_and_grad(loss, stats)
    self.assertEqual(grad.dtype, np.float32)
    wide = jax.tree.map(lambda x: x.astype(np.float64), stats)
    np.testing.assert_allclose(
        grad, _reference(loss, wide), rtol=2e-5, atol=1e-6
    )

  @parameterized.parameters(losses.GrpoClip(), losses.Gspo(low=0.1, high=0.1))
  def test_is_the_slope_of_the_published_objective(self, loss):
    stats, step = _stats(), 1e-6
    with jax.enable_x64(True):
      _, grad, _ = _value_and_grad(loss, stats)
    for i in map(tuple, np.argwhere(stats.mask > 0)):
      up, down = stats.logps.copy(), stats.logps.copy()
      up[i] += step
      down[i] -= step
      slope = _objective(loss, up, stats) - _objective(loss, down, stats)
      self.assertAlmostEqual(grad[i], slope / (2 * step), delta=1e-8)

  @parameterized.parameters(*_POLICY_LOSSES)
  def test_branches_are_all_taken(self, loss):
    # A reference that agrees because nothing was ever clipped proves nothing.
    *_, metrics = _value_and_grad(loss, _stats())
    if 'loss/capped' in metrics and loss.max_ratio < 5:
      self.assertBetween(float(metrics['loss/capped'].value()), 0.01, 0.99)
    elif not isinstance(loss, losses.Composer2):
      dropped = [metrics[f'loss/dropped_{s}'] for s in ('positive', 'negative')]
      self.assertBetween(sum(float(m.total) for m in dropped), 1, 100)
      self.assertGreater(min(float(m.count) for m in dropped), 1)

  @parameterized.product(
      loss=_LOSSES, poison=(np.nan, np.inf, -np.inf, 1e30, -1e4)
  )
  def test_what_is_masked_changes_no_bit(self, loss, poison):
    clean = _value_and_grad(loss, _stats(dtype=np.float32))
    dirty = _value_and_grad(loss, _stats(dtype=np.float32, poison=poison))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)

  @parameterized.parameters(*_POLICY_LOSSES)
  def test_scales_with_the_reward(self, loss):
    plain = dataclasses.replace(
        loss,
        **{
            f.name: 0.0
            for f in dataclasses.fields(loss)
            if f.name in ('drift', 'kl')
        },
    )
    stats = _stats()
    with jax.enable_x64(True):
      _, once, _ = _value_and_grad(plain, stats)
      thrice = stats.replace(advantages=3 * stats.advantages)
      _, grad, _ = _value_and_grad(plain, thrice)
      nothing = stats.replace(advantages=0 * stats.advantages)
      _, zero, _ = _value_and_grad(plain, nothing)
    np.testing.assert_allclose(grad, 3 * once, rtol=1e-12)
    self.assertFalse(zero.any())

  def test_extreme_ratios_stay_finite(self):
    stats = _stats(dtype=np.float32)
    stats = stats.replace(
        behaviour_logps=np.where(stats.mask > 0, -200.0, 0).astype(np.float32)
    )
    for loss in _LOSSES:
      value, grad, _ = _value_and_grad(loss, stats)
      self.assertTrue(np.isfinite(value) and np.isfinite(grad).all(), loss)


class RolloutSumTest(parameterized.TestCase):

  def test_sums_over_rows_with_any_numbering(self):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 9)).astype(np.float32)
    ids = rng.choice([0, 2, 3, 500_000], (5, 9)).astype(np.int32)
    got, count = jax.jit(losses.rollout_sums)(ids, x, np.ones_like(x))
    for i in np.unique(ids):
      np.testing.assert_allclose(got[ids == i], x[ids == i].sum(), rtol=1e-5)
      self.assertLen(np.unique(got[ids == i]), 1)  # one number, to the bit
      np.testing.assert_array_equal(count[ids == i], (ids == i).sum())


class KlInTheRewardTest(absltest.TestCase):
  """k1 against the exact reverse KL of a small autoregressive policy."""

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(3)
    self._vocab, self._length = 3, 3
    # One row of logits for every prefix of up to two tokens.
    prefixes = sum(self._vocab**t for t in range(self._length))
    self._theta, self._ref = rng.normal(size=(2, prefixes, self._vocab))
    self._paths = np.stack(
        np.unravel_index(
            np.arange(self._vocab**self._length), [self._vocab] * self._length
        ),
        axis=1,
    )
    rows = np.zeros_like(self._paths)
    for t in range(1, self._length):
      rows[:, t] = 1 + rows[:, t - 1] * self._vocab + self._paths[:, t - 1]
    self._rows = rows

  def _logps(self, theta):
    return jax.nn.log_softmax(theta)[self._rows, self._paths]

  def _expected_gradient(self, weigh):
    """Sum over every sequence of p * d weigh(logps of all sequences) [N T]."""
    p = np.exp(np.asarray(self._logps(self._theta)).sum(axis=1))

    def total(theta):
      return jnp.sum(weigh(self._logps(theta)) * p[:, None])

    return jax.jit(jax.grad(total))(self._theta)

  def _exact_gradient(self):
    ref = self._logps(self._ref)

    def kl(theta):
      logps = self._logps(theta)
      return jnp.sum(jnp.exp(logps.sum(axis=1)) * (logps - ref).sum(axis=1))

    return jax.grad(kl)(self._theta)

  def _composer2(self, rollouts):
    ref = self._logps(self._ref)

    def weigh(logps):
      zero = jnp.zeros_like(logps)
      stats = batch.TokenStats(
          logps=logps,
          behaviour_logps=logps,
          advantages=zero,
          entropy=zero,
          mask=jnp.ones_like(logps),
          staleness=jnp.zeros_like(logps, jnp.int32),
          rollouts=jnp.asarray(rollouts),
          ref_logps=ref,
      )
      return losses.Composer2(kl=0.7)(stats)[0]

    return self._expected_gradient(weigh)

  def test_expected_gradient_is_that_of_reverse_kl(self):
    n = len(self._paths)
    rollouts = np.repeat(np.arange(1, n + 1)[:, None], self._length, axis=1)
    with jax.enable_x64(True):
      exact = np.asarray(self._exact_gradient())
      got = np.asarray(self._composer2(rollouts))
    self.assertGreater(np.abs(exact).max(), 0.05)
    np.testing.assert_allclose(got, 0.7 * exact, rtol=0, atol=1e-12)

  def test_one_token_at_a_time_is_not_the_reverse_kl(self):
    # Negative control: every token its own "rollout".
    n = self._paths.size
    rollouts = np.arange(1, n + 1).reshape(-1, self._length)
    with jax.enable_x64(True):
      exact = np.asarray(self._exact_gradient())
      got = np.asarray(self._composer2(rollouts))
    self.assertGreater(np.abs(got - 0.7 * exact).max(), 0.01)

  def test_as_a_plain_loss_term_it_does_nothing(self):
    with jax.enable_x64(True):
      got = self._expected_gradient(
          lambda logps: logps - self._logps(self._ref)
      )
    np.testing.assert_allclose(got, 0, atol=1e-12)

  def test_needs_a_reference(self):
    stats = jax.tree.map(jnp.asarray, _stats(dtype=np.float32))
    stats = stats.replace(ref_logps=None)
    losses.Composer2()(stats)
    with self.assertRaisesRegex(ValueError, 'ref_logps'):
      losses.Composer2(kl=0.1)(stats)


_GROUP = {1: 0.9, 2: -0.6, 3: -0.3}


def _rollouts(split):
  """Three rollouts over unique tokens: whole, or cut with repeated context."""
  made, first = [], 0
  for number, advantage in _GROUP.items():
    tokens = np.arange(first, first + 20, dtype=np.int32)
    first += 20
    sampled = np.arange(20) % 7 > 1
    cuts = [(0, 20)] if not split else [(0, 11), (6, 16), (14, 20)]
    done = 0  # tokens before this were trained in an earlier segment
    for start, end in cuts:
      here = np.arange(start, end)
      fresh = sampled[here] & (here >= done)
      fresh[0] = False  # nothing precedes it in its segment
      done = end
      n = end - start
      made.append(
          items.Item(
              number,
              trace.TokenTrace(
                  tokens[here],
                  fresh,
                  np.where(fresh, -1.0, 0.0).astype(np.float32),
                  np.zeros(n, np.int32),
              ),
              advantage,
          )
      )
  return made


class LayoutTest(parameterized.TestCase):
  """The gradient of a table of log-probs, one entry per token of the data."""

  def _gradient(self, loss, *parts):
    rng = np.random.default_rng(5)
    mu = -rng.exponential(1.0, 60)
    table = mu + rng.normal(0, 0.4, 60)
    ref = mu + rng.normal(0, 0.4, 60)
    total, metrics = np.zeros(60), None
    for part in parts:
      b, _ = packing.pack(part, packing.Shape(*_SHAPE, 4), now=0)
      stats = batch.TokenStats(
          logps=table[b.tokens],
          behaviour_logps=mu[b.tokens],
          advantages=b.advantages.astype(np.float64),
          entropy=np.zeros(b.tokens.shape),
          mask=b.sampled.astype(np.float64),
          staleness=b.staleness,
          rollouts=b.rollouts,
          ref_logps=ref[b.tokens],
      )
      with jax.enable_x64(True):
        _, grad, m = _value_and_grad(loss, stats)
      np.add.at(total, b.tokens, grad)
      metrics = m if metrics is None else batch.merge(metrics, m)
    values = {
        k: float(m.peak if isinstance(m, batch.Max) else m.total / m.count)
        for k, m in metrics.items()
    }
    return total, values

  def _assert_same(self, got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-12)
    self.assertEqual(set(got[1]), set(want[1]))
    for name, value in want[1].items():
      self.assertAlmostEqual(got[1][name], value, delta=1e-6, msg=name)

  @parameterized.parameters(*_LOSSES)
  def test_ignores_packing_order_and_segment_split(self, loss):
    want = self._gradient(loss, _rollouts(False))
    self.assertTrue(want[0].any())
    for segments in (
        _rollouts(False)[::-1],
        _rollouts(True),
        _rollouts(True)[::-1],
    ):
      self._assert_same(self._gradient(loss, segments), want)

  @parameterized.parameters(*_LOSSES)
  def test_ignores_micro_batches(self, loss):
    segments = _rollouts(True)
    parts = [[i for i in segments if (i.rollout == 2) == m] for m in (0, 1)]
    split = self._gradient(loss, *parts)
    want = self._gradient(loss, segments)
    if isinstance(loss, losses.M2po):  # documented: its moment is per call
      self.assertFalse(np.allclose(split[0], want[0]))
    else:
      self._assert_same(split, want)


class StaleDataTest(absltest.TestCase):
  """Many updates on one old batch: where a trust region earns its name."""

  def _train(self, loss):
    """(KL(behaviour || policy), entropy before, entropy after), nats."""
    contexts, actions, group = 8, 12, 16
    rng = np.random.default_rng(0)
    start = rng.normal(size=(contexts, actions)).astype(np.float32)
    p = np.exp(start) / np.exp(start).sum(axis=1, keepdims=True)
    drawn = (rng.random((contexts, group, 1)) > np.cumsum(p, 1)[:, None]).sum(2)
    drawn = np.minimum(drawn, actions - 1)
    reward = (rng.random((contexts, group)) < 0.4).astype(np.float32)
    rows = np.arange(contexts)[:, None]
    old = jnp.log(p)
    ones = jnp.ones((contexts, group))
    stats = batch.TokenStats(
        logps=ones,
        behaviour_logps=old[rows, drawn],
        advantages=jnp.asarray(reward - reward.mean(axis=1, keepdims=True)),
        entropy=0 * ones,
        mask=ones,
        staleness=jnp.zeros((contexts, group), jnp.int32),
        rollouts=jnp.arange(ones.size).reshape(ones.shape),
    )

    def objective(theta):
      logps = jax.nn.log_softmax(theta)[rows, drawn]
      return jnp.mean(loss(stats.replace(logps=logps))[0])

    def update(carry, _):
      theta, moment = carry
      moment = 0.9 * moment + 0.1 * jax.grad(objective)(theta)
      return (theta - 0.05 * jnp.sign(moment), moment), None

    def entropy(logps):
      return -float(jnp.mean(jnp.sum(jnp.exp(logps) * logps, axis=1)))

    run = jax.jit(
        lambda theta: jax.lax.scan(update, (theta, 0 * theta), length=300)[0]
    )
    new = jax.nn.log_softmax(run(jnp.asarray(start))[0])
    kl = float(jnp.mean(jnp.sum(jnp.exp(old) * (old - new), axis=1)))
    return kl, entropy(old), entropy(new)

  def test_the_default_holds_where_plain_importance_weights_collapse(self):
    kl, before, after = self._train(losses.DppoTv())
    free = losses.IcePop(low=0.0, high=math.inf)  # keeps every token
    kl_free, _, after_free = self._train(free)
    self.assertGreater(kl_free, 3 * kl)
    self.assertLess(after_free, 0.1 * before)
    self.assertGreater(after, 0.4 * before)


class MetricsTest(absltest.TestCase):

  def test_a_maximum_is_never_averaged(self):
    low = batch.Max.of(jnp.array([[1.0, 9.0]]), jnp.array([[1.0, 0.0]]))
    high = batch.Max.of(jnp.array([[5.0, 2.0]]), jnp.array([[1.0, 1.0]]))
    merged = batch.merge({'mean_of_names': low}, {'mean_of_names': high})
    self.assertEqual(float(merged['mean_of_names'].value()), 5.0)

  def test_a_mean_weighs_micro_batches_by_tokens(self):
    one = batch.Mean.of(jnp.array([[4.0, np.nan]]), jnp.array([[1.0, 0.0]]))
    many = batch.Mean.of(jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 1.0]]))
    merged = batch.merge({'x_max': one}, {'x_max': many})
    self.assertAlmostEqual(float(merged['x_max'].value()), 7 / 3, places=6)

  def test_a_rebuilt_loss_is_the_same_jit_key(self):
    traced = []

    def run(loss, stats):
      traced.append(loss)
      return loss(stats)[0]

    jitted = jax.jit(run, static_argnums=0)
    stats = _stats(dtype=np.float32)
    for width in (0.2, 0.2, 0.3):
      jitted(losses.DppoTv(width=width), stats)
    self.assertLen(traced, 2)


if __name__ == '__main__':
  absltest.main()
