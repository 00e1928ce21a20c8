"""The kernel suite compares like with like, and counts what differs."""

import contextlib
import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench_suites import gpu_checks
from experiments.bench_suites import kernels
from experiments.bench_suites import plain_ops
from kernels_triton import grouped
from tests import fresh
from tests import small_sizes

_SIZES = small_sizes.SIZES


class CpuTest(parameterized.TestCase):

  def test_contract_against_plain_ops(self):
    r = kernels.cost_of_contract(small_sizes.MODEL, 2, 32, pairs=1)
    self.assertEqual(r.peer_name, 'plain ops')
    self.assertGreater(min(r.ours + r.peer), 0)

  def test_plain_ops_are_the_same_model(self):
    cfg = dataclasses.replace(small_sizes.MODEL, layers=2)
    params = fresh.params(cfg)
    tokens = jnp.arange(64, dtype=jnp.int32).reshape(2, 32)
    found = []
    for context in (contextlib.nullcontext(), plain_ops.replaced()):
      # A new function each time: jax remembers what it traced.
      score = jax.jit(lambda *args: gpu_checks.score(*args, cfg))
      with context:
        program = str(score.trace(params, tokens).jaxpr)
        found.append((score(params, tokens), program))
    (ours, program), (plain, plain_program) = found
    np.testing.assert_allclose(ours[0], plain[0], atol=1e-5)
    np.testing.assert_array_equal(ours[1], plain[1])
    # Only the experts' tiles are left of the blocks.
    self.assertGreater(program.count('scan['), plain_program.count('scan['))

  def test_experts_agree(self):
    x, gates, chosen, w_in, w_out = gpu_checks.expert_operands(_SIZES, 24)
    want = grouped.expert_ffn(x, gates, chosen, w_in, w_out)
    for peer in (plain_ops.dense_experts, plain_ops.ragged_experts):
      got = peer(x, gates, chosen, w_in, w_out)
      np.testing.assert_allclose(got, want, atol=1e-5)


class GpuScriptTest(parameterized.TestCase):

  def test_a_difference_is_counted(self):
    zeros, other = jnp.zeros(3), jnp.asarray([0, -0.0, 1])
    self.assertEqual(gpu_checks.differing(zeros, other), 2)

  def test_errors_are_small(self):
    found = gpu_checks.errors(_SIZES, 'float32', 'reference')
    self.assertLen(found, 3)
    for figure in found:
      self.assertIn(': ok', str(figure))
      self.assertGreater(figure.value, 0)


if __name__ == '__main__':
  absltest.main()
