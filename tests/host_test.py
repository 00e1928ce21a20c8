"""A host around a store that says what it holds."""

import asyncio
import dataclasses
import pathlib
import socket
import time

from absl.testing import absltest
from absl.testing import parameterized
import httpx
import jax
from tests import served_store
from tests import serving_kit as lib

from composer_jax import rope
from composer_jax.runs import stored_model
from composer_jax.serving import gateway
from composer_jax.serving import host as host_lib
from composer_jax.serving import server
from composer_jax.weights import records
from composer_jax.weights import store as store_lib


class StoredModelTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.store = served_store.Store(self.folder)

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

  @parameterized.parameters(rope.Yarn(4.0, 64), rope.Llama3(8.0, 64, 1.0, 4.0))
  def test_positions_come_back(self, scaling):
    model = dataclasses.replace(lib.EXPERIMENT.model, rope_scaling=scaling)
    stored = dataclasses.replace(self.store.model, model=model)
    url = f'file://{self.folder}/other/'
    stored_model.write(url, stored)
    self.assertEqual(stored_model.read(url), stored)

  def test_what_is_missing_or_damaged_is_named(self):
    weights = self.folder / 'weights'
    tokenizer = weights / stored_model.TOKENIZER
    tokenizer.write_text(tokenizer.read_text() + ' ')
    with self.assertRaisesRegex(ValueError, 'tokenizer.json: does not match'):
      stored_model.read(self.store.url)
    (weights / stored_model.MODEL).unlink()
    with self.assertRaisesRegex(ValueError, 'model.json: missing.*one step'):
      stored_model.read(self.store.url)

  def test_every_flipped_bit_is_found(self):
    path = self.folder / 'weights' / stored_model.MODEL
    data = path.read_bytes()
    for at in range(8 * len(data)):
      flipped = bytearray(data)
      flipped[at // 8] ^= 1 << at % 8
      self.assertFalse(flipped.endswith(b'}'), at)  # no bare object
      with self.assertRaises(records.StoreError, msg=at):
        records.opened(bytes(flipped), 'it', 'restore it')
      if at % 8 == at // 8 % 8:  # of every byte one, all the way
        path.write_bytes(flipped)
        with self.assertRaisesRegex(ValueError, 'model.json: content.*copy'):
          stored_model.read(self.store.url)
    path.write_bytes(data)
    self.assertEqual(stored_model.read(self.store.url), self.store.model)

  def test_one_without_a_seal_is_read_and_sealed_by_its_run(self):
    path = self.folder / 'weights' / stored_model.MODEL
    data = path.read_bytes()
    bare = data.rpartition(b'\n')[0]
    path.write_bytes(bare)
    self.assertEqual(stored_model.read(self.store.url), self.store.model)
    path.write_bytes(bare.replace(b'"stop"', b'"stap"'))
    with self.assertRaisesRegex(ValueError, 'model.json: damaged'):
      stored_model.read(self.store.url)
    with self.assertRaisesRegex(ValueError, 'another model'):
      stored_model.write(self.store.url, self.store.model)
    path.write_bytes(bare)
    stored_model.write(self.store.url, self.store.model)
    self.assertEqual(path.read_bytes(), data)


class HostTest(absltest.TestCase):

  def test_serves_and_follows(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    store = served_store.Store(folder)
    asked = host_lib.Settings(
        store.url,
        folder / 'calls',
        time.time,
        port=0,
        slots=lib.ROLLOUT.slots,
        drain_seconds=0.2,
    )
    with host_lib.Host(asked, devices=jax.devices()[:1]) as host:
      self.assertIn('weights version 0', host.describe())
      gate = gateway.EndpointGateway(host.service, host.server)
      access = asyncio.run(gate.open('r', 3))
      header = lib.bearer(access.api_key)
      with httpx.Client(base_url=access.base_url, timeout=600) as http:
        body = {**lib.ask(), 'model': access.model}

        def call():
          reply = http.post('/chat/completions', json=body, headers=header)
          return reply.json()['choices'][0]['weights_version']

        self.assertEqual(call(), 0)
        store.publisher.publish(1, served_store.named(1))
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
        host_lib.Host(asked, devices=jax.devices()[:1]).__enter__()


class BindTest(absltest.TestCase):

  def test_a_taken_port_is_one_line(self):
    with socket.create_server(('127.0.0.1', 0)) as taken:
      port = taken.getsockname()[1]
      with self.assertRaisesRegex(ValueError, f'port {port}: another.*--port'):
        server.bind('127.0.0.1', port)


if __name__ == '__main__':
  absltest.main()
