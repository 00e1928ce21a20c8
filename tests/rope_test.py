"""Frequencies of longer windows: fast pairs stay, slow ones slow down."""

import dataclasses
import math

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from composer_jax import config
from composer_jax import config_text
from composer_jax import rope

_THETA, _DIMS = 10_000.0, 64
_YARN = rope.Yarn(factor=8.0, original_tokens=4096)
_LLAMA = rope.Llama3(factor=8.0, original_tokens=4096)


def _turns(frequencies):
  """Of each pair in the original window."""
  return np.array(frequencies) * 4096 / (2 * math.pi)


class RopeTest(parameterized.TestCase):

  @parameterized.parameters((_YARN, 1.0, 32.0), (_LLAMA, 1.0, 4.0))
  def test_between_the_two_bounds_it_is_a_mixture(self, scaling, slow, fast):
    plain = np.array(rope.frequencies(_THETA, _DIMS))
    got = np.array(scaling.frequencies(_THETA, _DIMS))
    self.assertLen(got, _DIMS // 2)
    turns, share = _turns(plain), got / plain
    # YaRN's bounds are rounded to whole pairs, away from each other.
    step = plain[0] / plain[1]
    np.testing.assert_allclose(share[turns > fast * step], 1.0)
    np.testing.assert_allclose(share[turns < slow / step], 1 / 8)
    inside = share[(turns < fast / step) & (turns > slow * step)]
    self.assertGreater(inside.size, 1)
    self.assertTrue(np.all((inside > 1 / 8) & (inside < 1)))
    self.assertTrue(np.all(np.diff(share) <= 1e-12))

  def test_yarn_amplitudes(self):
    log = math.log(8.0)
    self.assertAlmostEqual(_YARN.amplitude, 0.1 * log + 1)
    self.assertEqual(_YARN.score_scale, 1.0)
    both = dataclasses.replace(_YARN, mscale=1.0, mscale_all_dim=0.5)
    self.assertAlmostEqual(both.amplitude, (0.1 * log + 1) / (0.05 * log + 1))
    self.assertAlmostEqual(both.score_scale, (0.05 * log + 1) ** 2)
    own = dataclasses.replace(both, attention_factor=1.5)
    self.assertEqual(own.amplitude, 1.5)

  @parameterized.parameters(
      (_YARN, dict(factor=0.5), 'Yarn.factor=0.5: must be at least 1'),
      (_YARN, dict(original_tokens=0), 'Yarn.original_tokens=0'),
      (_YARN, dict(beta_slow=40.0), 'beta_slow=40.0: .*beta_fast=32.0'),
      (_YARN, dict(mscale=-1.0), 'mscale=-1.0'),
      (_LLAMA, dict(factor=0.0), 'Llama3.factor=0.0'),
      (_LLAMA, dict(low_freq_factor=4.0), 'below high_freq_factor=4.0'),
  )
  def test_refuses(self, scaling, changes, text):
    with self.assertRaisesRegex(ValueError, text):
      dataclasses.replace(scaling, **changes)

  def test_text_form(self):
    cfg = config.ModelConfig(rope_scaling=_YARN)
    changed = config_text.override(cfg, 'rope_scaling.factor=4')
    self.assertEqual(changed.rope_scaling.factor, 4.0)
    self.assertEqual(config_text.from_json(config_text.to_json(cfg)), cfg)


if __name__ == '__main__':
  absltest.main()
