"""The serving binaries, as people start and stop them."""

import pathlib
import re
import signal
import socket
import subprocess

from absl.testing import absltest
import httpx

from tests import served_store
from tests import serving_kit as lib
from tests import small_run


class BinaryTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def _command(self, binary, *more):
    return [
        *small_run.command(binary, 'unused')[:3],
        f'--store={self.folder}/weights',
        f'--capture={self.folder}/calls',
        f'--compilation_cache={small_run.CACHE}',
        '--slots=4',
        *more,
    ]

  def test_serves_until_it_is_told_to_stop(self):
    served_store.Store(self.folder)
    secret = self.folder / 'key'
    secret.write_text('chosen\n')
    with subprocess.Popen(
        self._command('serve', '--port=0', f'--api_key_file={secret}'),
        stdout=subprocess.PIPE,
        text=True,
        cwd=small_run.ROOT,
        env=small_run.environment(),
    ) as process:
      line = process.stdout.readline()
      url = re.search(r'at (http://127\.0\.0\.1:\d+)/v1', line)[1]
      self.assertIn('weights version 0', line)
      self.assertEqual(process.stdout.readline(), 'API key: as given\n')
      with httpx.Client(base_url=url, timeout=60) as http:
        body = {**lib.ask(), 'model': lib.EXPERIMENT.name}
        reply = http.post(
            '/v1/chat/completions', json=body, headers=lib.bearer('chosen')
        )
        self.assertEqual(reply.status_code, 200, reply.text)
        self.assertEqual(http.get('/ready').status_code, 200)
      process.send_signal(signal.SIGTERM)
      self.assertEqual(process.wait(60), 0)

  def test_refusals_are_one_line(self):
    served_store.Store(self.folder)
    with socket.create_server(('127.0.0.1', 0)) as taken:
      port = taken.getsockname()[1]
      for binary, more, text in (
          ('rollout_host', [f'--port={port}'], 'another process listens there'),
          ('serve', ['--store=/no/such'], 'no such directory'),
          ('serve', ['--api_key_file=/no/such'], 'No such file'),
      ):
        with self.subTest(text):
          done = small_run.finished(self._command(binary, *more))
          self.assertEqual(done.returncode, 2, done.stderr)
          self.assertIn(text, done.stderr)
          lines = done.stderr.strip().splitlines()
          self.assertLen([s for s in lines if not s.startswith('starting')], 1)


if __name__ == '__main__':
  absltest.main()
