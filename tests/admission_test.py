"""Pacing, group assembly, ingest checks: examples, properties and a model."""

import asyncio
import dataclasses
import random
import threading

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import numpy as np
from scipy import stats

from composer_jax import config
from composer_jax import trace
from composer_jax.fleet import admission
from composer_jax.fleet import queue
from composer_jax.fleet import facts
from composer_jax.fleet import blobs
from composer_jax.fleet import gate as gate_lib
from composer_jax.fleet import ingest
from composer_jax.fleet import ledger as ledger_lib
from tests import fleet_sim


def start(pacing, ledger=None, step=0):
  return ledger_lib.resume(
      ledger or ledger_lib.Ledger(), pacing, fleet_sim.weights(step)
  )


def result(cursor, prompt, member, reward, **kwargs):
  found = None
  if reward is not None:
    task_id = admission.task_id(fleet_sim.RUN, prompt, member)
    found = facts.of(fleet_sim.rollout(task_id, reward, **kwargs))
  return admission.Member(cursor, 0, None, found)


def delivered(task_id, reward, versions=(0,)):
  t = fleet_sim.rollout(task_id, reward, versions)
  blob = blobs.BlobRef.of(task_id, trace.to_bytes(t))
  return queue.ResultRef(task_id, blob, facts.of(t))


def fill(state, prompt, rewards, cursor=0):
  """Admits a prompt and files its results; None is a lost rollout."""
  state = admission.admit(state, prompt)
  for member, reward in enumerate(rewards):
    state = admission.add(
        state,
        prompt,
        member,
        result(cursor + member + 1, prompt, member, reward),
    )
  return state


PACING = admission.Pacing(
    groups_per_step=2,
    rollouts_per_group=2,
    max_staleness_versions=1,
    max_refill_groups=3,
)


