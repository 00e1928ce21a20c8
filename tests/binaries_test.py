"""The binaries as a user meets them: own loss, wrong input, Ctrl-C."""

import json
import pathlib
import signal
import subprocess
import textwrap
import time

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tests import small_run

_SOFT_CLIP = textwrap.dedent("""
    import dataclasses
    from jax import lax
    import jax.numpy as jnp
    from composer_jax.learner.batch import Mean
    from tests import small_config

    @dataclasses.dataclass(frozen=True)
    class SoftClip:
      width: float = 0.3
      def __call__(self, s):
        w = jnp.exp(-jnp.square((s.logps - s.behaviour_logps) / self.width))
        return -lax.stop_gradient(w) * s.advantages * s.logps, {'soft_clip/weight': Mean.of(w, s.mask)}

    def experiment(): return dataclasses.replace(small_config.experiment(), loss=SoftClip())
""")


def _records(workdir, phase):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  records = map(json.loads, lines)
  return [r for r in records if r['phase'] == phase]


class OwnLossTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def _run(self, source, *edits):
    (self.folder / 'mine.py').write_text(source)
    return small_run.run(
        'rl',
        self.folder / 'run',
        *edits,
        config=str(self.folder / 'mine.py'),
    )

  def test_loss_of_a_wrong_shape_is_one_line(self):
    source = _SOFT_CLIP.replace('* s.logps, {', '* s.logps[:, 0], {')
    source = source.replace('* s.advantages', '* s.advantages[:, 0]')
    source = source.replace('lax.stop_gradient(w)', 'w[:, 0]')
    done = self._run(source)
    self.assertEqual(done.returncode, 2, done.stderr)
    self.assertIn('SoftClip returned shape', done.stderr.splitlines()[-1])

  def test_nan_saves_the_offending_batch(self):
    source = _SOFT_CLIP.replace('* s.logps, {', '* s.logps * jnp.nan, {')
    done = self._run(source)
    self.assertEqual(done.returncode, 2, done.stderr)
    last = done.stderr.splitlines()[-1]
    self.assertIn('nan', last)
    (path,) = (self.folder / 'run').glob('offending_batch_*.npz')
    self.assertIn(path.name, last)
    self.assertTrue(np.load(path)['sampled'].any())


class WrongInputTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ('field', ['--set=rl.stepz=3'], "did you mean 'steps'"),
      ('type', ['--set=rl.steps=many'], 'rl.steps'),
      ('flag', ['--wrkdir=/x'], 'wrkdir'),
      ('config', ['--config=tyny'], "did you mean 'tiny'"),
      ('corpus', ['--set=corpus.path=/nowhere'], '/nowhere'),
      ('mesh', ['--set=mesh.data=64'], 'mesh.data'),
      ('row', ['--set=phases.warmup.tokens_per_row=100'], 'multiple of 32'),
      ('window', ['--set=harness.max_context_tokens=300'], 'at least'),
  )
  def test_one_line_and_exit_code_2(self, extra, part):
    workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'
    done = subprocess.run(
        [*small_run.command('quickstart', workdir), *extra],
        capture_output=True,
        text=True,
        cwd=small_run.ROOT,
        env=small_run.environment(),
        check=False,
    )
    self.assertEqual(done.returncode, 2, done.stderr)
    self.assertLen(done.stderr.strip().splitlines(), 1)
    self.assertIn(part, done.stderr)

  def test_directory_of_something_else_is_refused(self):
    workdir = self.create_tempdir()
    workdir.create_file('thesis.tex', 'mine')
    done = small_run.run('quickstart', workdir.full_path)
    self.assertEqual(done.returncode, 2)
    self.assertIn('thesis.tex', done.stderr)

  def test_dry_run_prints_the_plan_and_touches_nothing(self):
    workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'
    done = subprocess.run(
        [*small_run.command('quickstart', workdir), '--dry_run'],
        capture_output=True,
        text=True,
        cwd=small_run.ROOT,
        env=small_run.environment(),
        check=True,
    )
    self.assertIn('2 prompts x 4 rollouts = 8 rollouts', done.stdout)
    self.assertFalse(workdir.exists())


class QuickstartTest(absltest.TestCase):

  def test_run_that_could_learn_nothing_still_sums_up(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / 'hopeless.py').write_text(
        'import dataclasses\n'
        'from composer_jax.rewards import verify\n'
        'from tests import small_config\n'
        'def experiment():\n'
        '  small = small_config.experiment()\n'
        '  return dataclasses.replace(small, rewards=(verify.Verify(),))\n'
    )
    done = small_run.run(
        'quickstart',
        folder / 'run',
        'rl.steps=1',
        config=str(folder / 'hopeless.py'),
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    summary = json.loads((folder / 'run' / 'summary.json').read_text())
    self.assertIsNone(summary['mismatch_kl_same_version'])
    self.assertEqual(summary['same_version_tokens'], 0)
    self.assertIn('<svg', (folder / 'run' / 'report.html').read_text())

  def test_interrupted_and_continued_run_sums_up_as_one(self):
    workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'
    with subprocess.Popen(
        small_run.command('quickstart', workdir, 'rl.steps=6'),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=small_run.ROOT,
        env=small_run.environment(),
    ) as process:
      metrics = workdir / 'metrics.jsonl'
      end = time.monotonic() + 600
      while time.monotonic() < end and process.poll() is None:
        if metrics.exists() and '"phase": "rl"' in metrics.read_text():
          break
        time.sleep(0.1)
      process.send_signal(signal.SIGINT)
      out, err = process.communicate(timeout=120)
    self.assertEqual(process.returncode, 0, err)
    self.assertIn('go on with: python3 -m experiments.quickstart', out)
    done = small_run.run('quickstart', workdir, 'rl.steps=6')
    self.assertEqual(done.returncode, 0, done.stderr)
    summary = json.loads((workdir / 'summary.json').read_text())
    self.assertEqual(summary['mismatch_kl_same_version'], 0.0)
    self.assertEqual(summary['audit']['max_abs_dlogp'], 0.0)
    self.assertEqual(summary['audit']['routing_differences'], 0)
    self.assertGreater(summary['audit']['tokens'], 100)
    self.assertEqual(summary['weights']['digest_mismatches'], 0)
    self.assertEqual(summary['lost_rollouts'], 0)
    for key in ('heldout_pass1_sampled', 'heldout_pass1_greedy'):
      self.assertEqual(set(summary[key]), {'before', 'after'})
    steps = [r['step'] for r in _records(workdir, 'rl') if 'loss' in r]
    self.assertEqual(steps, sorted(set(steps)))
    self.assertIn('<svg', (workdir / 'report.html').read_text())


if __name__ == '__main__':
  absltest.main()
