"""Trainer, hosts and server of a fleet killed -9 at random, over and over."""

import asyncio
import pathlib
import random
import shutil
import signal
import time

from absl.testing import absltest

from composer_jax import config_text
from composer_jax.fleet import history
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.fleet import store_blobs
from composer_jax.runs import manifest
from composer_jax.runs import run_digest
from composer_jax.weights import checkpoint
from tests import remote_store_test
from tests import small_config
from tests import small_fleet
from tests import small_run

_KILLS = 9
_EDITS = ('rl.lease_seconds=4', 'rl.checkpoint_every_steps=2')
_SYNC = (*_EDITS, 'rl.max_staleness_versions=0', 'rl.steps=12')
_ASYNC = (*_EDITS, 'rl.max_staleness_versions=2', 'rl.steps=24')


class KilledFleetTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def _stopped(self, host):
    """Lets a host end what it has begun, which nobody wants any more."""
    self.assertIsNone(host.poll(), host.log.read_text())
    host.send_signal(signal.SIGTERM)
    self.assertEqual(host.wait(120), 0, host.log.read_text())

  def _killed(self, workdir, edits):
    """Runs to the end although something is killed every few seconds."""
    rng = random.Random(len(edits))
    kinds = ['trainer', 'host', 'broker'] * (_KILLS // 3)
    rng.shuffle(kinds)
    with small_fleet.Fleet(self.folder / f'queue-{workdir.name}') as fleet:
      command = small_run.command('rl', workdir, *edits)[3:]

      def start(kind):
        if kind == 'trainer':
          return fleet.start('rl', *command, *fleet.trainer)
        return fleet.host() if kind == 'host' else fleet.up()

      running = {'broker': fleet.broker}
      running |= {kind: start(kind) for kind in ('host', 'trainer')}
      other = fleet.host()  # joins, and stays
      small_fleet.wait_for(running['trainer'], 'rl step')
      for kind in kinds:
        time.sleep(rng.uniform(1.0, 6.0))
        if running['trainer'].poll() == 0:
          break
        small_fleet.kill(running[kind])
        if kind == 'broker':
          fleet.kill_server()
        running[kind] = start(kind)
      code = running['trainer'].wait(1200)
      self.assertEqual(code, 0, running['trainer'].log.read_text())
      for host in (running['host'], other):
        self._stopped(host)
    left = [p for p in (workdir / 'blobs').rglob('*') if p.is_file()]
    self.assertEmpty(left)
    extra = checkpoint.read_extra(workdir / 'checkpoints' / 'rl')
    ledger = ledger_lib.from_json(extra['ledger'])
    self.assertEmpty(ledger_lib.lost(ledger))
    return history.read(workdir, ledger)  # refuses a prompt that is there twice

  def test_a_synchronous_run_ends_with_the_same_bits(self):
    whole = self.folder / 'whole'
    done = small_run.run('rl', whole, *_SYNC)
    self.assertEqual(done.returncode, 0, done.stderr)
    killed = self.folder / 'killed'
    self.assertLen(self._killed(killed, _SYNC), 12)
    cfg = config_text.override(small_config.experiment(), *_SYNC)
    self.assertEqual(
        dict(run_digest.of_run(cfg, whole)),
        dict(run_digest.of_run(cfg, killed)),
    )

  def test_the_disk_of_the_server_is_lost(self):
    workdir = self.folder / 'run'
    with small_fleet.Fleet(self.folder / 'queue') as fleet:
      host = fleet.host()
      command = small_run.command('rl', workdir, *_ASYNC)[3:]
      trainer = fleet.start('rl', *command, *fleet.trainer)
      small_fleet.wait_for(trainer, 'rl step')
      for process in (trainer, fleet.broker):
        small_fleet.kill(process)
      fleet.kill_server()
      shutil.rmtree(fleet.folder / 'jetstream')
      fleet.up()
      trainer = fleet.start('rl', *command, *fleet.trainer)
      self.assertEqual(trainer.wait(1200), 0, trainer.log.read_text())
      self.assertIsNone(host.poll(), host.log.read_text())
    extra = checkpoint.read_extra(workdir / 'checkpoints' / 'rl')
    ledger = ledger_lib.from_json(extra['ledger'])
    self.assertEmpty(ledger_lib.lost(ledger))
    self.assertLen(history.read(workdir, ledger), 24)

  def test_weights_and_payloads_lie_in_a_bucket(self):
    workdir = self.folder / 'run'
    with (
        remote_store_test.bucket() as bucket,
        small_fleet.Fleet(self.folder / 'queue') as fleet,
    ):
      host = fleet.host()
      stores = [f'--{n}={bucket.url(n)}' for n in ('store', 'blobs')]
      command = small_run.command('rl', workdir, 'rl.steps=2')
      done = small_run.finished([*command, *fleet.trainer, *stores])
      self.assertEqual(done.returncode, 0, done.stderr)
      self._stopped(host)
      self.assertFalse((workdir / 'weights').exists())
      run = manifest.run_id(workdir)
      kept = store_blobs.StoreBlobs(bucket.url('blobs'))
      self.assertEmpty(asyncio.run(kept.names(f'{run}/')))
      # Whoever reads the run finds its weights there.
      evaluated = small_run.finished(
          [
              *small_run.command('evaluate', workdir)[:3],
              f'--workdir={workdir}',
              f'--compilation_cache={small_run.CACHE}',
          ]
      )
      self.assertEqual(evaluated.returncode, 0, evaluated.stderr)
      self.assertIn('prefix_products', evaluated.stdout)

  def test_an_asynchronous_run_loses_nothing_and_replays(self):
    workdir = self.folder / 'asynchronous'
    steps = self._killed(workdir, _ASYNC)
    self.assertLen(steps, 24)
    outcomes = {
        r.outcome
        for s in steps
        for g in (*s.trained, *s.untrained)
        for r in g.rollouts
    }
    self.assertEqual(outcomes, {'valid'})
    done = small_run.replay(workdir)
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn('first difference: none', done.stdout)


if __name__ == '__main__':
  absltest.main()
