"""The kernel suite counts what it says; its GPU script runs small anywhere."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from experiments.bench_suites import gpu_checks
from experiments.bench_suites import gpu_times
from experiments.bench_suites import kernels
from experiments.bench_suites import paired
from experiments.bench_suites import plain_ops
from kernels_triton import grouped

_MODEL = config.ModelConfig(
    vocab=96,
    layers=1,
    embed=32,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    experts=4,
    top_k=2,
    moe_ffn=16,
)
_SIZES = gpu_checks.Sizes(
    _MODEL,
    tokens=128,
    row=64,
    sequences=2,
    context=64,
    words=5000,
    checked=32,
)


class CpuTest(parameterized.TestCase):

  def test_contract_against_plain_ops(self):
    r = kernels.cost_of_contract(_MODEL, 2, 32, pairs=1)
    self.assertEqual(r.peer_name, 'plain ops')
    self.assertGreater(min(r.ours + r.peer), 0)

  @parameterized.parameters('float32', 'bfloat16')
  def test_plain_ops_are_the_same_model(self, dtype):
    cfg = dataclasses.replace(_MODEL, dtype=dtype)
    ours, plain = (
        kernels.Trainer(cfg, 2, 32, plain=plain) for plain in (False, True)
    )
    tolerance = 1e-5 if dtype == 'float32' else 2e-2
    pairs = map(jax.tree.leaves, (ours.run(2), plain.run(2)))
    for a, b in zip(*pairs, strict=True):
      a, b = np.asarray(a), np.asarray(b)
      np.testing.assert_allclose(a, b, atol=tolerance)

  def test_experts_agree(self):
    for r in kernels.experts(_MODEL, 16, pairs=1):
      self.assertGreater(min(r.ours + r.peer), 0)
    x, gates, chosen, w_in, w_out = gpu_checks.expert_operands(_SIZES, 24)
    want = grouped.expert_ffn(x, gates, chosen, w_in, w_out)
    for peer in (plain_ops.dense_experts, plain_ops.ragged_experts):
      got = peer(x, gates, chosen, w_in, w_out)
      np.testing.assert_allclose(got, want, atol=1e-5)

  def test_compile_seconds_are_not_those_of_the_cache(self):
    f = kernels.compile_seconds(_MODEL, 32)
    self.assertGreater(f.value, 0.1)
    self.assertTrue(jax.config.jax_enable_compilation_cache)


class GpuScriptTest(parameterized.TestCase):

  def test_bits_are_equal(self):
    found = gpu_checks.bits(_SIZES, 'reference', repeats=1)
    self.assertEqual([f.value for f in found], [0] * 4)

  def test_a_difference_is_counted(self):
    self.assertEqual(
        gpu_checks.differing(jnp.zeros(3), jnp.asarray([0, -0.0, 1])), 2
    )

  @parameterized.parameters('float32', 'bfloat16')
  def test_errors_are_small(self, dtype):
    for figure in gpu_checks.errors(_SIZES, dtype, 'reference'):
      self.assertIn(': ok', str(figure))
      self.assertGreater(figure.value, 0)

  def test_times(self):
    found = gpu_times.times(_SIZES, pairs=1, implementation='reference')
    results = [r for r in found if isinstance(r, paired.Result)]
    self.assertLen(found, 2 * len(results))
    for r in results:
      self.assertGreater(min(r.ours), 0)
      self.assertEqual(bool(r.peer), 'delta' not in r.name)


if __name__ == '__main__':
  absltest.main()
