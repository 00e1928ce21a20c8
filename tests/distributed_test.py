"""Several processes train as one: the same run, and an end when one dies."""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from composer_jax.learner import processes
from tests import small_job
from tests import small_run


class WrongJobTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'

  def _refused(self, binary, *flags, **extra):
    command = [*small_run.command(binary, self.workdir), *flags]
    done = small_run.finished(command, **extra)
    self.assertEqual(done.returncode, 2, done.stderr)
    self.assertFalse(self.workdir.exists())
    return done.stderr

  @parameterized.named_parameters(
      ('half', ['--processes=2'], '--coordinator and --process'),
      ('address', ['--coordinator=here', '--process=0'], 'HOST:PORT'),
      ('number', ['--coordinator=h:1', '--process=2'], 'must be below'),
  )
  def test_a_job_described_wrongly_is_one_line(self, flags, part):
    err = self._refused('midtrain', '--processes=2', *flags)
    self.assertLen(err.splitlines(), 1)
    self.assertIn(part, err)

  def test_a_coordinator_that_does_not_answer_is_one_line(self):
    where = f'--coordinator=127.0.0.1:{small_job.free_port()}'
    flags = ('--processes=2', '--process=1', '--join_seconds=1')
    err = self._refused('midtrain', where, *flags)
    self.assertLen(err.splitlines(), 1)
    self.assertIn(f'{where}: no answer within 1 s', err)

  def test_processes_that_do_not_come_are_said_in_a_line(self):
    where = f'--coordinator=127.0.0.1:{small_job.free_port()}'
    flags = ('--processes=2', '--process=0', '--join_seconds=1')
    command = [*small_run.command('midtrain', self.workdir), where, *flags]
    done = small_run.finished(command)
    self.assertNotEqual(done.returncode, 0)
    self.assertIn('did not meet within 1 s', done.stderr.splitlines()[-1])

  def test_reinforcement_learning_refuses(self):
    flags = ('--coordinator=h:1', '--processes=2', '--process=0')
    err = self._refused('rl', *flags)
    self.assertLen(err.splitlines(), 1)
    self.assertIn('reinforcement learning has one process', err)

  def test_slurm_is_asked(self):
    slurm = {
        'SLURM_JOB_ID': '7',
        'SLURM_STEP_NODELIST': '127.0.0.1',
        'SLURM_NTASKS': '2',
        'SLURM_LOCALID': '0',
    }
    port = small_job.free_port()
    command = [
        *small_run.command('midtrain', self.workdir, 'mesh.data=3'),
        '--join_seconds=60',
    ]
    job = [
        small_job.launch(
            command,
            SLURM_PROCID=str(i),
            JAX_COORDINATOR_PORT=str(port),
            **slurm,
        )
        for i in range(2)
    ]
    for code, _, err in small_job.ended(job):
      self.assertEqual(code, 2, err)
      # They have met: it is the mesh that does not fit.
      self.assertIn('2 processes have 4', err)

  def test_what_process_0_cannot_open_ends_all(self):
    self.workdir.mkdir()
    (self.workdir / 'thesis.tex').write_text('mine')
    for code, _, err in small_job.ended(small_job.start(self.workdir)):
      self.assertEqual(code, 2, err)
      self.assertIn('thesis.tex', err.splitlines()[-1])


class AgreeTest(absltest.TestCase):

  def test_one_process_agrees_with_itself(self):
    self.assertEqual(processes.agree(True, False), (True, False))
    self.assertTrue(processes.first())


if __name__ == '__main__':
  absltest.main()