class AdmissionTest(parameterized.TestCase):

  def test_headroom_is_the_documented_formula(self):
    self.assertEqual(
        admission.headroom(
            published=5,
            max_staleness_versions=2,
            groups_per_step=12,
            accepted=70,
            in_flight=20,
        ),
        (5 + 2 + 1) * 12 - 70 - 20,
    )

  def test_a_group_counts_from_admission_until_its_step_is_published(self):
    state = start(PACING)
    seen = [state.headroom]
    for prompt in range(4):
      state = fill(state, prompt, (0.0, 1.0))
      seen.append(state.headroom)
    self.assertEqual(seen, [4, 3, 2, 1, 0])
    _, state = admission.take(state)
    self.assertEqual(state.headroom, 0)
    state = admission.publish(state, fleet_sim.weights(1))
    self.assertEqual(state.headroom, 2)

  def test_versions_may_start_anywhere(self):
    state = start(PACING, step=700)
    self.assertEqual(state.headroom, 4)
    for prompt in range(2):
      state = fill(state, prompt, (0.0, 1.0))
    batch, state = admission.take(state)
    self.assertEqual((batch.step, batch.version), (0, 700))
    self.assertEqual(
        admission.publish(state, fleet_sim.weights(701)).headroom, 4
    )

  def test_a_prompt_is_admitted_once_and_in_order(self):
    state = admission.admit(start(PACING), 0)
    for prompt in (0, 2):
      with self.assertRaisesRegex(ValueError, f'prompt={prompt}'):
        admission.admit(state, prompt)

  def test_oldest_complete_groups_train_first_and_stragglers_wait(self):
    state = start(PACING)
    for prompt in range(4):
      state = admission.admit(state, prompt)
    for prompt in (3, 2, 1):  # prompt 0 straggles
      for member in (1, 0):
        state = admission.add(
            state, prompt, member, result(1, prompt, member, float(member))
        )
    batch, state = admission.take(state)
    self.assertEqual([g.prompt for g in batch.groups], [1, 2])
    self.assertEqual(batch.in_flight, ((0, 0), (3, 0)))
    for member in range(2):
      state = admission.add(state, 0, member, result(9, 0, member, member))
    batch, _ = admission.take(state)  # not dropped for its age
    self.assertEqual([g.prompt for g in batch.groups], [0, 3])

  @parameterized.named_parameters(
      ('one_valid', (1.0, None, None), 'too_few'),
      ('none_valid', (None, None, None), 'too_few'),
      ('equal', (0.5, 0.5, None), 'zero_variance'),
      ('nearly_equal', (0.5, 0.5 + 1e-7, 0.5), 'zero_variance'),
      ('lesson', (0.5, 0.6, None), ''),
  )
  def test_groups_without_a_lesson_are_consumed_untrained(self, rewards, fault):
    pacing = dataclasses.replace(PACING, rollouts_per_group=3)
    state = fill(start(pacing), 0, rewards)
    self.assertEqual([g.fault for g in state.untrained], [fault][: bool(fault)])
    self.assertLen(state.groups, 0 if fault else 1)
    # A group without a lesson makes room for its successor.
    self.assertEqual(state.headroom, 4 if fault else 3)

  def test_an_infrastructure_failure_is_not_a_zero_reward(self):
    state = admission.admit(start(PACING), 0)
    infra = trace.StopReason.INFRA_ERROR
    state = admission.add(state, 0, 0, result(1, 0, 0, 1.0))
    state = admission.add(state, 0, 1, result(2, 0, 1, 0.0, stop=infra))
    self.assertEqual([g.fault for g in state.untrained], ['too_few'])

  def test_policy_caused_failures_are_samples(self):
    state = admission.admit(start(PACING), 0)
    for member, stop in enumerate(
        (trace.StopReason.TIMEOUT, trace.StopReason.PARSE_ERROR)
    ):
      state = admission.add(
          state, 0, member, result(1, 0, member, float(member), stop=stop)
      )
    self.assertLen(state.complete[0].rollouts, 2)

  def test_a_result_seen_twice_is_dropped(self):
    state = fill(start(PACING), 0, (0.0, 1.0))
    again = admission.add(state, 0, 1, result(7, 0, 1, 0.5))
    self.assertEqual(again.groups, state.groups)
    self.assertEqual(again.cursor, 7)
    state = fill(state, 1, (0.0, 1.0), cursor=2)
    _, state = admission.take(state)
    again = admission.add(state, 0, 1, result(8, 0, 1, 0.5))  # consumed
    self.assertEqual((again.groups, again.untrained), ({}, ()))

  def test_a_step_with_nothing_to_learn_ends_when_refills_are_spent(self):
    pacing = dataclasses.replace(PACING, max_staleness_versions=0)
    state = start(pacing)
    prompt = 0
    while state.headroom > 0:
      self.assertIsNone(admission.take(state))
      state = fill(state, prompt, (1.0, 1.0) if prompt != 3 else (0.0, 1.0))
      prompt += 1
    # B groups and 3 refills, one of them worth training.
    self.assertEqual(prompt, 2 + 3)
    batch, state = admission.take(state)
    self.assertEqual([g.prompt for g in batch.groups], [3])
    self.assertEqual([g.prompt for g in batch.untrained], [0, 1, 2, 4])
    # The next step waits for the weights instead of ending empty at once.
    self.assertEqual(state.headroom, 0)
    self.assertIsNone(admission.take(state))
    self.assertEqual(admission.publish(state, fleet_sim.weights(1)).headroom, 2)

  def test_a_short_step_does_not_buy_extra_lag(self):
    state = start(PACING)
    for prompt in range(7):
      state = fill(state, prompt, (1.0, 1.0))
    self.assertEqual(state.headroom, 0)
    batch, state = admission.take(state)
    self.assertEqual(batch.groups, ())
    state = admission.publish(state, fleet_sim.weights(1))
    self.assertEqual(state.headroom, 4)  # (S + 1) * B, as ever

  def test_an_exhausted_source_ends_with_a_short_batch(self):
    state = fill(start(PACING), 0, (0.0, 1.0))
    self.assertIsNone(admission.take(state))
    state = admission.exhaust(state)
    batch, state = admission.take(state)
    self.assertLen(batch.groups, 1)
    self.assertTrue(state.finished)
    self.assertIsNone(admission.take(state))

  def test_the_cursor_stays_before_results_that_wait(self):
    state = start(PACING)
    state = fill(state, 0, (0.0, 1.0), cursor=0)  # results 1, 2
    state = admission.admit(state, 1)
    state = admission.add(state, 1, 0, result(3, 1, 0, 0.0))
    state = fill(state, 2, (0.0, 1.0), cursor=3)  # results 4, 5
    batch, state = admission.take(state)
    self.assertEqual(batch.cursor, 2)
    state = admission.add(state, 1, 1, result(6, 1, 1, 1.0))
    state = fill(state, 3, (0.0, 1.0), cursor=6)
    batch, _ = admission.take(state)
    self.assertEqual(batch.cursor, 8)

  def test_a_step_whose_every_result_was_refused_raises(self):
    pacing = dataclasses.replace(PACING, max_refill_groups=0)
    state = start(pacing)
    for prompt in range(4):
      state = admission.admit(state, prompt)
      for member in range(2):
        bad = admission.Member(1, 0, None, None, 'segment 0: no routing trace')
        state = admission.add(state, prompt, member, bad)
    with self.assertRaisesRegex(ValueError, 'no routing trace'):
      admission.take(state)

  def test_pacing_names_what_is_out_of_range(self):
    self.assertEqual(
        admission.Pacing.of(config.RlConfig(groups_per_step=3)),
        admission.Pacing(3, 16, 2, 12),
    )
    with self.assertRaisesRegex(ValueError, 'max_staleness_versions=9'):
      dataclasses.replace(PACING, max_staleness_versions=9)

  def test_task_ids_and_seeds(self):
    text = admission.task_id('a/b', 12, 3)
    self.assertEqual(text, 'a/b/12/3')
    self.assertEqual(admission.parse_task_id(text), (12, 3))
    seeds = {
        admission.rollout_seed(r, p, m)
        for r in range(4)
        for p in range(16)
        for m in range(16)
    }
    self.assertLen(seeds, 4 * 16 * 16)
    self.assertBetween(max(seeds), 2**31, 2**32 - 1)
    self.assertEqual(admission.rollout_seed(0, 0, 0), 155694420)


