"""The delta suite counts what it says, and its exact bars hold."""

from absl.testing import absltest
import numpy as np
from tests import plots_text

from experiments.bench_suites import delta
from experiments.bench_suites import masters
from experiments.bench_suites import paired


class WeightsSuiteTest(absltest.TestCase):

  def test_bars_hold_at_one_percent_changed(self):
    versions = masters.simulate(1e-6, 1 << 21)
    pair = next(versions), next(versions)
    found = delta.sizes_of('x', pair, strict=True)
    found += delta.slice_of(pair)
    by_name = {f.name: f for f in found}
    self.assertBetween(by_name['x changed'].value, 0.9, 1.3)
    self.assertEqual(by_name['x int32+bf16 per change'].value, 48)
    self.assertGreater(sum(f.least is not None for f in found), 4)
    self.assertEmpty([str(f) for f in found if 'MISSED' in str(f)])

  def test_masters_keep_their_scale(self):
    versions = masters.simulate(1e-5, 1 << 16)
    first = next(versions).astype(np.uint32) << 16
    self.assertBetween(float(first.view(np.float32).std()), 0.015, 0.03)
    self.assertGreater((next(versions) != next(versions)).mean(), 0.05)

  def test_figures_say_what_was_missed(self):
    self.assertIn('MISSED', str(paired.Figure('x', 1.0, '', least=2.0)))
    self.assertIn('ok', str(paired.Figure('x', 1.0, '', most=2.0)))

  def test_plot(self):
    results = [
        paired.Figure(f'lr {rate:g} {label} ratio', 100 / (i + 1), 'x')
        for i, rate in enumerate((1e-7, 1e-6, 3e-6, 1e-5))
        for label in ('F', 'E', 'D2', 'xor+zstd1', 'int32+bf16')
    ]
    drawn = plots_text.of(lambda path: delta.plot(path, results))
    self.assertContainsSubset({'PULSE 130', '1e-06', 'E', 'int32+bf16'}, drawn)


if __name__ == '__main__':
  absltest.main()
