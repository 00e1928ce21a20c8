"""The work queue over a real NATS server, and payloads in real stores."""

import asyncio
import itertools
import shutil
import tempfile
import unittest

from absl.testing import absltest
from tests import nats_server
from tests import remote_store_test

from composer_jax.fleet import blobs as blobs_lib
from composer_jax.fleet import conformance
from composer_jax.fleet import inprocess
from composer_jax.fleet import nats
from composer_jax.fleet import nats_client
from composer_jax.fleet import queue as queue_lib
from composer_jax.fleet import store_blobs

_POOLS = ('rollout', 'gpu')


class InProcessTest(
    conformance.QueueConformance, unittest.IsolatedAsyncioTestCase
):

  async def queue(self, lease_seconds=conformance.LEASE):
    return inprocess.InProcessQueue(
        lease_seconds=lease_seconds, max_attempts=conformance.ATTEMPTS
    )


class _Served(unittest.IsolatedAsyncioTestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, folder, ignore_errors=True)
    cls.server = nats_server.Server(folder)
    cls.addClassCleanup(cls.server.kill)
    cls.numbers = itertools.count()

  async def connect(self):
    client = await nats_client.connect(self.server.url)
    self.addAsyncCleanup(client.close)
    return client


class NatsTest(conformance.QueueConformance, _Served):

  async def queue(self, lease_seconds=conformance.LEASE):
    client = await self.connect()
    if await nats_client.runs(client):
      await client.jetstream().delete_stream('RUN_run')
    made = nats.NatsQueue(client, 'run', conformance.ATTEMPTS)
    return await made.create(lease_seconds, {'run': 'run'}, _POOLS)


class KilledServerTest(_Served):

  async def test_a_server_that_is_killed_delays_and_loses_nothing(self):
    trainer = await nats.NatsQueue(await self.connect(), 'run').create(
        5.0, {}, _POOLS
    )
    host = nats.NatsQueue(await self.connect(), 'run')
    done, seen = [], []

    async def offer():
      for i in range(40):
        await trainer.offer(f'run/{i}/0', {'seed': i})
        await asyncio.sleep(0.05)

    async def work():
      while len(done) < 40:
        lease = await host.lease('rollout', 5.0)
        if lease is not None:
          ref = queue_lib.ResultRef(
              lease.id, blobs_lib.BlobRef(lease.blob, 1, 'x')
          )
          if await host.complete(lease, ref) == 'accepted':
            done.append(lease.id)

    async def collect():
      async for _, ref in trainer.results(0):
        seen.append(ref.task_id)
        if len(set(seen)) == 40:
          return

    async def kill():
      for _ in range(3):
        await asyncio.sleep(1.0)
        await asyncio.to_thread(self.server.kill)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(self.server.start)

    async with asyncio.timeout(300):
      await asyncio.gather(offer(), work(), work(), collect(), kill())
    ids = sorted(f'run/{i}/0' for i in range(40))
    self.assertEqual(sorted(done), ids)
    self.assertEqual(sorted(set(seen)), ids)


class WrongTest(_Served):

  async def test_nobody_there_is_one_line(self):
    port = nats_server.free_port()
    with self.assertRaisesRegex(ValueError, f'queue nats://127.0.0.1:{port}: '):
      await nats_client.connect(f'nats://127.0.0.1:{port}')

  async def test_a_run_that_is_not_there_is_one_line(self):
    other = nats.NatsQueue(await self.connect(), 'other')
    with self.assertRaisesRegex(ValueError, 'run=other: not on this server'):
      await other.about()
    with self.assertRaisesRegex(ValueError, "run='a b': want letters"):
      nats.NatsQueue(await self.connect(), 'a b')


class MemoryBlobsTest(
    conformance.BlobsConformance, unittest.IsolatedAsyncioTestCase
):

  async def blobs(self):
    return blobs_lib.MemoryBlobs()


class FileBlobsTest(
    conformance.BlobsConformance, unittest.IsolatedAsyncioTestCase
):

  async def blobs(self):
    folder = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, folder)
    return store_blobs.StoreBlobs(f'file://{folder}/blobs')


class S3BlobsTest(
    conformance.BlobsConformance, unittest.IsolatedAsyncioTestCase
):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.bucket = cls.enterClassContext(remote_store_test.bucket())

  async def blobs(self):
    return store_blobs.StoreBlobs(self.bucket.url(self.id()))


if __name__ == '__main__':
  absltest.main()