class IngestTest(parameterized.TestCase):
  TASK = 'run/0/0'

  def check(self, trajectory, routing_required=True, **kwargs):
    wanted = dict(
        task_id=self.TASK,
        digests={0: 'digest0', 1: 'digest1'},
        oldest_version=0,
    )
    said = facts.of(trajectory)
    return ingest.check(said, **(wanted | kwargs)) or ingest.check_payload(
        trajectory, said, routing_required=routing_required
    )

  def edit(self, **fields):
    good = fleet_sim.rollout(self.TASK, 1.0, (0, 1, 1))
    segment = dataclasses.replace(good.segments[0], **fields)
    return dataclasses.replace(good, segments=(segment,))

  def test_good_results_pass(self):
    good = fleet_sim.rollout(self.TASK, 1.0, (0, 1, 1))
    self.assertEqual(self.check(good), '')
    self.assertEqual(
        self.check(self.edit(routing=None), routing_required=False), ''
    )
    self.assertEqual(self.check(dataclasses.replace(good, reward=None)), '')

  def test_the_last_row_and_unsampled_prompt_rows_may_be_blank(self):
    experts = np.zeros((5, 2, 2), np.uint8)
    good = fleet_sim.rollout(self.TASK, 1.0, (0, 0, 0, 0))
    sampled = np.array([False, False, False, True, True])
    blank = trace.blank_route(np.dtype(np.uint8))
    experts[[0, 1, 4]] = blank
    segment = dataclasses.replace(
        good.segments[0],
        sampled=sampled,
        routing=trace.RoutingTrace(experts),
    )
    self.assertEqual(
        self.check(dataclasses.replace(good, segments=(segment,))), ''
    )
    experts[2, 1, 0] = blank  # the pass that token 3 was sampled from
    segment = dataclasses.replace(segment, routing=trace.RoutingTrace(experts))
    self.assertIn(
        'blank routing row',
        self.check(dataclasses.replace(good, segments=(segment,))),
    )

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_log_probs_must_be_finite_where_sampled(self, bad):
    logps = np.array([0, -1, bad, -1], np.float32)
    self.assertIn('not finite', self.check(self.edit(logps=logps)))
    logps = np.array([bad, -1, -1, -1], np.float32)  # a prompt token
    self.assertEqual(self.check(self.edit(logps=logps)), '')

  def test_faults_are_named(self):
    good = fleet_sim.rollout(self.TASK, 1.0, (0, 1, 1))
    replace = dataclasses.replace
    for bad, text, kwargs in (
        (self.edit(routing=None), 'no routing trace', {}),
        (good, 'unknown digest digest1', {'digests': {0: 'digest0'}}),
        (replace(good, weights={0: 'digest0'}), 'unknown digest None', {}),
        (replace(good, weights={0: 'digest0', 1: 'x'}), 'digest x', {}),
        (good, 'older than 1', {'oldest_version': 1}),
        (good, 'the lease was for', {'task_id': 'run/0/1'}),
        (replace(good, group_id='run/1'), 'not the group', {}),
        (replace(good, reward=float('nan')), 'reward=nan', {}),
    ):
      self.assertIn(text, self.check(bad, **kwargs))

  def test_the_gate_refuses_into_an_invalid_member(self):
    async def test():
      gate = gate_lib.Gate(start(PACING))
      await gate.admit('run/0/0')
      gate.add(1, delivered('run/0/0', 1.0, (3,)), seed=5)
      member = gate.state.groups[0].members[0]
      self.assertEqual(member.outcome, 'refused')
      self.assertIn('unknown digest', member.refused)
      gate.add(2, queue.ResultRef('run/0/1'), seed=6)
      self.assertEqual([g.fault for g in gate.state.untrained], ['too_few'])

    fleet_sim.run(test())

  @parameterized.parameters(0, 1, 2)
  def test_a_host_serves_at_most_s_versions_behind_admission(self, staleness):
    async def test():
      pacing = dataclasses.replace(PACING, max_staleness_versions=staleness)
      gate = gate_lib.Gate(start(pacing))
      for step in range(1, 4):
        gate.publish(fleet_sim.weights(step))
      await gate.admit('run/0/0')  # version 3 is published
      for member, behind in enumerate((staleness, staleness + 1)):
        task_id = f'run/0/{member}'
        late = delivered(task_id, 1.0, (3 - behind, 3))
        gate.add(member + 1, late, seed=5)
      (group,) = gate.state.untrained  # one valid member
      self.assertEqual(group.members[0].refused, '')
      self.assertIn(f'older than {3 - staleness}', group.members[1].refused)

    fleet_sim.run(test())

  def test_metrics_of_a_batch(self):
    group = admission.Group(
        0,
        2,
        {
            0: result(1, 0, 0, 0.0, versions=(2, 2, 3, 3)),
            1: result(2, 0, 1, 1.0, versions=(4,)),
            2: result(3, 0, 2, None),
        },
    )
    dull = admission.Group(
        1,
        4,
        {
            0: result(4, 1, 0, 1.0, versions=(4, 4)),
            1: result(5, 1, 1, 1.0, versions=(4, 4, 4)),
            2: result(6, 1, 2, 0.0, stop=trace.StopReason.INFRA_ERROR),
        },
    )
    batch = admission.Consumed(0, 5, (group,), (dull,), ((2, 4),), 3, 6)
    got = ingest.metrics(batch)
    want = {
        'groups/trained': 1,
        'groups/in_flight': 1,
        'groups/zero_variance': 1,
        'groups/zero_variance_fraction': 0.5,
        'groups/too_few': 0,
        'rollouts/valid': 4,
        'rollouts/lost': 1,
        'rollouts/infra': 1,
        'rollouts/refused': 0,
        'rollouts/untrainable': 0,
        'rollouts/policy_failure': 0,
        'lag/submit_mean': 3,
        'lag/submit_max': 3,
        'lag/token_age_mean': (3 + 3 + 2 + 2 + 1) / 5,
        'lag/token_age_p95': 3,
        'lag/token_age_max': 3,
        'lag/spanning_fraction': 0.5,
        'length/trained_mean': 2.5,
        'length/generated_max': 4,
        'length/generated_mean': (4 + 1 + 2 + 3 + 1) / 5,
    }
    for name, value in want.items():
      self.assertAlmostEqual(got[name], value, msg=name)
    empty = admission.Consumed(0, 0, (), (), (), 0, 0)
    self.assertEqual(ingest.metrics(empty)['groups/trained'], 0)


