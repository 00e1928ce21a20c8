"""A run that breaks the bit contract says so, and ends if it shall."""

import json
import pathlib

from absl.testing import absltest
from tests import small_run


class MismatchTest(absltest.TestCase):

  def test_a_mismatch_ends_the_run_if_it_shall(self):
    workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'
    # A split over `tensor` sums in another order than the decoder does.
    edits = ('mesh.data=1', 'mesh.tensor=2', 'rl.max_staleness_versions=0')
    edits += ('rl.steps=2', 'model.kv_heads=2')
    done = small_run.run('rl', workdir, *edits, 'rl.stop_on_mismatch=true')
    self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
    self.assertRegex(
        done.stderr, r'rl: error: step 1: with equal weights, log-probs of'
    )
    self.assertLen({r['step'] for r in self._records(workdir)}, 1)
    again = small_run.run('rl', workdir, *edits, 'rl.stop_on_mismatch=false')
    self.assertEqual(again.returncode, 0, again.stderr)
    self.assertIn('alarms mismatch', again.stdout)
    last = [r for r in self._records(workdir) if r['step'] == 2]
    self.assertTrue(any('alarm/mismatch' in r for r in last))

  def _records(self, workdir):
    lines = (workdir / 'metrics.jsonl').read_text().splitlines()
    return [r for r in map(json.loads, lines) if r['phase'] == 'rl']


if __name__ == '__main__':
  absltest.main()
