"""A host around a store, and the binaries that people start."""

import asyncio
import dataclasses
import pathlib
import re
import signal
import socket
import subprocess
import time

from absl.testing import absltest
import httpx
import jax
import ml_dtypes
import numpy as np
from tests import serving_kit as lib
from tests import small_run

from composer_jax.model import params as params_lib
from composer_jax.runs import gateway
from composer_jax.runs import serving
from composer_jax.runs import stored_model
from composer_jax.weights import publish
from composer_jax.weights import store as store_lib


def _named(seed):
  named = params_lib.names(lib.params(seed))
  return {k: np.asarray(v, ml_dtypes.bfloat16) for k, v in named.items()}


class _Store:
  """A store with one version and its model."""

  def __init__(self, folder):
    self.url = f'file://{folder}/weights/'
    self.publisher = publish.Publisher(self.url, lib.EXPERIMENT.weights, 'a')
    self.publisher.publish(0, _named(0))
    self.model = stored_model.trained_here(
        lib.EXPERIMENT, lib.tokenizer().to_str()
    )
    stored_model.write(self.url, self.model)


class StoredModelTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.store = _Store(self.folder)

  def test_it_comes_back_and_is_written_once(self):
    found = stored_model.read(self.store.url)
    self.assertEqual(found, self.store.model)
    messages = lib.ask()['messages']
    self.assertNotEmpty(found.chat_format().prompt(messages))
    path = self.folder / 'weights' / stored_model.MODEL
    before = path.stat()
    stored_model.write(self.store.url, self.store.model)
    self.assertEqual(path.stat().st_mtime_ns, before.st_mtime_ns)
    wider = dataclasses.replace(lib.EXPERIMENT.model, layers=3)
    other = dataclasses.replace(self.store.model, model=wider)
    with self.assertRaisesRegex(ValueError, 'another model'):
      stored_model.write(self.store.url, other)
    self.assertEqual(stored_model.read(self.store.url), self.store.model)

  def test_what_is_missing_or_damaged_is_named(self):
    weights = self.folder / 'weights'
    tokenizer = weights / stored_model.TOKENIZER
    tokenizer.write_text(tokenizer.read_text() + ' ')
    with self.assertRaisesRegex(ValueError, 'tokenizer.json: does not match'):
      stored_model.read(self.store.url)
    (weights / stored_model.MODEL).unlink()
    with self.assertRaisesRegex(ValueError, 'model.json: missing.*one step'):
      stored_model.read(self.store.url)


class HostTest(absltest.TestCase):

  def test_serves_and_follows(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    store = _Store(folder)
    asked = serving.Settings(
        store.url,
        folder / 'calls',
        time.time,
        port=0,
        slots=lib.ROLLOUT.slots,
        drain_seconds=0.2,
    )
    with serving.Host(asked, devices=jax.devices()[:1]) as host:
      self.assertIn('weights version 0', host.describe())
      gate = gateway.EndpointGateway(host.service, host.server)
      access = asyncio.run(gate.open('r', 3))
      header = lib.bearer(access.api_key)
      with httpx.Client(base_url=access.base_url, timeout=60) as http:
        body = {**lib.ask(), 'model': access.model}

        def call():
          reply = http.post('/chat/completions', json=body, headers=header)
          return reply.json()['choices'][0]['weights_version']

        self.assertEqual(call(), 0)
        store.publisher.publish(1, _named(1))
        lib.wait(lambda: call() == 1)
        self.assertEqual(call(), 1)
        (line,) = host.news()
        self.assertRegex(line, r'weights version 1 \(\w{12}\) in use')
        self.assertEmpty([*host.news()])
        digests = host.engine.digests
      segments = asyncio.run(gate.close('r'))
      for step in (0, 1):  # some call may have seen both
        own = [s for s in segments if set(s.versions) == {step}]
        lib.check_rescored(self, own)
      newest, _ = store_lib.Store(store.url).latest()
      self.assertEqual(digests[1], newest.root)
      with self.assertRaisesRegex(ValueError, 'capture=.*locked'):
        serving.Host(asked, devices=jax.devices()[:1]).__enter__()


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
    _Store(self.folder)
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
    _Store(self.folder)
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
          self.assertLen(done.stderr.strip().splitlines(), 1)


if __name__ == '__main__':
  absltest.main()
