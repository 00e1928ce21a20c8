"""The dry runs of large published models, within minutes and gigabytes."""

import pathlib
import resource
import subprocess
import sys
import time

from absl.testing import absltest
from absl.testing import parameterized


class DryRunTest(parameterized.TestCase):

  @parameterized.parameters('qwen3_30b_a3b', 'kimi_k2')
  def test_fits_this_machine(self, name):
    began = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, '-m', 'experiments.rl', f'--config={name}'),
            *('--workdir=/nowhere', '--dry_run'),
        ],
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertLess(time.monotonic() - began, 180)
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    self.assertLess(most, 4 << 20)  # KiB
    for row in (
        'activations and copies',
        'all-gather, fsdp',
        'GFLOP per token',
    ):
      self.assertIn(row, done.stdout)


if __name__ == '__main__':
  absltest.main()
