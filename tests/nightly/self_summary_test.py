"""Self-summary at length: it is learned, audited and replayed."""

import json
import pathlib

from absl.testing import absltest
from tests import small_run

_SMALL = 'tests.summary_config'


class SummaryTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def _success(self, name, steps, *edits):
    """Held-out success after so many steps of the shipped experiment."""
    workdir = self.folder / name
    edits += (
        f'rl.steps={steps}',
        f'rl.eval_every_steps={steps}',
        'evaluation.tasks=96',
    )
    done = small_run.run('rl', workdir, *edits, config='summary')
    self.assertEqual(done.returncode, 0, done.stderr)
    lines = (workdir / 'metrics.jsonl').read_text().splitlines()
    evals = [r for r in map(json.loads, lines) if r['phase'] == 'eval']
    self.assertEqual([r['step'] for r in evals], [0, steps])
    return evals[-1]['eval/pass1_sampled']

  def test_only_a_trained_summary_carries_the_fact(self):
    # How fast it is learned depends on the seed, and on the order in which
    # rollouts arrive: 20 steps were enough for one run, 40 for all seen.
    trained = self._success('trained', 48)
    masked = self._success('masked', 24, 'harness.train_summaries=false')
    self.assertLess(masked, 0.2)
    self.assertGreater(trained, masked + 0.15)

  def test_segments_are_audited_shown_and_replayed(self):
    workdir = self.folder / 'small'
    done = small_run.run('quickstart', workdir, config=_SMALL)
    self.assertEqual(done.returncode, 0, done.stderr)
    audit = json.loads((workdir / 'summary.json').read_text())['audit']
    self.assertGreater(audit['tokens'], 500)
    self.assertEqual(audit['max_abs_dlogp'], 0.0)
    self.assertEqual(audit['routing_differences'], 0)
    self.assertIn('Context of a rollout', (workdir / 'report.html').read_text())
    done = small_run.replay(workdir)
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn('first difference: none', done.stdout)


if __name__ == '__main__':
  absltest.main()
