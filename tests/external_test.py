"""Foreign harnesses over loopback: a program and a service, well and ill."""

import asyncio
import contextlib
import http.server
import json
import pathlib
import sys
import threading
import time
import unittest
import urllib.request

from absl.testing import absltest
import numpy as np

from composer_jax import task
from composer_jax import trace
from composer_jax.agents import external

_TASK = task.Task('t', 'Fix it.', {'sol.py': 'x = 1\n', 'a/b.txt': 'é'}, ())
_WINDOW = trace.TokenTrace(
    tokens=np.arange(4, dtype=np.int32),
    sampled=np.array([0, 0, 1, 1], np.bool_),
    logps=np.zeros(4, np.float32),
    versions=np.zeros(4, np.int32),
)
_ASK = """
import json, os, pathlib, sys, urllib.request
request = urllib.request.Request(
    os.environ['OPENAI_BASE_URL'] + '/chat/completions',
    json.dumps({'model': os.environ['OPENAI_MODEL']}).encode(),
    {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']})
answer = json.load(urllib.request.urlopen(request))['text']
pathlib.Path('sol.py').write_text(answer + os.environ['TASK_INSTRUCTION'])
"""


class _Endpoint:
  """A loopback server that answers, keeps and finishes."""

  def __init__(self, lost=False):
    self._lost = lost
    self.keys, self.calls = {}, []
    self._ends: dict[str, external.Finish] = {}
    endpoint = self

    class Handler(http.server.BaseHTTPRequestHandler):

      def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        if self.path.endswith('/finish'):
          rollout = self.path.split('/')[-2]
          endpoint._ends[rollout] = external.Finish(**body)
        else:
          key = self.headers['Authorization'].removeprefix('Bearer ')
          endpoint.calls.append((endpoint.keys[key], body['model']))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"text": "x = 2\\n# "}')

      def log_message(self, *args):
        pass

    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=self._server.serve_forever, daemon=True).start()
    self.url = 'http://127.0.0.1:%d/v1' % self._server.server_port

  async def open(self, rollout_id, seed):
    self.keys[f'key-{rollout_id}-{seed}'] = rollout_id
    return external.Access(self.url, f'key-{rollout_id}-{seed}', 'tiny')

  async def finished(self, rollout_id):
    while rollout_id not in self._ends:
      await asyncio.sleep(0.01)
    return self._ends[rollout_id]

  async def close(self, rollout_id):
    if self._lost:
      raise ConnectionError('a call was lost')
    return (_WINDOW,) * sum(r == rollout_id for r, _ in self.calls)

  def stop(self):
    self._server.shutdown()
    self._server.server_close()


def _python(source, **kwargs):
  return external.SubprocessHarness((sys.executable, '-c', source), **kwargs)


class SubprocessTest(unittest.IsolatedAsyncioTestCase):

  def setUp(self):
    self.endpoint = _Endpoint()
    self.addCleanup(self.endpoint.stop)

  async def _play(self, source, **kwargs):
    return await _python(source, **kwargs).run(_TASK, 'r', self.endpoint, 7)

  async def test_a_program_asks_and_edits(self):
    episode = await self._play(_ASK)
    self.assertEqual(episode.stop, trace.StopReason.FINISHED)
    self.assertEqual(
        episode.submission, {'sol.py': 'x = 2\n# Fix it.', 'a/b.txt': 'é'}
    )
    self.assertEqual(self.endpoint.calls, [('r', 'tiny')])
    self.assertEqual(episode.segments, (_WINDOW,))
    self.assertEqual(episode.meta, {'code': '0'})

  async def test_a_deadline_kills_the_family_and_keeps_the_work(self):
    marker = f'{time.time_ns() % 10**6 + 10**6}.5'
    start = time.monotonic()
    episode = await self._play(
        f'{_ASK}\nimport subprocess\nsubprocess.run(["sleep", "{marker}"])',
        seconds=10.0,
    )
    self.assertLess(time.monotonic() - start, 600)
    self.assertEqual(episode.stop, trace.StopReason.TIMEOUT)
    self.assertEqual(episode.submission['sol.py'], 'x = 2\n# Fix it.')
    for entry in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
      with contextlib.suppress(OSError):
        self.assertNotIn(marker.encode(), entry.read_bytes())

  async def test_links_devices_and_floods_are_left_out(self):
    episode = await self._play(
        _ASK + 'os.symlink("/etc/passwd", "link"); os.mkfifo("pipe")\n'
        'os.symlink("/etc", "dir"); open("bin", "wb").write(b"\\xff")\n'
        'os.makedirs("z/z"); open("z/z/big", "w").write("x" * 5000)',
        kept_bytes=3000,
    )
    self.assertEqual(sorted(episode.submission), ['a/b.txt', 'sol.py'])

  async def test_failures_have_their_class(self):
    never = await self._play('import sys; sys.exit(3)')
    self.assertEqual(never.stop, trace.StopReason.POLICY_FAILURE)
    self.assertEqual(never.meta['code'], '3')
    self.assertEqual(never.submission, dict(_TASK.files))
    missing = external.SubprocessHarness(('/no/such/program',))
    episode = await missing.run(_TASK, 'r', self.endpoint, 0)
    self.assertEqual(episode.stop, trace.StopReason.INFRA_ERROR)
    self.assertIsNone(episode.submission)
    lost = _Endpoint(lost=True)
    self.addCleanup(lost.stop)
    episode = await _python(_ASK).run(_TASK, 'r', lost, 0)
    self.assertEqual(episode.stop, trace.StopReason.INFRA_ERROR)
    self.assertIsNone(episode.submission)


