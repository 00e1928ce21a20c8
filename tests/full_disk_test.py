"""A full disk ends a run in one line, and nothing is lost."""

import errno
import json
import pathlib
import subprocess
import sys

from absl.testing import absltest
from tests import small_run

from composer_jax.sandbox import pool as pool_lib
from experiments import disk

_SIZE = 6_000_000
# Runs `$@` with $LEFT bytes free, then with the rest free, too.
_TWICE = """
head -c $(($SIZE - $LEFT)) /dev/zero > $DIR/filler
"$@"; echo "first: $?"
rm $DIR/filler
"$@"; echo "second: $?"
cp $DIR/run/metrics.jsonl $KEPT
"""

# A loop closed while an operation goes on, as a failed write leaves it.
_LATE = """
import asyncio, threading, tensorstore
from experiments import disk
disk.quiet_threads()
promise, future = tensorstore.Promise.new()
loop = asyncio.new_event_loop()
async def begin(): return future.__await__().send(None)
waiting = loop.run_until_complete(begin())
loop.close()
thread = threading.Thread(target=promise.set_result, args=(1,))
thread.start()
thread.join()
"""


class FullDiskTest(absltest.TestCase):

  def test_a_run_goes_on_when_there_is_space(self):
    if pool_lib.describe().name != 'bubblewrap':
      self.skipTest('a disk of its own needs namespaces')
    folder = pathlib.Path(self.create_tempdir().full_path)
    kept = folder / 'metrics.jsonl'
    full = folder / 'disk'
    full.mkdir()
    command = ['bwrap', '--dev-bind', '/', '/', '--size', str(_SIZE)]
    command += ['--tmpfs', str(full), '--', 'bash', '-c', _TWICE, 'twice']
    done = small_run.finished(
        command + small_run.command('rl', full / 'run', 'rl.steps=2'),
        SIZE=str(_SIZE),
        LEFT='700000',
        DIR=str(full),
        KEPT=str(kept),
    )
    self.assertIn('first: 1', done.stdout, done.stderr)
    self.assertIn('second: 0', done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    said = [line for line in lines if line.startswith('rl: error:')]
    self.assertLen(said, 1)
    self.assertRegex(said[0], 'the disk.* is full; free some')
    self.assertNotIn('Traceback', done.stderr)
    records = map(json.loads, kept.read_text().splitlines())
    steps = [r['step'] for r in records if 'reward/mean' in r]
    self.assertEqual(steps, [1, 2])

  def test_writes_that_end_after_the_first_error_are_silent(self):
    done = subprocess.run(
        [sys.executable, '-c', _LATE], capture_output=True, text=True
    )
    self.assertEqual((done.returncode, done.stderr), (0, ''))

  def test_it_is_found_behind_other_errors(self):
    try:
      try:
        raise OSError(errno.ENOSPC, 'No space left on device', '/a/b')
      except OSError as e:
        raise RuntimeError('saving failed') from e
    except RuntimeError as e:
      self.assertIn('the disk of /a/b is full', disk.full(e))
    self.assertIsNone(disk.full(OSError(errno.EACCES, 'Permission', '/a')))
    self.assertIsNone(disk.full(ValueError("os_error_code='13'")))
    self.assertIsNone(disk.full(None))


if __name__ == '__main__':
  absltest.main()
