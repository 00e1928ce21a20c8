"""Sampling follows the distribution and depends on (seed, position) only."""

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.rollout import sampling
from composer_jax.rollout import slots

_VOCAB = 61  # odd: no vector width divides it
_SAMPLE = jax.jit(sampling.sample)


def _random_logps(rows, seed=0):
  logits = np.random.default_rng(seed).normal(size=(rows, _VOCAB)) * 2
  return np.asarray(jax.nn.log_softmax(jnp.float32(logits)))


def _sample(logps, seeds, positions, temperatures=None):
  n = logps.shape[0]
  temperatures = np.ones(n) if temperatures is None else temperatures
  out = _SAMPLE(
      jnp.asarray(logps),
      np.broadcast_to(seeds, n).astype(np.uint32),
      np.broadcast_to(positions, n).astype(np.int32),
      np.broadcast_to(temperatures, n).astype(np.float32),
  )
  return tuple(np.asarray(x) for x in out)


def _chi_square(tokens, probs):
  """Pearson's statistic in standard deviations above its mean."""
  expected = probs * tokens.size
  keep = expected >= 5
  observed = np.bincount(tokens, minlength=probs.size)
  cells = np.append(observed[keep], observed[~keep].sum())
  want = np.append(expected[keep], expected[~keep].sum())
  cells, want = cells[want > 0], want[want > 0]
  freedom = cells.size - 1
  return (np.sum((cells - want) ** 2 / want) - freedom) / np.sqrt(2 * freedom)


_SHAPE = jax.jit(sampling.shape)


def _shaped(logps, *, counts=None, prompted=None, temperature=1.0, **fields):
  zeros = np.zeros(logps.shape, np.int32)
  row = np.array(slots.Shaping(**fields), np.float32)
  out = _SHAPE(
      logps,
      zeros if counts is None else counts,
      zeros > 0 if prompted is None else prompted,
      np.full(len(logps), temperature, np.float32),
      np.tile(row, (len(logps), 1)),
  )
  return np.asarray(out)


class ShapeTest(parameterized.TestCase):

  @parameterized.parameters(
      {'top_k': 7},
      {'top_p': 0.6},
      {'min_p': 0.2},
      {'top_p': 0.9, 'top_k': 5, 'min_p': 0.05, 'temperature': 0.7},
      {},
  )
  def test_cuts(self, temperature=1.0, **fields):
    logps = _random_logps(9)
    shaped = _shaped(logps, temperature=temperature, **fields)
    want = slots.Shaping(**fields)
    for row, got in zip(logps, shaped, strict=True):
      probs = np.exp(row.astype(np.float64) / temperature)
      probs /= probs.sum()
      order, kept, mass = np.argsort(-probs), set(), 0.0
      for rank, i in enumerate(order):
        if mass < want.top_p and (not want.top_k or rank < want.top_k):
          if probs[i] >= want.min_p * probs.max():
            kept.add(int(i))
        mass += probs[i]
      self.assertEqual(set(np.flatnonzero(np.isfinite(got))), kept)
      self.assertEqual(got[[*kept]].tobytes(), row[[*kept]].tobytes())

  def test_penalties(self):
    logps = _random_logps(1)
    counts = np.zeros(logps.shape, np.int32)
    counts[0, 3], counts[0, 4] = 1, 3
    prompted = np.zeros(logps.shape, bool)
    prompted[0, 4:6] = True
    got = _shaped(
        logps,
        counts=counts,
        prompted=prompted,
        frequency=0.5,
        presence=0.25,
        repetition=1.5,
    )
    want = logps.copy()
    want[0, 3:6] *= 1.5
    want[0, 3] -= 0.75
    want[0, 4] -= 1.75
    np.testing.assert_allclose(got, want, rtol=1e-5)


class SamplingTest(parameterized.TestCase):

  @parameterized.parameters(
      ('seeds', 1.0), ('positions', 1.0), ('seeds', 0.5), ('seeds', 2.0)
  )
  def test_frequencies_match_probabilities(self, varied, temperature):
    n = 20_000
    logps = np.repeat(_random_logps(1, seed=3), n, axis=0)
    counts = np.arange(n)
    seeds, positions = (counts, 7) if varied == 'seeds' else (11, counts)
    tokens, _ = _sample(logps, seeds, positions, temperature)
    probs = np.exp(logps[0].astype(np.float64) / temperature)
    probs /= probs.sum()
    self.assertLess(abs(_chi_square(tokens, probs)), 5.0)
    # The check has power: the neighbouring temperature is refused.
    wrong = np.exp(logps[0].astype(np.float64) / (temperature * 1.15))
    self.assertGreater(_chi_square(tokens, wrong / wrong.sum()), 5.0)

  def test_neighbouring_draws_are_independent(self):
    n = 20_000
    logps = np.full((2 * n, 4), np.log(0.25), np.float32)
    seeds = np.repeat(np.arange(n), 2)
    positions = np.tile([5, 6], n)
    tokens = _sample(logps, seeds, positions)[0].reshape(n, 2)
    pairs = tokens[:, 0] * 4 + tokens[:, 1]
    self.assertLess(abs(_chi_square(pairs, np.full(16, 1 / 16))), 5.0)

  @hypothesis.settings(deadline=None, max_examples=15)
  @hypothesis.given(st.sampled_from([1, 3, 16, 17, 40]), st.integers(0, 99))
  def test_bits_do_not_depend_on_batch_or_slot(self, n, seed):
    rng = np.random.default_rng(seed)
    logps = _random_logps(64, seed)
    seeds = rng.integers(0, 2**32, 64)
    positions = rng.integers(0, 1000, 64)
    temperatures = rng.choice([0.0, 0.7, 1.0], 64)
    whole = _sample(logps, seeds, positions, temperatures)
    pick = rng.permutation(64)[:n]
    part = _sample(
        logps[pick], seeds[pick], positions[pick], temperatures[pick]
    )
    for all_rows, some in zip(whole, part, strict=True):
      self.assertEqual(all_rows[pick].tobytes(), some.tobytes())

  @parameterized.parameters(0.0, 0.5, 1.0)
  def test_logp_is_the_models_own(self, temperature):
    logps = _random_logps(33)
    tokens, picked = _sample(logps, np.arange(33), 4, temperature)
    self.assertEqual(picked.tobytes(), logps[np.arange(33), tokens].tobytes())

  def test_temperature_zero_takes_the_lowest_of_the_likeliest(self):
    logps = np.array(_random_logps(20))
    peak = logps.max(axis=1) + 1
    logps[np.arange(20), 50] = logps[np.arange(20), 9] = peak
    tokens, _ = _sample(logps, np.arange(20), np.arange(20), 0.0)
    np.testing.assert_array_equal(tokens, 9)

  def test_impossible_tokens_are_never_drawn(self):
    logps = np.full((4000, _VOCAB), -np.inf, np.float32)
    logps[:, [2, 5]] = np.log([0.999, 0.001])
    tokens, _ = _sample(logps, np.arange(4000), 0)
    self.assertContainsSubset(np.unique(tokens), [2, 5])

  def test_seeds_and_positions_change_the_draw(self):
    logps = np.repeat(np.full((1, _VOCAB), -np.log(_VOCAB)), 200, 0)
    logps = logps.astype(np.float32)
    base, _ = _sample(logps, np.arange(200), 3)
    for seeds, positions in ((np.arange(200) + 2**31, 3), (np.arange(200), 4)):
      self.assertLess(np.mean(base == _sample(logps, seeds, positions)[0]), 0.1)


if __name__ == '__main__':
  absltest.main()
