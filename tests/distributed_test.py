"""Several processes train as one: the same run, and an end when one dies."""

import pathlib
import shutil
import signal
import tempfile
import time

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from composer_jax import config_text
from composer_jax.learner import processes
from composer_jax.learner import step
from composer_jax.runs import digest
from composer_jax.runs import pipeline
from tests import small_config
from tests import small_job
from tests import small_run

_FIGURES = ('loss', 'grad_norm')
_GONE = 'another process of the job is gone'


def _figures(records):
  return {
      at: [r[f] for f in _FIGURES] for at, r in records.items() if 'loss' in r
  }


def _one_process(workdir, cfg):
  """Runs, or goes on with, the phases in this process and its four devices."""
  run = pipeline.open_run(
      cfg,
      workdir,
      mesh=step.make_mesh(cfg.mesh),
      decoder=jax.devices()[0],
      stop=lambda: False,
  )
  with run.writer:
    state, complete = pipeline.next_token_phases(run)
  assert complete
  return state


class JobTest(absltest.TestCase):
  """One job of two processes, killed in its warm-up and gone on with."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.base = pathlib.Path(tempfile.mkdtemp())
    cls.cfg = config_text.override(small_config.experiment(), *small_job.EDITS)
    workdir = cls.base / 'job'
    job = small_job.start(workdir)
    small_job.wait_for(workdir, 3, job)
    job[1].kill()
    killed = time.monotonic()
    cls.killed = small_job.ended(job)
    cls.seconds = time.monotonic() - killed
    cls.before = small_job.records(workdir)
    shutil.copytree(workdir, cls.base / 'alone')
    cls.resumed = small_job.ended(small_job.start(workdir))
    cls.workdir = workdir

  @classmethod
  def tearDownClass(cls):
    shutil.rmtree(cls.base)
    super().tearDownClass()

  def test_the_other_process_ends_with_one_clear_line(self):
    (code, _, err), (victim, _, _) = self.killed
    self.assertEqual(victim, -signal.SIGKILL)
    self.assertNotIn(code, (0, victim))
    self.assertIn(_GONE, err.splitlines()[-1])
    self.assertNotIn('Traceback', err)
    self.assertLess(self.seconds, 20)

  def test_the_same_commands_go_on_with_the_same_bits(self):
    for code, _, err in self.resumed:
      self.assertEqual(code, 0, err)
    again = _figures(small_job.records(self.workdir))
    self.assertLen(again, 24)
    before = _figures(self.before)
    self.assertGreaterEqual(len(before), 3)
    # Trained a second time, by other processes, from the same checkpoint.
    self.assertEqual(before, {at: again[at] for at in before})

  def test_only_process_0_writes(self):
    (_, first, _), (_, other, err) = self.resumed
    self.assertIn('warmup', first)
    self.assertEqual(other, '')
    self.assertEqual(err, '')
    lines = (self.workdir / 'metrics.jsonl').read_text().splitlines()
    self.assertLen(lines, 3 + 25)

  def test_one_process_gives_the_same_run(self):
    (self.base / 'one').mkdir()
    shutil.copy(self.workdir / 'tokenizer.json', self.base / 'one')
    state = _one_process(self.base / 'one', self.cfg)
    want = _figures(small_job.records(self.base / 'one'))
    got = _figures(small_job.records(self.workdir))
    np.testing.assert_allclose(list(got.values()), list(want.values()), 1e-5)
    self._assert_close(state)

  def test_one_process_goes_on_from_the_checkpoint_of_two(self):
    self._assert_close(_one_process(self.base / 'alone', self.cfg))

  def _assert_close(self, state):
    mesh = step.make_mesh(self.cfg.mesh)
    got = digest.restored(self.cfg, self.workdir, 'warmup', mesh)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5),
        jax.device_get(state.params),
        jax.device_get(got.params),
    )


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
    self.assertIn('one trainer process', err)

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
