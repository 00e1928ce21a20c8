"""Offers, results, payloads and what a resumed run makes of them."""

import asyncio
import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import numpy as np

from composer_jax import trace
from composer_jax.fleet import admission
from composer_jax.fleet import blobs as blobs_lib
from composer_jax.fleet import facts
from composer_jax.fleet import inprocess
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.fleet import queue as queue_lib
from composer_jax.fleet import worker
from tests import fleet_sim

PACING = admission.Pacing(
    groups_per_step=2,
    rollouts_per_group=2,
    max_staleness_versions=0,
    max_refill_groups=2,
)


class Life:
  """A dispatcher over a queue and a store of payloads that outlive it."""

  def __init__(
      self, ledger=None, version=None, queue=None, blobs=None, **kwargs
  ):
    self.ledger = ledger or ledger_lib.Ledger()
    self.queue = queue or inprocess.InProcessQueue(lease_seconds=1e6)
    self.blobs = blobs or blobs_lib.MemoryBlobs()
    self.version = version or fleet_sim.weights(0)
    self.played = []
    self.dispatcher = fleet_sim.dispatcher(
        self.queue,
        self.blobs,
        self.ledger,
        PACING,
        self.version,
        **kwargs,
    )

  async def __aenter__(self):
    await self.dispatcher.open(self.version)
    self.tasks = [
        asyncio.ensure_future(c)
        for c in (self.dispatcher.offer(), self.dispatcher.collect())
    ]
    return self

  async def __aexit__(self, *_):
    for task in self.tasks:
      task.cancel()
    await asyncio.gather(*self.tasks, return_exceptions=True)

  async def play(self, count, versions=(0,)):
    """Plays so many tasks with weights of some versions."""
    for _ in range(count):
      lease = await self.queue.lease('rollout', 5.0)
      await self.deliver(lease, versions)
      self.played.append((lease.id, lease.spec['seed']))

  async def deliver(self, lease, versions):
    _, member = admission.parse_task_id(lease.id)
    t = fleet_sim.rollout(lease.id, float(member), versions)
    blob = await self.blobs.put(lease.blob, trace.to_bytes(t))
    await self.queue.complete(
        lease, queue_lib.ResultRef(lease.id, blob, facts.of(t))
    )
    await asyncio.sleep(1.0)

  async def train(self):
    """Takes a step and makes it durable."""
    step = await self.dispatcher.take(lambda batch: ())
    self.ledger = ledger_lib.commit(
        self.ledger, step.consumed, f'digest{step.consumed.version}'
    )
    return step

  @property
  def state(self):
    return self.dispatcher.gate.state

  def members(self, prompt):
    return self.state.groups[prompt].members


