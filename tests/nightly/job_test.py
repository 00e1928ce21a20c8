"""A job of two processes through all that may happen to it, bit for bit."""

import pathlib
import shutil
import signal
import tempfile
import time

from absl.testing import absltest
import numpy as np

from composer_jax import config_text
from composer_jax.learner import step
from composer_jax.runs import run_digest
from tests import small_config
from tests import small_job

_STEPS, _FEW = 'phases.warmup.steps=40', 'phases.warmup.steps=12'


def _digests(workdir):
  cfg = config_text.override(
      small_config.experiment(), *small_job.EDITS, _STEPS
  )
  mesh = step.make_mesh(cfg.mesh)
  return run_digest.of_state(run_digest.restored(cfg, workdir, 'warmup', mesh))


class JobTest(absltest.TestCase):
  """One job of two processes."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.base = pathlib.Path(tempfile.mkdtemp())
    cls.cfg = config_text.override(small_config.experiment(), *small_job.EDITS)
    cls.workdir = cls.base / 'job'
    cls.ended = small_job.ended(small_job.start(cls.workdir))

  @classmethod
  def tearDownClass(cls):
    shutil.rmtree(cls.base)
    super().tearDownClass()

  def test_only_process_0_writes(self):
    (code, first, _), (other_code, other, err) = self.ended
    self.assertEqual((code, other_code), (0, 0), err)
    self.assertIn('warmup', first)
    self.assertEqual(other, '')
    self.assertEqual(err, '')
    lines = (self.workdir / 'metrics.jsonl').read_text().splitlines()
    trained = [x for x in lines if '"loss"' in x]
    self.assertLen(trained, small_job.STEPS)

  def test_one_process_gives_the_same_run(self):
    (self.base / 'one').mkdir()
    shutil.copy(self.workdir / 'tokenizer.json', self.base / 'one')
    state = small_job.one_process(self.base / 'one', self.cfg)
    want = small_job.figures(self.base / 'one')
    got = small_job.figures(self.workdir)
    np.testing.assert_allclose(list(got.values()), list(want.values()), 1e-5)
    small_job.assert_close(state, self.workdir, self.cfg)


class StoppedTest(absltest.TestCase):

  def test_stopped_killed_and_resumed_job_is_bit_equal(self):
    base = pathlib.Path(self.create_tempdir().full_path)
    for code, _, err in small_job.ended(
        small_job.start(base / 'whole', _STEPS)
    ):
      self.assertEqual(code, 0, err)
    # A signal to one process: both save after the same step.
    job = small_job.start(base / 'parts', _STEPS)
    small_job.wait_for(base / 'parts', 4, job)
    job[1].send_signal(signal.SIGTERM)
    for code, _, err in small_job.ended(job):
      self.assertEqual(code, 0, err)
    stopped = max(small_job.records(base / 'parts'))
    self.assertLess(stopped, 40)
    # Process 0, with the coordinator in it, is killed.
    job = small_job.start(base / 'parts', _STEPS)
    small_job.wait_for(base / 'parts', stopped + 3, job)
    job[0].kill()
    _, (code, _, err) = small_job.ended(job)
    self.assertNotEqual(code, 0)
    self.assertIn(small_job.GONE, err)
    for code, _, err in small_job.ended(
        small_job.start(base / 'parts', _STEPS)
    ):
      self.assertEqual(code, 0, err)
    self.assertEqual(_digests(base / 'parts'), _digests(base / 'whole'))


class KilledTest(absltest.TestCase):
  """A job whose second process is killed in the warm-up, and that goes on."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.base = pathlib.Path(tempfile.mkdtemp())
    cls.cfg = config_text.override(
        small_config.experiment(), *small_job.EDITS, _FEW
    )
    cls.workdir = cls.base / 'job'
    job = small_job.start(cls.workdir, _FEW)
    small_job.wait_for(cls.workdir, 3, job)
    job[1].kill()
    killed = time.monotonic()
    cls.killed = small_job.ended(job)
    cls.seconds = time.monotonic() - killed
    cls.before = small_job.figures(cls.workdir)
    shutil.copytree(cls.workdir, cls.base / 'alone')
    cls.resumed = small_job.ended(small_job.start(cls.workdir, _FEW))

  @classmethod
  def tearDownClass(cls):
    shutil.rmtree(cls.base)
    super().tearDownClass()

  def test_the_other_process_ends_with_one_clear_line(self):
    (code, _, err), (victim, _, _) = self.killed
    self.assertEqual(victim, -signal.SIGKILL)
    self.assertNotIn(code, (0, victim))
    self.assertIn(small_job.GONE, err.splitlines()[-1])
    self.assertNotIn('Traceback', err)
    self.assertLess(self.seconds, 20)

  def test_the_same_commands_go_on_with_the_same_bits(self):
    for code, _, err in self.resumed:
      self.assertEqual(code, 0, err)
    again = small_job.figures(self.workdir)
    self.assertLen(again, 12)
    self.assertGreaterEqual(len(self.before), 3)
    # Trained a second time, by other processes, from the same checkpoint.
    self.assertEqual(self.before, {at: again[at] for at in self.before})

  def test_one_process_goes_on_from_the_checkpoint_of_two(self):
    state = small_job.one_process(self.base / 'alone', self.cfg)
    small_job.assert_close(state, self.workdir, self.cfg)


if __name__ == '__main__':
  absltest.main()
