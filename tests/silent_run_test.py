"""A run that learns nothing says so."""

import json
import pathlib

from absl.testing import absltest
from tests import small_run

from composer_jax import trace


class SilentRunTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'

  def _records(self):
    lines = (self.workdir / 'metrics.jsonl').read_text().splitlines()
    return [r for r in map(json.loads, lines) if r['phase'] == 'rl']

  def test_replies_of_one_token_teach_nothing(self):
    done = small_run.run(
        'rl',
        self.workdir,
        *('harness.max_turn_tokens=1', 'rl.steps=3'),
        config='tests.silent_config',
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    last = [r for r in self._records() if r['step'] == 3]
    raised = {k for r in last for k in r if k.startswith('alarm/')}
    want = {'alarm/no_signal', 'alarm/all_invalid', 'alarm/all_truncated'}
    self.assertEqual(raised, want)
    self.assertRegex(done.stdout, r'alarms no_signal, all_invalid, all_trunc')
    # Nothing was compared, so there is no mismatch to be shown.
    self.assertRegex(done.stdout, r'step 3/3 \|.* mismatch - \|')
    for step in range(3):
      kept = [*(self.workdir / f'trajectories/{step:06d}').glob('*.traj')]
      self.assertNotEmpty(kept)
      for path in kept:
        trajectory = trace.from_bytes(path.read_bytes())
        self.assertEqual(trajectory.reward, 0.0)
    shown = small_run.finished(
        [
            *small_run.command('inspect', '')[:3],
            'run',
            f'--workdir={self.workdir}',
        ]
    )
    self.assertIn('alarm: every turn was cut', shown.stdout)


if __name__ == '__main__':
  absltest.main()
