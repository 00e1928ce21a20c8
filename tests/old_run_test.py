"""A run of an older version goes on: tests/data holds one of be0825f.

It was made there by

  python3 -m experiments.rl --config=tests.small_config --seed=3 _EDITS

with `_EDITS` as --set. Its config names classes by where they were then, and
its rollouts are those of a run without an id.
"""

import json
import pathlib
import re
import signal
import subprocess
import tarfile

from absl.testing import absltest
import httpx
from tests import serving_kit
from tests import small_config
from tests import small_run

from composer_jax import trace
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.runs import manifest
from composer_jax.weights import checkpoint
from kernels_triton import contract

_FILE = pathlib.Path(__file__).parent / 'data' / 'run_be0825f.tar.xz'
_EDITS = (
    *('rl.steps=2', 'rl.eval_every_steps=2', 'rl.checkpoint_every_steps=2'),
    *('model.embed=16', 'model.layers=1', 'model.moe_ffn=16'),
    *('model.vocab=320', 'rewards.1.half=160'),
    *('phases.midtrain.steps=1', 'phases.warmup.steps=1'),
)


class OldRunTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = pathlib.Path(self.create_tempdir().full_path)
    with tarfile.open(_FILE) as archive:
      archive.extractall(folder, filter='data')
    self.workdir = folder / 'old_run'

  def _rl(self, *edits):
    command = small_run.command('rl', self.workdir, *_EDITS, *edits)
    # Another machine computes other bits, which is not what is tested.
    return small_run.finished([*command, '--seed=3', '--accept_numeric_change'])

  def _read(self, binary, *more):
    program, *_ = binary.split()
    start = small_run.command(program, self.workdir)[:3]
    done = small_run.finished([*start, *binary.split()[1:], *more])
    self.assertEqual(done.stderr.count('Traceback'), 0, done.stderr)
    return done

  def test_resumes(self):
    # What a kill left of steps that it undid, and of saves.
    undone = [self.workdir / 'trajectories' / n for n in ('000002', '000007')]
    tmp = '9.orbax-checkpoint-tmp'
    failed = [self.workdir / 'checkpoints' / n / tmp for n in ('rl', 'warmup')]
    for folder in undone + failed:
      folder.mkdir()
      (folder / '99-0.traj').write_text('of a step that was undone')
    done = self._rl('rl.steps=3')
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    extra = checkpoint.read_extra(self.workdir / 'checkpoints' / 'rl')
    self.assertEqual(ledger_lib.from_json(extra['ledger']).done, 3)
    kept = [*(self.workdir / 'trajectories' / '000002').glob('*.traj')]
    self.assertNotEmpty(kept)
    for path in kept:
      trajectory = trace.from_bytes(path.read_bytes())
      self.assertStartsWith(trajectory.task_id, 'offline/')
    self.assertFalse(undone[1].exists())
    for folder in failed:
      self.assertFalse(folder.exists(), folder)
    for old in ('000000', '000001'):
      self.assertNotEmpty([*(undone[0].parent / old).glob('*.traj')])
    self.assertEqual(manifest.run_id(self.workdir), 'offline')

  def test_is_finished_if_fewer_steps_are_asked_for(self):
    def content():
      files = (p for p in self.workdir.rglob('*') if p.is_file())
      return {p: p.read_bytes() for p in files if p.name != '.lock'}

    before = content()
    for steps in (1, 2):
      done = self._rl(f'rl.steps={steps}')
      self.assertEqual(done.returncode, 0, done.stderr)
      self.assertIn(
          f'is finished, 2 RL steps are done (rl.steps={steps})', done.stdout
      )
      self.assertNotIn('compiling', done.stdout)
    self.assertEqual(content(), before)
    other = self._rl('rl.steps=1', 'rl.norm_tokens=9')
    self.assertEqual(other.returncode, 2, other.stdout)
    self.assertIn('rl.norm_tokens 8 -> 9', other.stderr)

  def test_replays_and_evaluates(self):
    cache = f'--compilation_cache={small_run.CACHE}'
    workdir = f'--workdir={self.workdir}'
    done = self._read('replay', workdir, cache)
    # Bits are those of a machine.
    facts = manifest.build(
        small_config.experiment(),
        devices=(),
        contract=contract.constants(),
        xla_flags='',
        command='',
    )
    made = json.loads((self.workdir / manifest.FILE).read_text())
    same = ('processor', 'python', 'versions', 'xla_flags')
    if all(made[name] == facts[name] for name in same):
      self.assertIn('2 steps and 16 rollouts replayed', done.stdout)
      self.assertIn('first difference: none', done.stdout)
      self.assertEqual(done.returncode, 0)
    else:
      self.assertIn('rollouts replayed', done.stdout)
    done = self._read('evaluate', workdir, cache, '--version=1')
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn('version 1, ', done.stdout)

  def test_is_shown(self):
    for command in (
        f'inspect run --workdir={self.workdir}',
        f'inspect trajectory --workdir={self.workdir}',
        f'inspect weights --store={self.workdir}/weights --verify',
    ):
      done = self._read(command)
      self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

  def test_is_served(self):
    command = [
        *small_run.command('serve', 'unused')[:3],
        f'--store={self.workdir}/weights',
        f'--capture={self.workdir.parent}/calls',
        f'--compilation_cache={small_run.CACHE}',
        *('--port=0', '--slots=4'),
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=small_run.ROOT,
        env=small_run.environment(COMPOSER_API_KEY='key'),
    ) as process:
      try:
        line = process.stdout.readline()
        url = re.search(r'at (http://127\.0\.0\.1:\d+)/v1', line)[1]
        body = {**serving_kit.ask(), 'model': 'tiny', 'max_tokens': 4}
        with httpx.Client(base_url=url, timeout=300) as http:
          key = serving_kit.bearer('key')
          reply = http.post('/v1/chat/completions', json=body, headers=key)
        self.assertEqual(reply.status_code, 200, reply.text)
      finally:
        process.send_signal(signal.SIGTERM)
      self.assertEqual(process.wait(600), 0)


if __name__ == '__main__':
  absltest.main()
