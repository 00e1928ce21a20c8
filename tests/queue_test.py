"""Leases, redelivery, duplicates, cursors and the version pointer."""

import asyncio
import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from composer_jax import trace
from composer_jax.fleet import blobs as blobs_lib
from composer_jax.fleet import inprocess
from composer_jax.fleet import queue as queue_lib
from tests import fleet_sim

LEASE = 10.0


async def put(blobs, lease, data):
  return queue_lib.ResultRef(lease.id, await blobs.put(lease.blob, data))


def version(step, parent=None):
  return trace.WeightVersion(step, f'digest{step}', parent)


def make(**kwargs):
  return inprocess.InProcessQueue(lease_seconds=LEASE, max_attempts=3, **kwargs)


class QueueTest(parameterized.TestCase):

  def run_virtual(self, test):
    fleet_sim.run(test())

  def test_a_task_travels_from_offer_to_result(self):
    async def test():
      q, blobs = make(), blobs_lib.MemoryBlobs()
      await q.publish_version(version(4))
      await q.offer('run/0/0', {'seed': 7})
      lease = await q.lease('rollout', 1.0)
      self.assertEqual(
          (lease.id, lease.spec, lease.version, lease.attempt),
          ('run/0/0', {'seed': 7}, 4, 1),
      )
      ref = await put(blobs, lease, b'payload')
      self.assertEqual(await q.complete(lease, ref), 'accepted')
      self.assertEqual(await anext(q.results(0)), (1, ref))
      self.assertEqual(await blobs.get(ref.blob), b'payload')
      self.assertEqual(await q.complete(lease, ref), 'duplicate')
      self.assertIsNone(await q.lease('rollout', 1.0))

    self.run_virtual(test)

  def test_pools_are_separate_and_first_offered_is_first_leased(self):
    async def test():
      q = make()
      await q.offer('run/0/0', {})
      await q.offer('run/0/1', {'pool': 'gpu'})
      await q.offer('run/1/0', {})
      ids = [(await q.lease('rollout', 1.0)).id for _ in range(2)]
      self.assertEqual(ids, ['run/0/0', 'run/1/0'])
      self.assertIsNone(await q.lease('rollout', 1.0))
      self.assertEqual((await q.lease('gpu', 1.0)).id, 'run/0/1')

    self.run_virtual(test)

  def test_a_waiting_worker_gets_the_task_as_soon_as_it_is_offered(self):
    async def test():
      q = make()
      waiting = asyncio.create_task(q.lease('rollout', 100.0))
      await asyncio.sleep(30.0)
      await q.offer('run/0/0', {})
      self.assertEqual((await waiting).id, 'run/0/0')
      self.assertEqual(asyncio.get_running_loop().time(), 30.0)

    self.run_virtual(test)

  def test_a_hung_worker_loses_its_lease_and_its_late_result(self):
    async def test():
      q, blobs = make(), blobs_lib.MemoryBlobs()
      await q.offer('run/0/0', {})
      hung = await q.lease('rollout', 0.0)
      self.assertIsNone(await q.lease('rollout', 0.9 * LEASE))
      redelivered = await q.lease('rollout', 0.2 * LEASE)
      self.assertEqual(redelivered.attempt, 2)
      self.assertNotEqual(redelivered.token, hung.token)
      self.assertFalse(await q.extend(hung))
      late = await put(blobs, hung, b'late')
      good = await put(blobs, redelivered, b'good')
      self.assertEqual(await q.complete(hung, late), 'duplicate')
      self.assertEqual(await q.complete(redelivered, good), 'accepted')
      self.assertEqual(await q.complete(hung, late), 'duplicate')
      await blobs.delete([late.blob.name])  # what a worker does on 'duplicate'
      self.assertEqual((await anext(q.results(0)))[1], good)
      self.assertEqual(await blobs.get(good.blob), b'good')

    self.run_virtual(test)

  def test_a_redelivered_task_goes_before_younger_ones(self):
    async def test():
      q = make()
      for i in range(3):
        await q.offer(f'run/{i}/0', {})
      oldest = await q.lease('rollout', 0.0)
      await q.release(oldest, retry=True)
      self.assertEqual((await q.lease('rollout', 0.0)).id, 'run/0/0')

    self.run_virtual(test)

  def test_extending_keeps_a_lease_beyond_its_first_deadline(self):
    async def test():
      q = make()
      await q.offer('run/0/0', {})
      lease = await q.lease('rollout', 0.0)
      for _ in range(5):
        await asyncio.sleep(0.8 * LEASE)
        self.assertTrue(await q.extend(lease))
      await asyncio.sleep(1.01 * LEASE)
      self.assertFalse(await q.extend(lease))

    self.run_virtual(test)

  def test_work_of_any_length_keeps_its_lease(self):
    async def test():
      q = make()
      await q.offer('run/0/0', {})
      lease = await q.lease('rollout', 0.0)
      work = asyncio.sleep(10.5 * LEASE, 'done')
      self.assertEqual(await queue_lib.keep(q, lease, LEASE, work), 'done')
      self.assertTrue(await q.extend(lease))

    self.run_virtual(test)

  def test_work_of_a_lost_lease_is_abandoned(self):
    async def test():
      q, ended = make(), []

      async def work():
        try:
          await asyncio.sleep(100 * LEASE)
        finally:
          ended.append(asyncio.get_running_loop().time())

      await q.offer('run/0/0', {})
      lease = await q.lease('rollout', 0.0)
      kept = asyncio.ensure_future(queue_lib.keep(q, lease, LEASE, work()))
      await asyncio.sleep(LEASE)
      await q.release(lease, retry=True)
      self.assertIsNone(await kept)
      self.assertLess(ended[0], 1.5 * LEASE)  # within a sign of life

    self.run_virtual(test)

  def test_work_that_fails_says_so(self):
    async def test():
      async def work():
        raise ZeroDivisionError

      q = make()
      await q.offer('run/0/0', {})
      lease = await q.lease('rollout', 0.0)
      with self.assertRaises(ZeroDivisionError):
        await queue_lib.keep(q, lease, LEASE, work())

    self.run_virtual(test)

  @parameterized.parameters('hang', 'retry', 'give_up')
  def test_a_task_nobody_finishes_is_delivered_as_lost(self, how):
    async def test():
      q = make()
      await q.offer('run/0/0', {})
      attempts = 0
      while (lease := await q.lease('rollout', 2 * LEASE)) is not None:
        attempts += 1
        if how != 'hang':
          await q.release(lease, retry=how == 'retry')
      cursor, ref = await anext(q.results(0))
      self.assertEqual(attempts, 1 if how == 'give_up' else 3)
      self.assertEqual(cursor, 1)
      self.assertEqual(ref, queue_lib.ResultRef('run/0/0', None))
      self.assertTrue(ref.lost)

    self.run_virtual(test)

  def test_hung_workers_wedge_nothing_although_nobody_leases(self):
    async def test():
      q = inprocess.InProcessQueue(lease_seconds=LEASE, max_attempts=1)
      await q.offer('run/0/0', {})
      await q.lease('rollout', 0.0)
      _, ref = await anext(q.results(0))  # a deadlock would raise here
      self.assertTrue(ref.lost)
      self.assertEqual(asyncio.get_running_loop().time(), LEASE)

    self.run_virtual(test)

  def test_a_stalled_loop_expires_nobody_but_hung_workers(self):
    async def test():
      q = make()
      await q.offer('run/0/0', {})
      await q.offer('run/1/0', {})
      healthy = await q.lease('rollout', 0.0)
      hung = await q.lease('rollout', 0.0)
      asyncio.get_running_loop().stall(3 * LEASE)
      await asyncio.sleep(0)
      await asyncio.sleep(0)
      self.assertTrue(await q.extend(healthy))
      await asyncio.sleep(0.9 * LEASE)
      self.assertTrue(await q.extend(healthy))
      await asyncio.sleep(0.9 * LEASE)
      self.assertTrue(await q.extend(healthy))
      self.assertFalse(await q.extend(hung))

    self.run_virtual(test)

  def test_results_resume_from_a_cursor(self):
    async def test():
      q, blobs = make(cursor=40), blobs_lib.MemoryBlobs()
      refs = []
      for i in range(4):
        await q.offer(f'run/{i}/0', {})
        lease = await q.lease('rollout', 0.0)
        refs.append(await put(blobs, lease, b'x' * i))
        await q.complete(lease, refs[-1])
      reader = q.results(40)
      first_two = [await anext(reader), await anext(reader)]
      self.assertEqual(first_two, [(41, refs[0]), (42, refs[1])])
      resumed = q.results(42)
      self.assertEqual(await anext(resumed), (43, refs[2]))
      self.assertEqual(await anext(resumed), (44, refs[3]))
      waiting = asyncio.ensure_future(anext(resumed))
      await q.offer('run/4/0', {})
      await q.release(await q.lease('rollout', 0.0), retry=False)
      self.assertEqual((await waiting)[0], 45)
      self.assertEqual((await anext(q.results(0)))[0], 41)
      with self.assertRaisesRegex(ValueError, 'cursor=46'):
        await anext(q.results(46))

    self.run_virtual(test)

  def test_a_task_is_offered_once(self):
    async def test():
      q = make()
      self.assertTrue(await q.offer('run/0/0', {}))
      self.assertFalse(await q.offer('run/0/0', {}))
      await q.release(await q.lease('rollout', 0.0), retry=False)
      self.assertFalse(await q.offer('run/0/0', {}))
      self.assertIsNone(await q.lease('rollout', 0.0))
      results = q.results(0)
      first, _ = await anext(results)
      self.assertTrue(await q.offer('run/0/0', {'task': 2}))  # another one
      await q.release(await q.lease('rollout', 0.0), retry=False)
      self.assertGreater((await anext(results))[0], first)

    self.run_virtual(test)

  def test_a_void_result_is_played_again_as_if_never_before(self):
    async def test():
      q = make()
      await q.offer('run/0/0', {'seed': 1})
      await q.offer('run/1/0', {})
      for _ in range(2):
        lease = await q.lease('rollout', 0.0)
        await q.release(lease, retry=True)
      lease = await q.lease('rollout', 0.0)
      await q.complete(lease, queue_lib.ResultRef('run/0/0'))
      results = q.results(0)
      first, _ = await anext(results)
      await q.again('run/0/0', {'seed': 2})
      self.assertEqual(
          await q.complete(lease, queue_lib.ResultRef('run/0/0')), 'duplicate'
      )
      ids = {}
      for _ in range(2):
        lease = await q.lease('rollout', 0.0)
        ids[lease.id] = (lease.attempt, lease.spec)
        await q.complete(lease, queue_lib.ResultRef(lease.id))
      self.assertEqual(ids, {'run/0/0': (1, {'seed': 2}), 'run/1/0': (1, {})})
      later = [await anext(results) for _ in range(2)]
      self.assertEqual({r.task_id for _, r in later}, set(ids))
      self.assertLess(first, later[0][0])

    self.run_virtual(test)

  def test_what_is_retired_is_forgotten_whatever_its_state(self):
    async def test():
      q = make()
      ids = [f'run/0/{m}' for m in range(3)]
      for task in (*ids, 'run/1/0'):
        await q.offer(task, {})
      done = await q.lease('rollout', 0.0)
      await q.complete(done, queue_lib.ResultRef(done.id))
      held = await q.lease('rollout', 0.0)
      await q.retire([*ids, 'run/7/0'])
      self.assertFalse(await q.extend(held))
      result = queue_lib.ResultRef(held.id)
      self.assertEqual(await q.complete(held, result), 'duplicate')
      self.assertEqual((await q.lease('rollout', 0.0)).id, 'run/1/0')
      await q.release(await q.lease('rollout', 2 * LEASE), retry=False)
      self.assertEqual((await anext(q.results(0)))[1].task_id, 'run/1/0')
      self.assertTrue(await q.offer('run/0/0', {}))

    self.run_virtual(test)

  def test_a_result_must_answer_its_own_lease(self):
    async def test():
      q = make()
      await q.offer('run/0/0', {})
      lease = await q.lease('rollout', 0.0)
      with self.assertRaisesRegex(ValueError, 'run/0/1'):
        await q.complete(lease, queue_lib.ResultRef('run/0/1', None))

    self.run_virtual(test)

  def test_versions_move_forward_only(self):
    async def test():
      q = make()
      waiting = asyncio.ensure_future(anext(q.versions()))
      await asyncio.sleep(1.0)
      await q.publish_version(version(3))
      self.assertEqual(await waiting, version(3))
      await q.publish_version(version(3))  # idempotent
      await q.publish_version(version(4, 'digest3'))
      for bad in (
          version(4),  # other content under a used number
          version(2, 'digest4'),
          version(5, 'digest3'),  # a delta from something that is not current
      ):
        with self.assertRaisesRegex(ValueError, 'does not follow'):
          await q.publish_version(bad)
      follower = q.versions()
      self.assertEqual(await anext(follower), version(4, 'digest3'))
      await q.publish_version(version(9))  # a base after a restart
      self.assertEqual(await anext(follower), version(9))

    self.run_virtual(test)

  def test_publishing_takes_no_lease_away(self):
    async def test():
      q, blobs = make(), blobs_lib.MemoryBlobs()
      leases = []
      for i in range(8):
        await q.offer(f'run/{i}/0', {})
        leases.append(await q.lease('rollout', 0.0))
      await q.publish_version(version(1))
      for lease in leases:
        ref = await put(blobs, lease, b'')
        self.assertEqual(await q.complete(lease, ref), 'accepted')

    self.run_virtual(test)

  def test_blobs_are_verified_on_read(self):
    async def test():
      blobs = blobs_lib.MemoryBlobs()
      ref = await blobs.put('run/0/0/token', b'payload')
      self.assertEqual(ref.size, 7)
      for bad in (
          dataclasses.replace(ref, size=6),
          dataclasses.replace(ref, sha256='0' * 64),
          dataclasses.replace(ref, name='run/0/0/other'),
      ):
        with self.assertRaisesRegex(ValueError, "blob 'run/0/0"):
          await blobs.get(bad)
      self.assertEqual(await blobs.names('run/0/'), ['run/0/0/token'])
      self.assertEqual(await blobs.names('run/1/'), [])
      await blobs.delete([ref.name, 'run/0/0/never'])
      with self.assertRaisesRegex(ValueError, 'missing'):
        await blobs.get(ref)

    self.run_virtual(test)


if __name__ == '__main__':
  absltest.main()