class ServiceTest(unittest.IsolatedAsyncioTestCase):

  def setUp(self):
    self.endpoint = _Endpoint()
    self.addCleanup(self.endpoint.stop)
    self.mode = 'work'
    test = self

    class Handler(http.server.BaseHTTPRequestHandler):

      def do_POST(self):
        job = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        self.send_response(500 if test.mode == 'broken' else 202)
        self.end_headers()
        if test.mode in ('work', 'fail', 'grade'):
          threading.Thread(target=test.work, args=[job]).start()

      def log_message(self, *args):
        pass

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    self.addCleanup(server.server_close)
    self.addCleanup(server.shutdown)
    self.url = f'http://127.0.0.1:{server.server_port}/tasks'

  def work(self, job):
    def post(path, body):
      request = urllib.request.Request(
          job['base_url'] + path,
          json.dumps(body).encode(),
          {'Authorization': f'Bearer {job["api_key"]}'},
      )
      urllib.request.urlopen(request).close()

    post('/chat/completions', {'model': job['model']})
    files = {**job['files'], 'sol.py': job['instruction']}
    body = {'submission': files, 'status': 'done'}
    if self.mode == 'grade':
      body = {'submission': None, 'status': 'graded', 'reward': 0.25}
    if self.mode == 'fail':
      body = {'submission': None, 'status': 'gave up'}
    post(f'/rollouts/{job["rollout_id"]}/finish', body)

  async def _play(self, mode, seconds=30.0):
    self.mode = mode
    harness = external.ExternalHarness(self.url, seconds)
    return await harness.run(_TASK, f'r-{mode}', self.endpoint, 7)

  async def test_a_service_works_and_finishes(self):
    episode = await self._play('work')
    self.assertEqual(episode.stop, trace.StopReason.FINISHED)
    self.assertEqual(episode.submission['sol.py'], 'Fix it.')
    self.assertEqual(episode.segments, (_WINDOW,))
    self.assertEqual(episode.meta, {'status': 'done'})

  async def test_a_service_may_grade_its_own_work(self):
    episode = await self._play('grade')
    self.assertEqual(episode.stop, trace.StopReason.FINISHED)
    self.assertEqual(episode.meta, {'status': 'graded', 'reward': '0.25'})

  async def test_what_goes_wrong_has_its_class(self):
    failed = await self._play('fail')
    self.assertEqual(failed.stop, trace.StopReason.POLICY_FAILURE)
    self.assertEqual(failed.submission, dict(_TASK.files))
    broken = await self._play('broken')
    self.assertEqual(broken.stop, trace.StopReason.INFRA_ERROR)
    self.assertIsNone(broken.submission)
    silent = await self._play('silent', seconds=0.5)
    # It never asked the policy, so there is nothing to train on either.
    self.assertEqual(silent.stop, trace.StopReason.POLICY_FAILURE)
    self.assertEqual(silent.segments, ())


if __name__ == '__main__':
  absltest.main()
