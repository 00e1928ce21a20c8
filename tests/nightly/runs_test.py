"""Whole runs, bit for bit: claims 1, 4, 6, 7, 8 about determinism; many kills.

A claim that fails names the first op, layer and token that differ.
"""

import dataclasses
import json
import pathlib
import random
import shutil
import sys
import tempfile

from absl.testing import absltest
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from composer_jax import config_text
from composer_jax import trace
from composer_jax.fleet import history
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.learner import items
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.runs import evaluate
from composer_jax.runs import feed
from composer_jax.runs import manifest
from composer_jax.runs import replay
from composer_jax.runs import run_digest
from composer_jax.weights import checkpoint
from composer_jax.weights import follow
from composer_jax.weights import publish
from experiments import flags
from kernels_triton import contract
from tests import small_config
from tests import small_run

_SYNC = (
    'rl.max_staleness_versions=0',
    'rl.lease_seconds=600',  # a loaded machine must not lose a rollout
)
_ASYNC = ('rl.max_staleness_versions=2', 'rl.lease_seconds=600')
_CFG = config_text.override(small_config.experiment(), *_SYNC)
_MODEL = _CFG.model


def _pinned(cores, command):
  return small_run.finished(['taskset', '-c', cores, *command])


def _inspect(workdir, *arguments, cache):
  return [
      sys.executable,
      '-m',
      'experiments.inspect',
      'ops',
      f'--workdir={workdir}',
      f'--compilation_cache={cache}',
      *arguments,
  ]


def _with_one_token_moved(records):
  """(step, records, prompt): a rollout's last token of a version to the next."""
  for number, record in enumerate(records):
    for i, group in enumerate(record.trained):
      for j, rollout in enumerate(group.rollouts):
        (spans,) = rollout.spans
        if len(spans) > 1:
          (a, n), (b, m), *rest = spans
          moved = dataclasses.replace(
              rollout, spans=(((a, n - 1), (b, m + 1), *rest),)
          )
          members = list(group.rollouts)
          members[j] = moved
          groups = list(record.trained)
          groups[i] = dataclasses.replace(group, rollouts=tuple(members))
          altered = list(records)
          altered[number] = dataclasses.replace(record, trained=tuple(groups))
          return number, altered, group.prompt
  raise AssertionError(
      'no window of two versions; the run was not asynchronous'
  )


class RunTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(tempfile.mkdtemp())
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    cls.workdir = cls.folder / 'two_cores'
    done = small_run.run('rl', cls.workdir, *_SYNC)
    assert done.returncode == 0, done.stderr
    cls.digests = dict(run_digest.of_run(_CFG, cls.workdir))
    cls.store = f'file://{cls.workdir / "weights"}/'
    paths = sorted((cls.workdir / 'trajectories').glob('[0-9]*/*.traj'))
    cls.rollouts = [trace.from_bytes(p.read_bytes()) for p in paths]

  def _weights(self, version):
    return feed.decode_params(follow.Follower(self.store).fetch(version))

  def _ops_of_both(self):
    """What both conditions compute on the weights of the finished run."""
    path = self.folder / 'ops.npz'
    one = _inspect(self.workdir, f'--save={path}', cache=small_run.CACHE)
    two = _inspect(self.workdir, f'--against={path}', cache='')
    saved, compared = _pinned('0,1', one), _pinned('0', two)
    return saved.returncode or compared.returncode, (
        saved.stdout + compared.stdout + saved.stderr + compared.stderr
    )

  def test_1_fresh_processes_and_numbers_of_cores(self):
    """Mid-training, warm-up and synchronous RL, compiled anew on one core.

    Every leaf of the three states, every metric, sampled token, log-prob and
    expert; and of one more step loss, metrics, gradients and new state.
    """
    other = self.folder / 'one_core'
    command = small_run.command('rl', other, *_SYNC, cache='')
    done = _pinned('0', command)
    self.assertEqual(done.returncode, 0, done.stderr)
    got = dict(run_digest.of_run(_CFG, other))
    names = sorted({*got, *self.digests})
    differing = [k for k in names if got.get(k) != self.digests.get(k)]
    code, report = self._ops_of_both()
    self.assertEqual(differing, [], report)
    self.assertEqual(code, 0, report)
    self.assertIn('train step vs', report)
    self.assertGreater(sum(k.endswith('.traj') for k in got), 10)

  def test_3_another_seed_gives_another_run(self):
    other = self.folder / 'other'
    done = small_run.run('rl', other, *_SYNC, 'seed=1')
    self.assertEqual(done.returncode, 0, done.stderr)
    got = dict(run_digest.of_run(_CFG, other))
    same = [k for k, v in self.digests.items() if got.get(k) == v]
    self.assertNotIn('metrics', same)
    self.assertNotIn('rl/params/embedding', same)

  def test_4_replay(self):
    last = max(max(r.weights) for r in self.rollouts)
    fresh = [r for r in self.rollouts if set(r.weights) == {last}]
    shape = packing.Shape(8, 128, contract.KEY_BLOCK)
    mesh = step.make_mesh(_CFG.mesh)
    signs = [1.0 - 2.0 * (i % 2) for i in range(len(fresh))]

    def pack(rollouts, replay=_MODEL):
      found = items.from_trajectories(rollouts, signs)
      return packing.pack(found, shape, now=last, replay=replay)[0]

    def change(rollout, routing):
      segments = tuple(
          dataclasses.replace(s, routing=routing(s)) for s in rollout.segments
      )
      return dataclasses.replace(rollout, segments=segments)

    def gradients(params, batch):
      return jax.device_get(
          step.gradients(
              params,
              batch,
              jnp.float32(8.0),
              cfg=_MODEL,
              loss=_CFG.loss,
              mesh=mesh,
          )
      )

    now, start = self._weights(last), self._weights(0)
    recorded = pack(fresh)
    grads, metrics = gradients(now, recorded)
    # Own routes: the bits of live routing, and of the engine.
    live, _ = gradients(now, pack(fresh, replay=None))
    jax.tree.map(np.testing.assert_array_equal, grads, live)
    self.assertEqual(float(metrics['mismatch/max_log_ratio'].value()), 0.0)
    self.assertEqual(float(metrics['routing/disagreement'].value()), 0.0)
    # Other weights: the record is obeyed, and the router still learns.
    _, used = step.score(start, recorded, cfg=_MODEL, mesh=mesh)
    known = recorded.routing != trace.blank_route(recorded.routing.dtype)
    np.testing.assert_array_equal(
        np.asarray(used)[known], recorded.routing[known]
    )
    grads, metrics = gradients(start, recorded)
    self.assertGreater(np.abs(grads.layers.moe.router).max(), 1e-7)
    # Other routes: another loss.
    shifted = pack(
        [
            change(
                r,
                lambda s: trace.RoutingTrace(
                    np.where(
                        s.routing.experts < _MODEL.experts,
                        (s.routing.experts + 1) % _MODEL.experts,
                        s.routing.experts,
                    ).astype(s.routing.experts.dtype)
                ),
            )
            for r in fresh
        ]
    )
    _, other = gradients(start, shifted)
    self.assertNotEqual(
        float(metrics['loss'].total), float(other['loss'].total)
    )
    with self.assertRaisesRegex(ValueError, 'no routing trace'):
      pack([change(r, lambda s: None) for r in fresh])

  def test_6_delta_round_trip(self):
    """Two real versions with every special value planted in either."""
    special = np.array(
        [
            0x0000,
            0x8000,
            0x0001,
            0x8001,
            0x7F80,
            0xFF80,
            0x7FC1,
            0xFFA5,
            0x7F81,
        ],
        np.uint16,
    )
    pairs = np.array(np.meshgrid(special, special)).reshape(2, -1)
    follower = follow.Follower(self.store)
    versions = [dict(follower.fetch(v)) for v in (0, 1)]
    for version, values in zip(versions, pairs, strict=True):
      for name, x in version.items():
        words = np.array(x).view(np.uint16).reshape(-1)
        count = min(words.size, values.size)
        words[:count] = values[:count]
        version[name] = words.reshape(x.shape).view(ml_dtypes.bfloat16)
    url = f'file://{self.folder}/planted/'
    publisher = publish.Publisher(url, _CFG.weights, 'writer')
    steady = follow.Follower(url)
    for number, version in enumerate(versions):
      publisher.publish(number, version)
      for reader in (steady, follow.Follower(url)):
        got = reader.poll()[1]
        for name, want in version.items():
          self.assertEqual(got[name].tobytes(), want.tobytes(), name)
    self.assertEqual(steady.digest_mismatches, 0)

  def test_7_killed_at_random_and_resumed(self):
    workdir = self.folder / 'killed'
    rng = random.Random(7)
    for _ in range(6):
      if not small_run.kill_after(
          rng.uniform(3.0, 25.0), 'rl', workdir, *_SYNC
      ):
        break
    done = small_run.run('rl', workdir, *_SYNC)
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(dict(run_digest.of_run(_CFG, workdir)), self.digests)

  def test_a_run_does_not_go_on_under_another_numeric_contract(self):
    command = small_run.command('midtrain', self.workdir, *_SYNC)
    flags_now = {'XLA_FLAGS': '--xla_cpu_enable_fast_math=false'}
    refused = small_run.finished(command, **flags_now)
    self.assertEqual(refused.returncode, 2)
    (line,) = refused.stderr.splitlines()
    self.assertIn("xla_flags '' -> '--xla_cpu_enable", line)
    command.append('--accept_numeric_change')
    for flags_then in (flags_now, {}):  # and back again
      accepted = small_run.finished(command, **flags_then)
      self.assertEqual(accepted.returncode, 0, accepted.stderr)
    head = json.loads((self.workdir / manifest.FILE).read_text())
    changes = [r['changed'].get('xla_flags') for r in head['history'][-2:]]
    self.assertEqual(changes[0], changes[1][::-1])

  def test_8_asynchronous_run_replays_from_its_ledger(self):
    """Through in-flight swaps, stale batches, a kill and a resume."""
    workdir = self.folder / 'asynchronous'
    edits = (*_ASYNC, 'rl.steps=12')
    small_run.kill_after(40.0, 'rl', workdir, *edits)
    done = small_run.run('rl', workdir, *edits)
    self.assertEqual(done.returncode, 0, done.stderr)
    done = small_run.replay(workdir)
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn('12 steps and 96 rollouts replayed, 0 groups', done.stdout)
    self.assertIn('first difference: none', done.stdout)

    # One token said to be drawn by other weights, or one other digest: seen.
    extra = checkpoint.read_extra(workdir / 'checkpoints' / 'rl')
    ledger = ledger_lib.from_json(extra['ledger'])
    steps = history.read(workdir, ledger)
    number, altered, prompt = _with_one_token_moved(steps)
    cfg = config_text.override(small_config.experiment(), *edits)
    mesh = step.make_mesh(cfg.mesh)
    with evaluate.stored_host(cfg, workdir, None, jax.devices()[0]) as host:
      found = replay.run(cfg, workdir, altered, host, mesh)
      self.assertEqual(
          found.difference, f'a rollout of prompt {prompt}, step {number}'
      )
      first = dataclasses.replace(steps[0], digest='0' * 64)
      found = replay.run(cfg, workdir, (first, *steps[1:]), host, mesh)
      self.assertEqual(found.difference, 'weights of step 0')


class LongRunTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def test_shipped_experiment_is_bit_equal_in_fresh_processes(self):
    edits = (
        *_SYNC,
        'phases.midtrain.steps=10',
        'phases.warmup.steps=120',
        'rl.steps=4',
    )
    found = []
    for name in 'ab':
      done = small_run.run('rl', self.folder / name, *edits, config='tiny')
      self.assertEqual(done.returncode, 0, done.stderr)
      cfg = config_text.override(flags.load('tiny'), *edits)
      found.append(run_digest.of_run(cfg, self.folder / name))
    self.assertEqual(*found)

  def test_many_kills_lose_and_repeat_nothing(self):
    workdir = self.folder / 'killed'
    edits = ('rl.steps=60', 'rl.checkpoint_every_steps=2')
    rng = random.Random(1)
    for _ in range(15):
      small_run.kill_after(rng.uniform(6.0, 15.0), 'rl', workdir, *edits)
    done = small_run.run('rl', workdir, *edits)
    self.assertEqual(done.returncode, 0, done.stderr)
    extra = checkpoint.read_extra(workdir / 'checkpoints' / 'rl')
    ledger = ledger_lib.from_json(extra['ledger'])
    self.assertLen(history.read(workdir, ledger), 60)
    self.assertEqual(ledger_lib.lost(ledger), ())


if __name__ == '__main__':
  absltest.main()
