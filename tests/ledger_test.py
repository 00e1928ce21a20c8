"""The ledger alone, then a model check of the whole pacing machine."""

import asyncio
import dataclasses
import hashlib
import json

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st
import numpy as np

from composer_jax import trace
from composer_jax.fleet import admission
from composer_jax.fleet import blobs as blobs_lib
from composer_jax.fleet import facts
from composer_jax.fleet import inprocess
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.fleet import queue as queue_lib
from tests import fleet_sim


def group(prompt, version=0, versions=(0,), lost=False):
  members = {}
  for m in (1, 0):
    task = f'run/{prompt}/{m}'
    found = facts.of(fleet_sim.rollout(task, float(m), versions))
    blob = blobs_lib.BlobRef(task, 1, f'{prompt}/{m}')
    if lost and m:
      found = blob = None
    members[m] = admission.Member(1, 10 * prompt + m, blob, found)
  return admission.Group(prompt, version, members)


def batch(step, prompts, untrained=(), in_flight=(), next_prompt=100, **kwargs):
  return admission.Consumed(
      step,
      step,
      tuple(group(p, step, **kwargs) for p in prompts),
      tuple(group(p, step, lost=True) for p in untrained),
      tuple((p, step) for p in in_flight),
      next_prompt,
      7 * step,
  )


