"""What a work queue and a store of payloads have to do, as tests.

For whoever brings their own: mix `QueueConformance` or `BlobsConformance` into
an IsolatedAsyncioTestCase of unittest. Time is real.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from composer_jax import trace
from composer_jax.fleet import blobs as blobs_lib
from composer_jax.fleet import facts as facts_lib
from composer_jax.fleet import queue as queue_lib

LEASE = 1.0
ATTEMPTS = 3
_LONG_LEASE = 5.0
_SOON = 120.0  # for what comes at once, on a machine that is busy
_FACTS = facts_lib.Facts(
    task_id='run/0/0',
    group_id='run/0',
    windows=(facts_lib.Window(((4, 7), (5, 1)), ((4, 2), (5, 1)), 3),),
    reward=0.5,
    reward_parts={'tests': 0.5},
    stop=trace.StopReason.FINISHED,
    weights={4: 'digest4', 5: 'digest5'},
    meta={'index': '7', 'text': 'naïve ☃'},
)


def _version(step: int, parent: str | None = None) -> trace.WeightVersion:
  return trace.WeightVersion(step, f'digest{step}', parent)


class QueueConformance:
  """Tests of a `queue.WorkQueue` that has pools 'rollout' and 'gpu'."""

  async def queue(self, lease_seconds: float = LEASE) -> queue_lib.WorkQueue:
    """A queue without tasks, of `ATTEMPTS` leases per task."""
    raise NotImplementedError

  async def _leased(self, q, pool=queue_lib.POOL) -> queue_lib.Lease:
    lease = await q.lease(pool, _SOON)
    self.assertIsNotNone(lease)
    return lease

  async def _next(self, results: Any) -> tuple[int, queue_lib.ResultRef]:
    async with asyncio.timeout(2 * _SOON):
      return await anext(results)

  async def test_a_task_travels_from_offer_to_result(self):
    q = await self.queue()
    await q.publish_version(_version(4))
    self.assertTrue(await q.offer('run/0/0', {'seed': 7}))
    lease = await self._leased(q)
    self.assertEqual(
        (lease.id, lease.spec, lease.version, lease.attempt),
        ('run/0/0', {'seed': 7}, 4, 1),
    )
    ref = queue_lib.ResultRef(
        lease.id, blobs_lib.BlobRef(lease.blob, 3, 'abc'), _FACTS
    )
    self.assertEqual(await q.complete(lease, ref), 'accepted')
    self.assertEqual((await self._next(q.results(0)))[1], ref)
    self.assertFalse(await q.extend(lease))
    self.assertIsNone(await q.lease('rollout', 0.2))

  async def test_pools_are_separate_and_first_offered_is_first_leased(self):
    q = await self.queue()
    await q.offer('run/0/0', {})
    await q.offer('run/0/1', {'pool': 'gpu'})
    await q.offer('run/1/0', {})
    ids = [(await self._leased(q)).id for _ in range(2)]
    self.assertEqual(ids, ['run/0/0', 'run/1/0'])
    self.assertIsNone(await q.lease('rollout', 0.2))
    self.assertEqual((await self._leased(q, 'gpu')).id, 'run/0/1')

  async def test_a_waiting_worker_gets_what_is_offered(self):
    q = await self.queue()
    waiting = asyncio.create_task(q.lease('rollout', 2 * _SOON))
    await asyncio.sleep(0.5)
    await q.offer('run/0/0', {})
    lease = await waiting
    self.assertEqual(lease.id, 'run/0/0')
    self.assertIsNone(lease.version)

  async def test_a_hung_worker_loses_its_lease_and_its_late_result(self):
    q = await self.queue()
    await q.offer('run/0/0', {})
    hung = await self._leased(q)
    again = await self._leased(q)
    self.assertEqual(again.attempt, 2)
    self.assertNotEqual(again.token, hung.token)
    self.assertFalse(await q.extend(hung))
    good = queue_lib.ResultRef(
        'run/0/0', blobs_lib.BlobRef(again.blob, 1, 'good')
    )
    late = queue_lib.ResultRef(
        'run/0/0', blobs_lib.BlobRef(hung.blob, 1, 'late')
    )
    self.assertEqual(await q.complete(hung, late), 'duplicate')
    self.assertEqual(await q.complete(again, good), 'accepted')
    self.assertEqual(await q.complete(hung, late), 'duplicate')
    self.assertEqual((await self._next(q.results(0)))[1], good)

  async def test_signs_of_life_keep_a_lease(self):
    # Long enough for a machine that stands still for a moment.
    q = await self.queue(_LONG_LEASE)
    await q.offer('run/0/0', {})
    lease = await self._leased(q)
    work = asyncio.sleep(1.5 * _LONG_LEASE, 'done')
    kept = asyncio.create_task(queue_lib.keep(q, lease, _LONG_LEASE, work))
    self.assertIsNone(await q.lease('rollout', 1.3 * _LONG_LEASE))
    self.assertEqual(await kept, 'done')

  async def test_a_redelivered_task_goes_before_younger_ones(self):
    q = await self.queue()
    for i in range(3):
      await q.offer(f'run/{i}/0', {})
    await q.release(await self._leased(q), retry=True)
    self.assertEqual((await self._leased(q)).id, 'run/0/0')

  async def test_a_task_nobody_finishes_is_delivered_as_lost(self):
    for number, how in enumerate(('hang', 'retry', 'give up')):
      q = await self.queue()
      await q.offer(f'run/{number}/0', {})
      attempts = 0
      while (lease := await q.lease('rollout', 3 * LEASE)) is not None:
        attempts += 1
        if how != 'hang':
          await q.release(lease, retry=how == 'retry')
      self.assertEqual(attempts, 1 if how == 'give up' else ATTEMPTS, how)
      _, ref = await self._next(q.results(0))
      self.assertTrue(ref.lost)
      await q.retire([f'run/{number}/0'])

  async def test_results_go_on_behind_a_cursor(self):
    q = await self.queue()
    for i in range(3):
      await q.offer(f'run/{i}/0', {})
      lease = await self._leased(q)
      await q.complete(lease, queue_lib.ResultRef(lease.id))
    results = q.results(0)
    found = [await self._next(results) for _ in range(3)]
    cursors = [cursor for cursor, _ in found]
    self.assertEqual(cursors, sorted(set(cursors)))
    resumed = q.results(cursors[0])
    self.assertEqual(await self._next(resumed), found[1])
    self.assertEqual(await self._next(resumed), found[2])
    waiting = asyncio.ensure_future(self._next(resumed))
    await q.offer('run/3/0', {})
    await q.release(await self._leased(q), retry=False)
    self.assertEqual((await waiting)[1].task_id, 'run/3/0')

  async def test_a_task_is_offered_once(self):
    q = await self.queue()
    self.assertTrue(await q.offer('run/0/0', {'task': 1}))
    self.assertFalse(await q.offer('run/0/0', {'task': 1}))
    await q.release(await self._leased(q), retry=False)
    self.assertFalse(await q.offer('run/0/0', {'task': 1}))
    self.assertIsNone(await q.lease('rollout', 0.2))
    # Another one under its name: nothing of the old one is left.
    self.assertTrue(await q.offer('run/0/0', {'task': 2}))
    lease = await self._leased(q)
    self.assertEqual((lease.spec, lease.attempt), ({'task': 2}, 1))
    ref = queue_lib.ResultRef('run/0/0', blobs_lib.BlobRef('b', 1, 'two'))
    await q.complete(lease, ref)
    self.assertEqual((await self._next(q.results(0)))[1], ref)

  async def test_a_void_result_is_played_again_as_if_never_before(self):
    q = await self.queue()
    await q.offer('run/0/0', {'seed': 1})
    await q.release(await self._leased(q), retry=True)
    lease = await self._leased(q)
    await q.complete(lease, queue_lib.ResultRef('run/0/0'))
    results = q.results(0)
    first, _ = await self._next(results)
    await q.again('run/0/0', {'seed': 2})
    self.assertEqual(
        await q.complete(lease, queue_lib.ResultRef('run/0/0')), 'duplicate'
    )
    lease = await self._leased(q)
    self.assertEqual((lease.attempt, lease.spec), (1, {'seed': 2}))
    await q.complete(lease, queue_lib.ResultRef('run/0/0'))
    self.assertGreater((await self._next(results))[0], first)

  async def test_what_is_retired_is_forgotten_whatever_its_state(self):
    q = await self.queue()
    ids = [f'run/0/{m}' for m in range(3)]
    for task in (*ids, 'run/1/0'):
      await q.offer(task, {})
    done = await self._leased(q)
    await q.complete(done, queue_lib.ResultRef(done.id))
    held = await self._leased(q)
    await q.retire([*ids, 'run/7/0'])
    self.assertFalse(await q.extend(held))
    result = queue_lib.ResultRef(held.id)
    self.assertEqual(await q.complete(held, result), 'duplicate')
    lease = await self._leased(q)
    self.assertEqual(lease.id, 'run/1/0')
    await q.release(lease, retry=False)
    self.assertEqual((await self._next(q.results(0)))[1].task_id, 'run/1/0')
    self.assertTrue(await q.offer('run/0/0', {}))

  async def test_a_result_must_answer_its_own_lease(self):
    q = await self.queue()
    await q.offer('run/0/0', {})
    lease = await self._leased(q)
    with self.assertRaisesRegex(ValueError, 'run/0/1'):
      await q.complete(lease, queue_lib.ResultRef('run/0/1'))

  async def test_versions_move_forward_only(self):
    q = await self.queue()
    waiting = asyncio.ensure_future(self._next(q.versions()))
    await asyncio.sleep(0.2)
    await q.publish_version(_version(3))
    self.assertEqual(await waiting, _version(3))
    await q.publish_version(_version(3))  # idempotent
    await q.publish_version(_version(4, 'digest3'))
    for bad in (
        _version(4),  # other content under a used number
        _version(2, 'digest4'),
        _version(5, 'digest3'),  # a delta from something that is not current
    ):
      with self.assertRaisesRegex(ValueError, 'does not follow'):
        await q.publish_version(bad)
    follower = q.versions()
    self.assertEqual(await self._next(follower), _version(4, 'digest3'))
    await q.publish_version(_version(9))  # a base after a restart
    self.assertEqual(await self._next(follower), _version(9))


class BlobsConformance:
  """Tests of a `blobs.Blobs`."""

  async def blobs(self) -> blobs_lib.Blobs:
    """An empty store."""
    raise NotImplementedError

  async def test_a_payload_is_what_was_stored(self):
    blobs = await self.blobs()
    for size in (0, 7, 3 << 20):
      ref = await blobs.put(f'run/0/{size}/token', bytes(size))
      self.assertEqual(ref.size, size)
      self.assertEqual(await blobs.get(ref), bytes(size))

  async def test_another_payload_is_refused(self):
    blobs = await self.blobs()
    ref = await blobs.put('run/0/0/token', b'payload')
    for bad in (
        dataclasses.replace(ref, size=6),
        dataclasses.replace(ref, sha256='0' * 64),
        dataclasses.replace(ref, name='run/0/0/other'),
    ):
      with self.assertRaisesRegex(ValueError, "blob 'run/0/0"):
        await blobs.get(bad)

  async def test_names_and_deletes(self):
    blobs = await self.blobs()
    names = [f'run/{p}/{m}/x' for p in (1, 10) for m in range(2)]
    refs = [await blobs.put(name, b'x') for name in names]
    self.assertEqual(await blobs.names('run/1/'), names[:2])
    self.assertEqual(await blobs.names('run/2/'), [])
    await blobs.delete([*names[:2], 'run/1/never'])
    self.assertEqual(await blobs.names('run/'), names[2:])
    with self.assertRaisesRegex(ValueError, 'missing'):
      await blobs.get(refs[0])
