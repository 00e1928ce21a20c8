"""Synchronous runs are bit-equal: in fresh processes, and after kill -9."""

import pathlib
import random
import re
import shutil
import signal
import tempfile

from absl.testing import absltest

from composer_jax import config_text
from composer_jax.fleet import history
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.runs import run_digest
from composer_jax.weights import checkpoint
from tests import small_config
from tests import small_fleet
from tests import small_run

_SYNC = ('rl.max_staleness_versions=0',)
_ASYNC = ('rl.max_staleness_versions=2', 'rl.steps=8')


def _digests(workdir, edits):
  cfg = config_text.override(small_config.experiment(), *edits)
  return dict(run_digest.of_run(cfg, workdir))


class DeterminismTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.base = pathlib.Path(tempfile.mkdtemp())
    cls.sync = cls.base / 'sync'
    done = small_run.run('rl', cls.sync, *_SYNC)
    assert done.returncode == 0, done.stderr

  @classmethod
  def tearDownClass(cls):
    shutil.rmtree(cls.base)
    super().tearDownClass()

  def test_two_fresh_processes_give_equal_digests(self):
    again = self.base / 'again'
    done = small_run.run('rl', again, *_SYNC)
    self.assertEqual(done.returncode, 0, done.stderr)
    want, got = _digests(self.sync, _SYNC), _digests(again, _SYNC)
    self.assertGreater(sum(name.endswith('.traj') for name in want), 10)
    self.assertEqual(want, got)

  def test_hosts_elsewhere_make_the_same_run(self):
    workdir = self.base / 'elsewhere'
    with small_fleet.Fleet(self.base / 'queue') as fleet:
      host = fleet.host()
      small_fleet.wait_for(host, 'waits for')
      command = small_run.command('rl', workdir, *_SYNC)
      done = small_run.finished([*command, *fleet.trainer])
      self.assertEqual(done.returncode, 0, done.stderr)
      status = fleet.ask('status')
      self.assertRegex(status.stdout, r'│ rollout │ 0 +│ \d+ +│ 0 +│ 4 ')
      host.send_signal(signal.SIGTERM)
      self.assertEqual(host.wait(120), 0, host.log.read_text())
      (run,) = re.findall('tasks of run ([0-9a-f]+)', host.log.read_text())
      # With the key of a host nobody can do what a trainer can.
      key = f'--queue_key={fleet.folder / "host.nk"}'
      for wrong in (
          fleet.ask('retire', f'--run={run}', key),
          small_run.finished(
              [*small_run.command('rl', self.base / 'x'), *fleet.trainer, key]
          ),
      ):
        self.assertEqual(wrong.returncode, 2, wrong.stdout)
        self.assertRegex(wrong.stderr.splitlines()[-1], 'key of the trainer')
      for flags, says in (
          ([f'--run={run}'], 'its tasks and results are gone'),
          ([f'--run={run}'], 'not on this server; runs there: none'),
          (['--run=x', '--queue_key='], 'Authorization Violation'),
      ):
        told = fleet.ask('retire', *flags)
        self.assertIn(says, told.stdout + told.stderr)
        self.assertLen((told.stdout + told.stderr).splitlines(), 1)
      fleet.broker.send_signal(signal.SIGINT)
      self.assertEqual(fleet.broker.wait(120), 0)
    self.assertEqual(_digests(self.sync, _SYNC), _digests(workdir, _SYNC))
    self.assertEmpty([p for p in (workdir / 'blobs').rglob('*') if p.is_file()])
    # And it is evaluated, replayed and resumed like any other.
    lost = small_run.finished([*command, *fleet.trainer, '--set=rl.steps=9'])
    self.assertEqual(lost.returncode, 2)
    self.assertIn(f'queue {fleet.url}: ', lost.stderr)
    self.assertLen(lost.stderr.splitlines(), 1)

  def test_killed_and_resumed_run_is_bit_equal(self):
    workdir = self.base / 'killed'
    # What a run does in its phases differs from machine to machine: the kills
    # are spread over the time that a whole run takes here.
    for seconds in (6.0, 9.0, 12.0, 14.0, 16.0):
      if not small_run.kill_after(seconds, 'rl', workdir, *_SYNC):
        break
    done = small_run.run('rl', workdir, *_SYNC)
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(_digests(self.sync, _SYNC), _digests(workdir, _SYNC))


class KilledAsyncRunTest(absltest.TestCase):

  def test_each_prompt_is_trained_exactly_once(self):
    workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'
    rng = random.Random(0)
    kills = 0
    while kills < 2 and small_run.kill_after(
        rng.uniform(8.0, 14.0), 'rl', workdir, *_ASYNC
    ):
      kills += 1
    done = small_run.run('rl', workdir, *_ASYNC)
    self.assertEqual(done.returncode, 0, done.stderr)
    extra = checkpoint.read_extra(workdir / 'checkpoints' / 'rl')
    ledger = ledger_lib.from_json(extra['ledger'])
    steps = history.read(workdir, ledger)  # refuses a double entry
    self.assertGreaterEqual(kills, 1)
    self.assertLen(steps, 8)
    self.assertEqual(ledger_lib.lost(ledger), ())
    trained = [g.prompt for s in steps for g in (*s.trained, *s.untrained)]
    self.assertLen(set(trained), len(trained))
    outcomes = {
        r.outcome
        for s in steps
        for g in (*s.trained, *s.untrained)
        for r in g.rollouts
    }
    self.assertEqual(outcomes, {'valid'})


if __name__ == '__main__':
  absltest.main()