class LedgerTest(parameterized.TestCase):

  def test_a_step_is_recorded_well_enough_to_replay_it(self):
    ledger = ledger_lib.commit(
        ledger_lib.Ledger(),
        batch(0, (3, 0), (1,), (2,), 4, versions=(5, 5, 6)),
        'abc',
    )
    sha256 = hashlib.sha256(b'3/0\n3/1\n').hexdigest()
    spans = (((5, 3), (6, 1)),)
    self.assertEqual(ledger.recent[0].digest, 'abc')
    self.assertEqual([g.prompt for g in ledger.recent[0].trained], [3, 0])
    self.assertEqual(
        ledger.recent[0].trained[0],
        ledger_lib.GroupRecord(
            3,
            0,
            '',
            sha256,
            (
                ledger_lib.RolloutRecord(0, 30, 'valid', spans),
                ledger_lib.RolloutRecord(1, 31, 'valid', spans),
            ),
            -1,
            '',
            0.5,
            0.25,
        ),
    )
    (skipped,) = ledger.recent[0].untrained
    self.assertEqual((skipped.prompt, skipped.fault), (1, 'too_few'))
    self.assertEqual(skipped.rollouts[1].outcome, 'lost')
    self.assertEqual(ledger.consumed, ((0, 2), (3, 4)))
    self.assertEqual(ledger.in_flight, ((2, 0),))
    self.assertEqual(ledger_lib.lost(ledger), ())

  def test_consumed_prompts_are_kept_as_ranges(self):
    ledger = ledger_lib.Ledger()
    for step in range(200):
      ledger = ledger_lib.commit(
          ledger, batch(step, (2 * step + 1, 2 * step)), 'd'
      )
    self.assertEqual(ledger.consumed, ((0, 400),))

  def test_a_prompt_is_consumed_once(self):
    ledger = ledger_lib.commit(ledger_lib.Ledger(), batch(0, (0, 1, 2)), 'd')
    for again in (0, 1, 2):
      with self.assertRaisesRegex(
          ValueError, f'prompt={again}: consumed twice'
      ):
        ledger_lib.commit(ledger, batch(1, (again, 5)), 'd')
    with self.assertRaisesRegex(ValueError, 'prompt=5: consumed twice'):
      ledger_lib.commit(ledger, batch(1, (5,), untrained=(5,)), 'd')
    self.assertEqual(ledger.consumed, ((0, 3),))  # the old value is untouched

  def test_steps_are_committed_in_order(self):
    with self.assertRaisesRegex(ValueError, 'step=1: next is 0'):
      ledger_lib.commit(ledger_lib.Ledger(), batch(1, (0,)), 'd')

  def test_a_group_that_nobody_could_judge_says_nothing_of_its_kind(self):
    infra = trace.StopReason.INFRA_ERROR
    for lost in (True, False):
      members = {}
      for m in range(2):
        t = facts.of(fleet_sim.rollout(f'run/0/{m}', None, stop=infra))
        members[m] = admission.Member(1, m, None, None if lost else t)
      record = ledger_lib.record(admission.Group(0, 0, members))
      self.assertFalse(record.judged)
    self.assertTrue(ledger_lib.record(group(0)).judged)
    self.assertFalse(ledger_lib.record(group(0, lost=True)).judged)

  def test_a_task_is_trained_on_once(self):
    def named(step, prompt, task):
      members = {
          m: dataclasses.replace(
              member,
              facts=dataclasses.replace(
                  member.facts,
                  meta={'index': str(task), 'stratum': 'kind'},
              ),
          )
          for m, member in group(prompt).members.items()
      }
      trained = dataclasses.replace(group(prompt), members=members)
      one = batch(step, (), next_prompt=prompt + 1)
      return dataclasses.replace(one, groups=(trained,))

    ledger = ledger_lib.commit(ledger_lib.Ledger(), named(0, 0, 7), 'd')
    (first,) = ledger.recent[0].trained
    self.assertEqual((first.task, first.stratum), (7, 'kind'))
    with self.assertRaisesRegex(ValueError, 'task=7: trained on twice'):
      ledger_lib.commit(ledger, named(1, 1, 7), 'd')
    ledger = ledger_lib.commit(ledger, named(1, 1, 8), 'd')
    self.assertEqual(ledger_lib.played(ledger), [7, 8])
    self.assertEqual(ledger_lib.from_json(ledger_lib.to_json(ledger)), ledger)

  def test_lost_finds_what_is_neither_consumed_nor_in_flight(self):
    ledger = ledger_lib.commit(
        ledger_lib.Ledger(), batch(0, (0, 4), (1,), (3,), 7), 'd'
    )
    self.assertEqual(ledger_lib.lost(ledger), (2, 5, 6))

  @hypothesis.settings(max_examples=50, deadline=None)
  @hypothesis.given(st.data())
  def test_json_round_trip(self, data):
    ledger = ledger_lib.Ledger()
    order = data.draw(st.permutations(range(12)))
    for step in range(3):
      prompts = order[4 * step : 4 * step + 4]
      cut = data.draw(st.integers(0, 4))
      versions = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
      ledger = ledger_lib.commit(
          ledger,
          batch(
              step,
              prompts[:cut],
              prompts[cut:],
              order[4 * step + 4 :],
              12,
              versions=versions,
          ),
          f'digest{step}',
      )
    text = ledger_lib.to_json(ledger)
    self.assertEqual(ledger_lib.from_json(text), ledger)
    self.assertEqual(ledger_lib.to_json(ledger_lib.from_json(text)), text)

  def test_a_ledger_that_contradicts_itself_is_refused(self):
    ledger = ledger_lib.commit(
        ledger_lib.Ledger(), batch(0, (0, 1), (), (2,), 3), 'd'
    )
    good = json.loads(ledger_lib.to_json(ledger))
    for edit in (
        {'consumed': [[0, 3]]},
        {'consumed': [[0, 1]]},
        {'in_flight': []},
        {'recent': []},
    ):
      with self.assertRaisesRegex(ValueError, 'disagree'):
        ledger_lib.from_json(json.dumps(good | edit))
    with self.assertRaisesRegex(ValueError, 'format=1'):
      ledger_lib.from_json(json.dumps(good | {'format': 1}))

  def test_a_record_is_small(self):
    ledger = ledger_lib.commit(ledger_lib.Ledger(), batch(0, range(64)), 'd')
    size = len(ledger_lib.to_json(ledger)) / (64 * 2)
    self.assertLess(size, 100)  # bytes per rollout, group digest included

  def test_killed_at_any_step_a_run_consumes_every_prompt_once(self):
    pacing = admission.Pacing(3, 2, 2, 6)
    rng = np.random.default_rng(0)
    saved = ledger_lib.to_json(ledger_lib.Ledger())
    for life in range(12):
      # A checkpoint every 2 steps: the kill loses up to two of them.
      ledger = ledger_lib.from_json(saved)
      steps = ledger.done + int(rng.integers(1, 6))
      kept = None
      while ledger.done < steps:
        run = fleet_sim.Run(
            pacing,
            lambda p, m: float(m) if p % 4 else 1.0,
            lambda p, m, attempt, life=life: float(1 + (p * 7 + m + life) % 9),
            ledger=ledger,
        )
        ledger = fleet_sim.run(run.train(1))
        if ledger.done % 2 == 0:
          kept = ledger
      saved = ledger_lib.to_json(kept) if kept else saved
    ledger = ledger_lib.from_json(saved)
    self.assertGreater(ledger.done, 10)
    self.assertEqual(ledger_lib.lost(ledger), ())
    consumed = [
        g.prompt for s in ledger.recent for g in (*s.trained, *s.untrained)
    ]
    self.assertLen(set(consumed), len(consumed))
    late = ledger.next_prompt - len(consumed)
    self.assertLessEqual(late, 3 * 3)  # (S + 1) * B in flight, none skipped

  def test_a_synchronous_run_does_not_notice_that_it_was_killed(self):
    def run(ledger, steps, life):
      return fleet_sim.run(
          fleet_sim.Run(
              admission.Pacing(3, 2, 0, 6),
              lambda p, m: float(m) if p % 4 else 1.0,
              lambda p, m, attempt: float(1 + (p * 7 + m + life) % 9),
              ledger=ledger,
          ).train(steps)
      )

    whole = run(ledger_lib.Ledger(), 7, life=0)
    ledger = ledger_lib.Ledger()
    for life, steps in enumerate((2, 1, 4)):  # arrivals differ between lives
      saved = ledger_lib.to_json(run(ledger, steps, life))
      ledger = ledger_lib.from_json(saved)
    for step, (a, b) in enumerate(
        zip(whole.recent, ledger.recent, strict=True)
    ):
      self.assertEqual(
          [(g.prompt, g.version, g.fault) for g in a.trained + a.untrained],
          [(g.prompt, g.version, g.fault) for g in b.trained + b.untrained],
          f'step {step}',
      )
    self.assertEqual(
        (ledger.consumed, ledger.next_prompt),
        (whole.consumed, whole.next_prompt),
    )


