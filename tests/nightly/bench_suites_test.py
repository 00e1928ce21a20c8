"""What of the benchmark takes long: many shapes to compile, fresh processes."""

from absl.testing import absltest
import jax

from experiments.bench_suites import decode
from experiments.bench_suites import gpu_checks
from experiments.bench_suites import gpu_times
from experiments.bench_suites import kernels
from experiments.bench_suites import mixtral
from experiments.bench_suites import paired
from tests import small_sizes


class DecodeSuiteTest(absltest.TestCase):

  def test_every_figure(self):
    out = decode.run(
        pairs=1,
        cfg=small_sizes.MODEL,
        batches=(3,),
        prompt_tokens=8,
        new_tokens=24,
        group=6,
        arrivals=5,
    )
    r = out[0]
    self.assertEqual(r.name, 'decode batch 3')
    self.assertGreater(r.ours[0], 0)
    self.assertEqual(bool(r.peer), mixtral.installed())
    figures = {f.name: f.value for f in out[1:]}
    self.assertLen(figures, 8)
    self.assertEqual(figures.pop('requests aborted by swaps'), 0)
    self.assertGreater(min(figures.values()), 0)


class KernelSuiteTest(absltest.TestCase):

  def test_bits_are_equal(self):
    found = gpu_checks.bits(small_sizes.SIZES, 'reference', repeats=1)
    self.assertEqual([f.value for f in found], [0] * 4)

  def test_experts_are_timed_against_both_peers(self):
    ragged, dense = kernels.experts(small_sizes.MODEL, 16, pairs=1)
    self.assertEqual(
        (ragged.peer_name, dense.peer_name), ('lax.ragged_dot', 'dense')
    )

  def test_compile_seconds_are_not_those_of_the_cache(self):
    first, second = (
        kernels.compile_seconds(small_sizes.MODEL, 32).value for _ in range(2)
    )
    self.assertGreater(second, 0.1 * first)
    self.assertTrue(jax.config.jax_enable_compilation_cache)

  def test_a_fresh_process_has_the_same_digest(self):
    figure = gpu_checks.fresh_processes(small_sizes.SIZES, processes=1)
    self.assertEqual(figure.value, 0)

  def test_rates_of_every_kernel(self):
    found = gpu_times.times(
        small_sizes.SIZES, pairs=1, implementation='reference'
    )
    results = [r for r in found if isinstance(r, paired.Result)]
    self.assertLen(found, 2 * len(results))
    for r in results:
      self.assertGreater(min(r.ours), 0)
      self.assertGreater(min(r.peer), 0)


if __name__ == '__main__':
  absltest.main()