def lognormal_seconds(prompt, member, attempt=1):
  """Long tasks are long for every member; a few are very long."""
  del attempt
  rng = np.random.default_rng((prompt, member))
  hard = np.random.default_rng(prompt).lognormal(0.5, 1.2)
  return float(np.ceil(min(60.0, hard * rng.uniform(0.8, 1.2))))


def some_lesson(prompt, member):
  """Every third prompt teaches nothing."""
  return float(member % 2) if prompt % 3 else 1.0


class SimulatedRunTest(parameterized.TestCase):

  def test_trained_lengths_are_distributed_like_generated_ones(self):
    pacing = admission.Pacing(4, 4, 2, 16)
    life = fleet_sim.Run(pacing, some_lesson, lognormal_seconds)
    ledger = fleet_sim.run(life.train(150))
    self.assertEqual(ledger_lib.lost(ledger), ())
    trained = [
        (batch.version - group.version, lognormal_seconds(group.prompt, m))
        for _, batch in life.batches
        for group in batch.groups
        for m in range(4)
    ]
    source = [
        lognormal_seconds(p, m) for p in range(2000) if p % 3 for m in range(4)
    ]
    lengths = [n for _, n in trained]
    self.assertLen(trained, 150 * 4 * 4)
    self.assertGreater(stats.ks_2samp(lengths, source).pvalue, 0.05)
    # The check can see the fault: dropping what is older than S is biased.
    fresh = [n for lag, n in trained if lag <= 2]
    self.assertBetween(len(fresh), 0.5 * len(trained), 0.99 * len(trained))
    self.assertLess(stats.ks_2samp(fresh, source).pvalue, 0.01)

  @parameterized.parameters(0, 1, 2)
  def test_a_task_that_always_hangs_costs_at_most_its_leases(self, staleness):
    pacing = admission.Pacing(2, 2, staleness, 8)

    def seconds(prompt, member, attempt):
      return float('inf') if (prompt, member) == (3, 1) else 1.0

    life = fleet_sim.Run(pacing, lambda p, m: float(m), seconds)
    fleet_sim.run(life.train(80))
    times = np.diff([t for t, _ in life.batches])
    consumed = [g.prompt for _, b in life.batches for g in b.groups]
    self.assertNotIn(3, consumed)  # one member is lost, one is not a group
    self.assertEqual(
        [g.fault for _, b in life.batches for g in b.untrained], ['too_few']
    )
    attempts = 3 * life.lease_seconds
    if staleness:
      self.assertLess(times.max(), 4.0)  # nobody waited for it
    else:
      self.assertBetween(times.max(), attempts, attempts + 4.0)

  @hypothesis.settings(max_examples=25, deadline=None)
  @hypothesis.given(
      seed=st.integers(0, 2**32 - 1),
      workers=st.integers(1, 12),
      refills=st.integers(0, 5),
  )
  def test_staleness_0_is_on_policy_whatever_the_arrival_order(
      self, seed, workers, refills
  ):
    pacing = admission.Pacing(3, 2, 0, refills)
    rng = random.Random(seed)
    lessons = [rng.random() < 0.4 for _ in range(100)]

    def reward(prompt, member):
      return float(member) if lessons[prompt] else 0.0

    def seconds(prompt, member, attempt):
      # Some first attempts hang, so that redelivery reorders as well.
      if attempt == 1 and rng.random() < 0.1:
        return float('inf')
      return rng.choice((1.0, 2.0, 15.0))

    life = fleet_sim.Run(pacing, reward, seconds, workers=workers)
    fleet_sim.run(life.train(6))
    prompt = 0
    for step, (_, batch) in enumerate(life.batches):
      trained, untrained = [], []
      while len(trained) < 3 and len(trained) + len(untrained) < 3 + min(
          refills, len(untrained)
      ):
        (trained if lessons[prompt] else untrained).append(prompt)
        prompt += 1
      self.assertEqual([g.prompt for g in batch.groups], trained)
      self.assertEqual([g.prompt for g in batch.untrained], untrained)
      for group in batch.groups + batch.untrained:
        self.assertEqual(group.version, step)
        for member in group.members.values():
          (window,) = member.facts.windows
          self.assertEqual({v for v, _ in window.spans}, {step})

  def test_a_trainer_thread_takes_from_a_loop_on_another_thread(self):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    gate = gate_lib.Gate(start(PACING))

    def call(coroutine):
      return asyncio.run_coroutine_threadsafe(coroutine, loop)

    async def produce():
      for prompt in range(2):
        for member in range(2):
          task_id = f'run/{prompt}/{member}'
          await gate.admit(task_id)
          cursor = 2 * prompt + member + 1
          gate.add(cursor, delivered(task_id, float(member)), seed=0)

    waiting = call(gate.take())
    call(produce()).result(600)
    batch = waiting.result(600)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(600)
    loop.close()
    self.assertEqual([g.prompt for g in batch.groups], [0, 1])

  def test_a_finite_source_is_consumed_to_its_last_prompt(self):
    pacing = admission.Pacing(4, 2, 2, 3)
    life = fleet_sim.Run(pacing, some_lesson, lognormal_seconds, prompts=30)
    ledger = fleet_sim.run(life.train(1000))
    self.assertEqual(ledger.consumed, ((0, 30),))
    self.assertEqual(ledger.in_flight, ())
    trained = sorted(g.prompt for s in ledger.recent for g in s.trained)
    self.assertEqual(trained, [p for p in range(30) if p % 3])


if __name__ == '__main__':
  absltest.main()