async def _stopped(tasks, taking):
  for task in (*tasks, taking):
    task.cancel()
  await asyncio.gather(*tasks, taking, return_exceptions=True)


class PacingMachine(stateful.RuleBasedStateMachine):
  """Random workers, trainers, publications, kills; a model beside them.

  The dispatcher and the collector run by themselves; all else is a rule. The
  model counts prompts on its own and knows nothing of `Assembly`.
  """

  @stateful.initialize(
      b=st.integers(1, 3),
      g=st.integers(1, 3),
      s=st.integers(0, 3),
      refills=st.integers(0, 4),
      lessons=st.integers(1, 4),
  )
  def begin(self, b, g, s, refills, lessons):
    self.pacing = admission.Pacing(b, g, s, refills)
    self.lessons = lessons  # one prompt in so many teaches something
    self.loop = fleet_sim.VirtualLoop()
    self.saved = ledger_lib.to_json(ledger_lib.Ledger())
    self.number = 0  # of the newest version ever published
    self.queue = None
    self.live()

  def live(self):
    """Starts a life from the checkpoint, as after a kill."""
    self.ledger = ledger_lib.from_json(self.saved)
    self.start = self.ledger.done
    self.first_prompt = self.ledger.next_prompt
    version = fleet_sim.weights(self.number)
    self.shift = self.number - self.start
    if self.queue is None:
      self.leases = []
      self.late = []
    self.order = []  # prompts trained in this life, in order
    self.unpublished = 0
    self.serving = self.number

    async def start():
      if self.queue is None:
        self.queue = inprocess.InProcessQueue(
            lease_seconds=10.0,
            max_attempts=2,
            cursor=self.ledger.cursor,
        )
        self.blobs = blobs_lib.MemoryBlobs()
      self.dispatcher = fleet_sim.dispatcher(
          self.queue, self.blobs, self.ledger, self.pacing, version
      )
      await self.dispatcher.open(version)
      self.tasks = [
          asyncio.create_task(self.dispatcher.offer()),
          asyncio.create_task(self.dispatcher.collect()),
      ]
      self.taking = asyncio.create_task(self.take())

    self.do(start())

  def do(self, coroutine):
    """Runs a step, then lets everything settle without moving the clock."""
    out = self.loop.run_until_complete(coroutine)

    async def settle():
      for _ in range(20):
        await asyncio.sleep(0)

    self.loop.run_until_complete(settle())
    for task in self.tasks:
      if task.done():
        task.result()  # it never ends: this raises
    return out

  async def take(self):
    return (await self.dispatcher.take(lambda batch: ())).consumed

  def teaches(self, prompt):
    return prompt % self.lessons == 0

  @stateful.rule()
  def lease(self):
    lease = self.do(self.queue.lease('rollout', 0.0))
    if lease is not None:
      assert lease.version == self.serving
      self.leases.append((lease, self.serving))

  def finish(self, lease, version):
    prompt, member = admission.parse_task_id(lease.id)
    reward = float(member) if self.teaches(prompt) else 0.5
    # Sampling began with the weights of the lease and ended with today's.
    versions = (
        (version, self.serving)
        if self.pacing.max_staleness_versions
        else (version,)
    )
    trajectory = fleet_sim.rollout(lease.id, reward, versions)

    async def deliver():
      blob = await self.blobs.put(lease.blob, trace.to_bytes(trajectory))
      ref = queue_lib.ResultRef(lease.id, blob, facts.of(trajectory))
      return await self.queue.complete(lease, ref)

    return self.do(deliver())

  @stateful.precondition(lambda self: self.leases)
  @stateful.rule(data=st.data())
  def complete(self, data):
    i = data.draw(st.integers(0, len(self.leases) - 1))
    assert self.finish(*self.leases.pop(i)) == 'accepted'

  @stateful.precondition(lambda self: self.leases)
  @stateful.rule()
  def complete_all(self):
    while self.leases:
      self.complete_first()

  def complete_first(self):
    assert self.finish(*self.leases.pop(0)) == 'accepted'

  @stateful.precondition(lambda self: self.leases)
  @stateful.rule(data=st.data(), retry=st.booleans())
  def crash(self, data, retry):
    i = data.draw(st.integers(0, len(self.leases) - 1))
    self.do(self.queue.release(self.leases.pop(i)[0], retry))

  @stateful.precondition(lambda self: self.leases)
  @stateful.rule(data=st.data())
  def hang(self, data):
    """All but one extend in time; its late result will be a duplicate."""
    i = data.draw(st.integers(0, len(self.leases) - 1))
    self.late.append(self.leases.pop(i))
    for _ in range(3):
      self.do(asyncio.sleep(4.0))
      for lease, _ in self.leases:
        assert self.do(self.queue.extend(lease))
    assert not self.do(self.queue.extend(self.late[-1][0]))

  @stateful.precondition(lambda self: self.late)
  @stateful.rule()
  def finish_late(self):
    assert self.finish(*self.late.pop()) == 'duplicate'

  @stateful.precondition(
      lambda self: self.taking.done() and self.unpublished < 2
  )
  @stateful.rule()
  def train(self):
    batch = self.taking.result()
    self.check(batch)
    self.unpublished += 1
    self.ledger = ledger_lib.commit(
        self.ledger, batch, f'digest{batch.version}'
    )

    async def take():
      self.taking = asyncio.create_task(self.take())

    self.do(take())

  @stateful.precondition(lambda self: self.unpublished)
  @stateful.rule()
  def publish(self):
    self.unpublished -= 1
    self.number += 1
    self.do(self.dispatcher.open(fleet_sim.weights(self.number)))
    self.serving = self.number

  @stateful.rule()
  def checkpoint(self):
    self.saved = ledger_lib.to_json(self.ledger)
    assert ledger_lib.from_json(self.saved) == self.ledger

  @stateful.rule(steps=st.integers(1, 3))
  def honest_steps(self, steps):
    """Workers and trainer do their best; also the liveness check."""
    goal = self.ledger.done + steps
    for _ in range(2000):
      if self.ledger.done == goal:
        break
      self.lease()
      if self.leases:
        self.complete_first()
      if self.unpublished:
        self.publish()
      if self.taking.done():
        self.train()
    assert self.ledger.done == goal

  @stateful.rule(skip=st.integers(0, 2), saved=st.booleans())
  def kill(self, skip, saved):
    """Everything but the checkpoint is gone; version numbers never return."""
    if saved:
      self.checkpoint()
    self.loop.shut()
    self.loop = fleet_sim.VirtualLoop()
    self.number += skip
    self.queue = None
    self.live()

  @stateful.rule(saved=st.booleans())
  def kill_trainer(self, saved):
    """Queue, payloads and workers go on; weights since the checkpoint do not."""
    if saved:
      self.checkpoint()

    self.tasks, tasks = [], self.tasks
    self.loop.run_until_complete(_stopped(tasks, self.taking))
    self.number += 1
    self.live()

  def check(self, batch):
    b, s = self.pacing.groups_per_step, self.pacing.max_staleness_versions
    assert batch.step == self.ledger.done
    assert batch.version == batch.step + self.shift
    prompts = [g.prompt for g in batch.groups]
    assert prompts == sorted(prompts)
    # Short only if refills are spent and everything admitted has come back.
    assert len(prompts) == b or len(batch.untrained) >= (
        self.pacing.max_refill_groups + (s + 1) * b - len(prompts)
    )
    assert len(prompts) <= b
    for g in batch.groups:
      assert self.teaches(g.prompt) and len(g.rollouts) >= 2
      assert all(not m.refused for m in g.members.values())
      if g.prompt >= self.first_prompt:
        # Only stragglers that younger groups overtook are older than S.
        overtakers = sum(p > g.prompt for p in self.order)
        lag = batch.version - g.version
        assert 0 <= lag <= s + (b - 1 + overtakers) // b, (lag, overtakers)
    self.order += prompts
    if s == 0:
      every = prompts + [g.prompt for g in batch.untrained]
      first = batch.next_prompt - len(every)
      assert sorted(every) == list(range(first, batch.next_prompt))
      assert batch.in_flight == ()
      assert all(g.version == batch.version for g in batch.groups)

  @stateful.invariant()
  def every_prompt_is_consumed_once_or_in_flight(self):
    seen = [
        g.prompt for r in self.ledger.recent for g in (*r.trained, *r.untrained)
    ]
    assert len(set(seen)) == len(seen)
    assert not ledger_lib.lost(self.ledger)

  @stateful.invariant()
  def rollouts_run_at_most_one_bound_ahead(self):
    state = self.dispatcher.gate.state
    ahead = (
        self.number
        - self.shift
        - self.ledger.done
        + self.pacing.max_staleness_versions
        + 1
    ) * self.pacing.groups_per_step
    # A batch that waits for the trainer is taken but not in the ledger yet.
    waiting = len(self.taking.result().groups) if self.taking.done() else 0
    assert len(state.groups) + waiting <= ahead

  @stateful.invariant()
  def something_can_happen(self):
    waiting = sum(p.qsize() for p in self.queue._pools.values())
    assert (
        waiting or self.leases or self.unpublished or self.taking.done()
    ) or self.loop_has_timer()

  def loop_has_timer(self):
    return any(t.token for t in self.queue._tasks.values())

  def teardown(self):
    if not hasattr(self, 'loop'):
      return
    self.honest_steps(4)  # no state may be a dead end
    self.every_prompt_is_consumed_once_or_in_flight()
    self.loop.shut()


PacingTest = PacingMachine.TestCase
PacingTest.settings = hypothesis.settings(
    max_examples=50, stateful_step_count=40, deadline=None
)


if __name__ == '__main__':
  absltest.main()
