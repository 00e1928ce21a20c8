"""A job of two processes through all that may happen to it, bit for bit."""

import pathlib
import signal

from absl.testing import absltest

from composer_jax import config_text
from composer_jax.learner import step
from composer_jax.runs import digest
from tests import small_config
from tests import small_job

_STEPS = 'phases.warmup.steps=40'


def _digests(workdir):
  cfg = config_text.override(
      small_config.experiment(), *small_job.EDITS, _STEPS
  )
  mesh = step.make_mesh(cfg.mesh)
  return digest.of_state(digest.restored(cfg, workdir, 'warmup', mesh))


class JobTest(absltest.TestCase):

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
    self.assertIn('another process of the job is gone', err)
    for code, _, err in small_job.ended(
        small_job.start(base / 'parts', _STEPS)
    ):
      self.assertEqual(code, 0, err)
    self.assertEqual(_digests(base / 'parts'), _digests(base / 'whole'))


if __name__ == '__main__':
  absltest.main()
