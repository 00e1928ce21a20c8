"""What is answered is on disk first, and outlives a kill -9."""

import json
import pathlib
import signal
import subprocess
import sys
import urllib.request

from absl.testing import absltest
from tests import graph_cases
from tests import serving_kit
from tests import small_run

from composer_jax.serving import capture
from composer_jax.serving import graph

_HOST = """
import os, signal, sys
import jax
jax.config.update('jax_compilation_cache_dir', sys.argv[2])
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
from composer_jax.serving import capture
from tests import serving_kit

answer = capture.Capture.answer

def kill(*args):  # once the reply is on disk, before anybody has it
  answer(*args).result()
  os.kill(os.getpid(), signal.SIGKILL)

capture.Capture.answer = kill
kit = serving_kit.Kit(sys.argv[1])
kit.server.call(kit.service.open('r', 7, 'train', 'the-key'))
print(kit.url, flush=True)
sys.stdin.read()
"""


def _admission(number, **fields):
  values = dict(
      number=number,
      choices=1,
      identity=b'i%d' % number,
      body=b'b',
      request=b'{}',
      tools=b't',
  )
  return capture.Admission(**(values | fields))


class CaptureTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.capture = capture.Capture(self.folder)
    self.addCleanup(lambda: self.capture.close())

  def _again(self):
    self.capture.close()
    self.capture = capture.Capture(self.folder)

  def test_calls_come_back_as_they_were(self):
    calls, windows, _ = graph_cases.rollout(
        [(-1, [0, 1], 3), (0, [2], 2), (-1, [1], 1), (1, [], 4)]
    )
    self.capture.open('r', b's', 'train', 2**64 - 1).result()
    for call in calls:
      self.capture.admit('r', _admission(call.number)).result()
      reply = json.dumps({'n': call.number})
      self.capture.answer('r', [call], ['stop'], reply).result()
    self._again()
    stored = self.capture.rollout(secret=b's').result()
    self.assertEqual(stored, ('r', 'train', 2**64 - 1, False, None))
    self.assertEqual(self.capture.rollout(name='r').result(), stored)
    loaded, pending, following = self.capture.load('r').result()
    self.assertEqual((pending, following), (set(), 4))
    for call, window in zip(loaded, windows, strict=True):
      graph_cases.same(graph.window(call), window)
      self.assertEqual(call.digests, {0: 'digest'})
    self.assertIs(loaded[3].parent, loaded[1])
    again = graph.segments(loaded)
    for a, b in zip(again, graph.segments(calls), strict=True):
      graph_cases.same(a, b)
    self.assertEqual(self.capture.find('r', b'i2').result().reply, '{"n": 2}')
    self.assertIsNone(self.capture.find('r', b'?').result())
    self.assertIsNone(self.capture.find('q', b'i2').result())

  def test_disk_holds_what_is_new_only(self):
    calls, _, _ = graph_cases.rollout([(i - 1, [1] * 9, 9) for i in range(40)])
    self.capture.open('r', b's', 'train', 0)
    for call in calls:
      self.capture.admit('r', _admission(call.number))
      done = self.capture.answer('r', [call], ['stop'], '{}')
    done.result()
    size = self.capture._db.execute('SELECT SUM(LENGTH(rows)) FROM calls')
    self.assertLess(size.fetchone()[0], 40 * 1000)

  def test_what_was_admitted_only_is_found_lost(self):
    self.capture.open('r', b's', 'train', 0)
    self.capture.admit('r', _admission(0))
    self.capture.admit('r', _admission(1, choices=3))
    self.capture.admit('r', _admission(4))
    self.capture.cancel('r', 1, 2).result()
    self._again()
    self.assertEqual(self.capture.load('r').result(), ([], {0, 3, 4}, 5))

  def test_an_id_and_a_key_are_used_once(self):
    self.capture.open('r', b's', 'train', 0).result()
    for name, secret in (('r', b't'), ('q', b's')):
      with self.assertRaisesRegex(ValueError, 'already in use'):
        self.capture.open(name, secret, 'train', 0).result()
    self.capture.open('q', b't', 'train', 0).result()  # the batch went on
    self.capture.close_rollout('q').result()
    self.capture.finish('r', '{}').result()
    self.assertTrue(self.capture.rollout(name='q').result().closed)
    self.assertEqual(self.capture.rollout(name='r').result().finish, '{}')

  def test_a_disk_that_fails_is_an_error_for_everybody_who_waits(self):
    self.capture.open('r', b's', 'train', 0).result()
    pages = self.capture._db.execute('PRAGMA page_count').fetchone()[0]
    self.capture._db.execute(f'PRAGMA max_page_count = {pages}')
    big = _admission(0, request=b'x' * 100_000)
    with self.assertRaisesRegex(OSError, 'full'):
      self.capture.admit('r', big).result()
    self.capture._db.execute('PRAGMA max_page_count = 100000')
    self.capture.admit('r', big).result()

  def test_one_process_at_a_time(self):
    with self.assertRaisesRegex(ValueError, 'locked.*folder of its own'):
      capture.Capture(self.folder)


class KillTest(absltest.TestCase):

  def _post(self, url, retries):
    body = {'model': 'tiny', 'messages': [{'role': 'user', 'content': 'a'}]}
    request = urllib.request.Request(
        f'{url}/v1/chat/completions',
        json.dumps(
            {**body, 'max_tokens': 9, 'return_token_ids': True}
        ).encode(),
        {'Authorization': 'Bearer the-key', 'x-stainless-retry-count': retries},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
      return json.load(answer)

  def test_a_retry_after_a_kill_between_capture_and_reply(self):
    folder = self.create_tempdir().full_path
    with subprocess.Popen(
        [sys.executable, '-c', _HOST, folder, str(small_run.CACHE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=small_run.ROOT,
        env=small_run.environment(),
    ) as process:
      url = process.stdout.readline().strip()
      with self.assertRaises(OSError):
        self._post(url, '0')
    self.assertEqual(process.returncode, -signal.SIGKILL)
    kit = serving_kit.Kit(folder)
    self.addCleanup(kit.close)
    reply = self._post(kit.url, '1')
    self.assertLen(reply['choices'][0]['token_ids'], 9)
    self.assertEqual(kit.engine.stats().decoded_tokens, 0)
    (segment,) = kit.segments('r')  # nothing is missing
    drawn = segment.tokens[segment.sampled].tolist()
    self.assertEqual(drawn, reply['choices'][0]['token_ids'])
    serving_kit.check_rescored(self, [segment])


if __name__ == '__main__':
  absltest.main()