class DispatcherTest(parameterized.TestCase):

  def test_a_step_has_the_payloads_it_trains_on(self):
    async def test():
      async with Life() as life:
        await life.play(4)
        step = await life.train()
      self.assertEqual([g.prompt for g in step.consumed.groups], [0, 1])
      for group in step.consumed.groups:
        for t, said in zip(step.rollouts(group), group.rollouts, strict=True):
          self.assertEqual(facts.of(t), said)

    fleet_sim.run(test())

  def test_a_resumed_run_uses_what_hosts_did_before_and_since(self):
    async def test():
      async with Life() as first:
        await first.play(4)
        await first.train()
        saved = first.ledger
        # Published after the checkpoint: its own weights, then lost ones.
        for version in (1, 2):
          await first.dispatcher.open(fleet_sim.weights(version))
          await first.play(4, versions=(version,))
          await first.train()
      # It dies, and goes on from the checkpoint under the next number.
      now = trace.WeightVersion(3, 'digest1', None)
      async with Life(saved, now, first.queue, first.blobs) as second:
        # What was sampled with the checkpoint's weights is trained as it is.
        step = await second.train()
        self.assertEqual([g.prompt for g in step.consumed.groups], [2, 3])
        # They are not stale: their weights have another number by now.
        for group in step.consumed.groups:
          for t in step.rollouts(group):
            self.assertEqual({*t.segments[0].versions.tolist()}, {3})
        await second.dispatcher.open(fleet_sim.weights(4))
        await second.play(4, versions=(4,))
        step = await second.train()
        self.assertEqual([g.prompt for g in step.consumed.groups], [4, 5])
      return first.played, second.played

    before, since = fleet_sim.run(test())
    # Only what was sampled with weights that are no more is played again.
    self.assertCountEqual(since, before[8:])

  def test_who_goes_on_claiming_unknown_weights_is_refused(self):
    task = 'run/0/0'

    async def test():
      async with Life(version=fleet_sim.weights(5)) as life:
        for _ in range(worker.MAX_ATTEMPTS):
          # Offered again, it stands behind the others.
          while (lease := await life.queue.lease('rollout', 5.0)).id != task:
            pass
          self.assertEqual(lease.attempt, 1)
          self.assertEmpty(life.members(0))
          await life.deliver(lease, (4,))
        return life.members(0)[0].refused

    self.assertIn('version 4 has unknown digest', fleet_sim.run(test()))

  def test_results_of_another_task_under_the_same_id_are_dropped(self):
    async def test():
      async with Life() as first:
        await first.play(4)
        leases = [await first.queue.lease('rollout', 0.0) for _ in range(3)]
        self.assertEqual(leases, [None] * 3)  # synchronous: nothing ahead
      second = Life(queue=first.queue, blobs=first.blobs, tasks=7)
      async with second:
        await second.play(4)
        step = await second.train()
      self.assertLen(step.payloads, 4)
      return first.played, second.played

    first, second = fleet_sim.run(test())
    self.assertEqual([t for t, _ in first], [t for t, _ in second])

  @parameterized.parameters('missing', 'damaged', 'another')
  def test_a_payload_that_is_not_what_was_said_is_refused(self, how):
    async def test():
      async with Life() as life:
        await life.play(4)
        name = min(await life.blobs.names('run/'))
        data = life.blobs._data.pop(name)
        if how == 'damaged':
          await life.blobs.put(name, data[:-1] + b'!')
        if how == 'another':
          longer = fleet_sim.rollout('run/0/0', 0.0, (0, 0))
          blob = await life.blobs.put(name, trace.to_bytes(longer))
          members = life.members(0)
          members[0] = dataclasses.replace(members[0], blob=blob)
        taking = asyncio.ensure_future(life.train())
        await life.play(2)  # its group is too small now, and has a successor
        step = await taking
        self.assertEqual([g.prompt for g in step.consumed.groups], [1, 2])
        (small,) = step.consumed.untrained
        self.assertEqual((small.prompt, small.fault), (0, 'too_few'))
        self.assertEmpty(ledger_lib.lost(life.ledger))
        return small.members[0].refused

    says = {
        'missing': 'blob .run/0/0/.*: missing',
        'damaged': 'blob .run/0/0/.*: size or sha256 differs',
        'another': 'not what was said',
    }
    self.assertRegex(fleet_sim.run(test()), says[how])

  def test_versions_reach_a_slow_queue_in_order(self):
    class Slow(inprocess.InProcessQueue):

      async def publish_version(self, version):
        await asyncio.sleep(10.0 - version.step)  # the first one is away
        await super().publish_version(version)

    async def test():
      queue = Slow(lease_seconds=1e6)
      async with Life(queue=queue) as life:
        opens = [
            life.dispatcher.open(trace.WeightVersion(v, f'digest{v}', before))
            for v, before in ((1, 'digest0'), (2, 'digest1'))
        ]
        await asyncio.gather(*opens)
        self.assertEqual(life.state.published, 2)

    fleet_sim.run(test())

  def test_payloads_stay_until_their_step_is_saved(self):
    async def test():
      async with Life() as life:
        await life.play(4)
        await life.train()
        await life.dispatcher.open(fleet_sim.weights(1))
        await life.play(3, versions=(1,))
        await life.blobs.put('run/0/0/of a lost lease', b'late')
        self.assertLen(await life.blobs.names('run/'), 8)
        await life.dispatcher.retire(0)
        self.assertLen(await life.blobs.names('run/'), 8)
        await life.dispatcher.retire(1)
        names = await life.blobs.names('run/')
        self.assertLen(names, 3)
        self.assertFalse([n for n in names if n.startswith(('run/0', 'run/1'))])
        self.assertLen(life.queue._log, 3)

    fleet_sim.run(test())


class FactsTest(absltest.TestCase):

  @hypothesis.given(
      versions=st.lists(st.integers(0, 3), min_size=1, max_size=40),
      bits=st.lists(st.booleans(), min_size=41, max_size=41),
      reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
      meta=st.dictionaries(st.text(), st.text()),
  )
  def test_facts_are_those_of_the_payload(self, versions, bits, reward, meta):
    t = fleet_sim.rollout('run/3/1', reward, tuple(versions))
    sampled = np.array(bits[: len(versions) + 1])
    segment = dataclasses.replace(t.segments[0], sampled=sampled)
    t = dataclasses.replace(t, segments=(segment,) * 2, meta=meta)
    said = facts.of(trace.from_bytes(trace.to_bytes(t)))
    self.assertEqual(facts.from_json(facts.to_json(said)), said)
    self.assertEqual(facts.to_json(said), facts.to_json(facts.of(t)))
    self.assertEqual(said.valid, t.valid)
    np.testing.assert_array_equal(
        np.sort(said.sampled_versions),
        np.sort([*segment.versions[sampled]] * 2),
    )
    self.assertLen(said.windows[0], len(segment))

  @hypothesis.given(
      text=st.text()
      | st.recursive(
          st.none() | st.booleans() | st.integers() | st.text(),
          lambda x: st.lists(x) | st.dictionaries(st.text(), x),
      ).map(str)
  )
  def test_other_texts_are_refused_in_one_line(self, text):
    with self.assertRaises(ValueError):
      facts.from_json(text)


if __name__ == '__main__':
  absltest.main()
