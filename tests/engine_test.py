"""The engine's promises: bits, versions, routing, stops, failures, shapes."""

import asyncio
import dataclasses
import random
import threading

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.rollout import engine as engine_lib
from tests import engine_requests as lib

_ROLLOUT = config.RolloutConfig(
    slots=48, context_tokens=64, steps_per_sync=3, prefill_tokens=256
)


def _engine(*, lanes=2, params=None, refresh=None):
  return lib.engine(_ROLLOUT, lanes=lanes, params=params, refresh=refresh)


class EngineTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.engine = _engine()

  @classmethod
  def tearDownClass(cls):
    cls.engine.close()
    super().tearDownClass()

  def test_bits_do_not_depend_on_company_or_order(self):
    requests = [lib.request(i, max_tokens=1 + i % 17) for i in range(41)]
    alone = [lib.digest(lib.run(self.engine, [r])[0]) for r in requests[:6]]
    for shuffle in range(2):
      order = list(range(41))
      random.Random(shuffle).shuffle(order)
      windows = lib.run(self.engine, [requests[i] for i in order])
      together = {i: lib.digest(w) for i, w in zip(order, windows, strict=True)}
      self.assertEqual(alone, [together[i] for i in range(6)])

  def test_logps_are_the_trainers_bits(self):
    windows = lib.run(self.engine, [lib.request(i) for i in range(8)])
    for window in windows:
      scored = lib.score(lib.PARAMS[0], window)
      drawn = window.sampled[1:]
      self.assertEqual(
          scored[drawn].tobytes(), window.logps[1:][drawn].tobytes()
      )
    # The comparison can fail: one weight moved by one bf16 step is seen.
    moved = lib.PARAMS[0].norm.at[0].multiply(1 + 2**-7)
    other = lib.score(lib.PARAMS[0].replace(norm=moved), window)
    self.assertFalse(np.array_equal(other, scored))

  def test_window_holds_context_then_sample(self):
    request = lib.request(3, max_tokens=9)
    window = lib.run(self.engine, [request])[0]
    n = len(request.context)
    self.assertLen(window, n + 9)
    np.testing.assert_array_equal(window.tokens[:n], request.context.tokens)
    np.testing.assert_array_equal(window.sampled, np.arange(n + 9) >= n)
    self.assertTrue(np.all(window.logps[:n] == 0))
    self.assertTrue(np.all(window.logps[n:] < 0))
    self.assertTrue(np.all(window.versions == 0))
    experts = window.routing.experts
    self.assertEqual(experts.dtype, np.uint8)
    self.assertTrue(np.all(experts[:-1] < lib.CFG.experts))
    self.assertTrue(np.all(experts[-1] == lib.BLANK))
    self.assertTrue(np.all(experts[:-1, :, 0] != experts[:-1, :, 1]))

  def test_seed_decides_the_sample(self):
    tokens = list(range(20))
    windows = lib.run(
        self.engine, [lib.request(s, tokens=tokens) for s in (1, 2, 1)]
    )
    self.assertEqual(lib.digest(windows[0]), lib.digest(windows[2]))
    self.assertNotEqual(lib.digest(windows[0]), lib.digest(windows[1]))

  def test_greedy_ignores_the_seed(self):
    windows = lib.run(
        self.engine,
        [lib.request(s, tokens=[7, 8], temperature=0.0) for s in (1, 2)],
    )
    self.assertEqual(lib.digest(windows[0]), lib.digest(windows[1]))

  @parameterized.parameters(True, False)
  def test_resuming_a_cut_window_gives_the_same_bits(self, with_routing):
    request = lib.request(5, max_tokens=14)
    whole = lib.run(self.engine, [request])[0]
    cuts = [
        engine_lib.Request(
            lib.cut(whole, len(request.context) + i, with_routing),
            14 - i,
            frozenset(),
            request.seed,
        )
        for i in (1, 5, 13)
    ]
    for window in lib.run(self.engine, cuts):
      self.assertEqual(lib.digest(whole), lib.digest(window))

  def test_shared_prefill_equals_separate_prefills(self):
    requests = [lib.request(i, tokens=range(30)) for i in range(20)]
    before = self.engine.stats().prefill_tokens
    group = [f.result(timeout=600) for f in self.engine.submit_group(requests)]
    shared = self.engine.stats().prefill_tokens
    self.assertEqual(shared - before, 30)
    alone = [lib.run(self.engine, [r])[0] for r in requests[:5]]
    self.assertEqual(self.engine.stats().prefill_tokens - shared, 5 * 30)
    self.assertEqual(
        [lib.digest(w) for w in group[:5]], [lib.digest(w) for w in alone]
    )
    self.assertGreater(len({lib.digest(w) for w in group}), 15)

  def test_more_requests_than_slots(self):
    requests = [lib.request(i, tokens=range(5)) for i in range(130)]
    windows = [
        f.result(timeout=600) for f in self.engine.submit_group(requests)
    ]
    self.assertEqual(
        lib.digest(windows[127]),
        lib.digest(lib.run(self.engine, requests[127:128])[0]),
    )

  def test_stop_token_ends_the_sample_and_belongs_to_it(self):
    free = lib.run(self.engine, [lib.request(9, max_tokens=16)])[0]
    drawn = free.tokens[free.sampled]
    for stop in {int(t) for t in drawn}:
      window = lib.run(
          self.engine, [lib.request(9, max_tokens=16, stop=[stop, 63])]
      )[0]
      ends = np.flatnonzero((drawn == stop) | (drawn == 63))[0] + 1
      np.testing.assert_array_equal(window.tokens[window.sampled], drawn[:ends])
      self.assertTrue(np.all(window.routing.experts[-1] == lib.BLANK))

  def test_every_block_is_reported(self):
    blocks = []
    request = dataclasses.replace(
        lib.request(9, max_tokens=16),
        on_tokens=lambda ids: blocks.append(ids.tolist()),
    )
    (window,) = lib.run(self.engine, [request])
    self.assertLen(blocks, 6)  # of three tokens each, the last one of one
    self.assertEqual(sum(blocks, []), window.tokens[window.sampled].tolist())

  def test_a_stop_token_in_the_context_does_not_end_anything(self):
    window = lib.run(
        self.engine, [lib.request(1, tokens=[5] * 9, max_tokens=1, stop=[5])]
    )[0]
    self.assertLen(window, 10)

  def test_full_context_ends_the_sample(self):
    request = lib.request(4, tokens=range(60), max_tokens=50)
    self.assertLen(lib.run(self.engine, [request])[0], _ROLLOUT.context_tokens)

  @parameterized.named_parameters(
      ('long', dict(tokens=[1] * 64), 'context'),
      ('empty', dict(tokens=[]), 'context'),
      ('vocab', dict(tokens=[64]), 'token ids'),
      ('max_tokens', dict(max_tokens=0), 'max_tokens'),
      ('temperature', dict(temperature=-1.0), 'temperature'),
      ('stop', dict(stop=[64]), 'stop'),
  )
  def test_refuses(self, change, text):
    with self.assertRaisesRegex(ValueError, text):
      self.engine.submit(lib.request(1, **change))

  def test_refuses_foreign_routing_and_wide_seed(self):
    experts = trace.RoutingTrace(np.zeros((4, 3, 2), np.uint8))
    with self.assertRaisesRegex(ValueError, 'routing'):
      self.engine.submit(
          engine_lib.Request(lib.context([1] * 4, experts), 4, frozenset(), 0)
      )
    with self.assertRaisesRegex(ValueError, 'seed'):
      self.engine.submit(
          engine_lib.Request(lib.context([1] * 4), 4, frozenset(), 2**32)
      )

  def test_recorded_routes_are_obeyed_and_kept(self):
    natural = lib.run(self.engine, [lib.request(6, tokens=range(20))])[0]
    recorded = natural.routing.experts[:20].copy()
    recorded[4:9] = [[3, 1], [0, 2]]
    recorded[15:] = lib.BLANK
    request = engine_lib.Request(
        lib.context(range(20), trace.RoutingTrace(recorded)), 8, frozenset(), 6
    )
    window = lib.run(self.engine, [request])[0]
    experts = window.routing.experts
    np.testing.assert_array_equal(experts[:15], recorded[:15])
    self.assertTrue(np.all(experts[15:-1] < lib.CFG.experts))
    self.assertFalse(np.array_equal(natural.logps, window.logps))
    self.assertEqual(
        lib.score(lib.PARAMS[0], window)[19:].tobytes(),
        window.logps[20:].tobytes(),
    )

  def test_no_compilation_after_warmup(self):
    self.engine.warmup()
    before = engine_lib.compilations()
    requests = [lib.request(i, max_tokens=1 + i % 7) for i in range(60)]
    for n in (1, 3, 60):
      lib.run(self.engine, requests[:n])
    self.engine.submit_group(requests[:9])[-1].result(timeout=600)
    with _engine() as other:
      lib.run(other, requests[:2])
    self.assertEqual(engine_lib.compilations(), before)

  def test_policy_awaits_many_windows(self):
    policy = engine_lib.EnginePolicy(self.engine)

    async def episode(seed):
      request = lib.request(seed)
      return await policy.complete(
          request.context,
          max_tokens=12,
          stop=frozenset(),
          seed=seed,
          temperature=1.0,
      )

    async def everything():
      return await asyncio.gather(*(episode(i) for i in range(30)))

    windows = asyncio.run(everything())
    alone = lib.run(self.engine, [lib.request(i) for i in range(3)])
    self.assertEqual(
        [lib.digest(w) for w in windows[:3]], [lib.digest(w) for w in alone]
    )
    self.assertEqual(policy.digests, {0: 'digest-0'})


class LanesTest(parameterized.TestCase):

  @parameterized.parameters(1, 2)
  def test_bits_do_not_depend_on_the_lanes(self, lanes):
    requests = [lib.request(i, max_tokens=1 + i % 17) for i in range(30)]
    with _engine(lanes=1) as engine:
      want = [lib.digest(lib.run(engine, [r])[0]) for r in requests[:4]]
    with _engine(lanes=lanes) as engine:
      alone = [lib.digest(lib.run(engine, [r])[0]) for r in requests[:4]]
      together = [
          lib.digest(f.result(timeout=600))
          for f in engine.submit_group(requests)
      ]
    self.assertEqual(want, alone)
    self.assertEqual(want, together[:4])

  def test_a_group_is_split_only_if_no_lane_has_room(self):
    with _engine(lanes=2) as engine:  # of 24 slots each

      def prefills(*groups):
        before = engine.stats().prefill_tokens
        requests = [
            lib.request(i, tokens=[context] * 10)
            for context, size in enumerate(groups)
            for i in range(size)
        ]
        windows = [
            lib.digest(f.result(timeout=600))
            for f in engine.submit_group(requests)
        ]
        return windows, (engine.stats().prefill_tokens - before) // 10

      whole, count = prefills(24, 24)
      self.assertEqual(count, 2)
      split, count = prefills(40)
      self.assertEqual(count, 2)
      self.assertEqual(split[:24], whole[:24])
      self.assertEqual(prefills(20, 20, 8)[1], 4)  # the last one in halves

  def test_all_lanes_take_new_weights_before_the_same_block(self):

    def run(lanes):
      calls = []

      def refresh():
        calls.append(None)
        if len(calls) in (4, 9):
          step = len(calls) // 4
          return lib.version(step), lib.PARAMS[step]
        return None

      with _engine(lanes=lanes, refresh=refresh) as engine:
        requests = [
            lib.request(i, tokens=range(9), max_tokens=40) for i in range(40)
        ]
        return [f.result(timeout=600) for f in engine.submit_group(requests)]

    windows = run(2)
    self.assertEqual(set(windows[0].versions), {0, 1, 2})
    for window in windows:
      np.testing.assert_array_equal(window.versions, windows[0].versions)
    self.assertEqual(
        [lib.digest(w) for w in windows], [lib.digest(w) for w in run(1)]
    )

  def test_no_more_lanes_than_slots(self):
    rollout = dataclasses.replace(_ROLLOUT, slots=1)
    with _engine(lanes=1) as engine:
      want = lib.digest(lib.run(engine, [lib.request(1)])[0])
    with engine_lib.Engine(
        lib.CFG, rollout, lib.version(0), lib.PARAMS[0], devices=jax.devices()
    ) as engine:
      windows = lib.run(
          engine, [lib.request(1), lib.request(2), lib.request(1)]
      )
    self.assertEqual(
        [want, want], [lib.digest(w) for w in (windows[0], windows[2])]
    )


class SwapTest(parameterized.TestCase):

  @parameterized.parameters(1, 2)
  def test_a_request_is_served_by_weights_that_were_ready_before_it(
      self, lanes
  ):
    calls, late = [], []

    def refresh():
      calls.append(None)
      if len(calls) == 1:
        # Weights get ready just after this look for them, and who waited for
        # them submits before the engine does anything else.
        late.append(engine.submit(lib.request(7)))
      return (lib.version(1), lib.PARAMS[1]) if len(calls) == 2 else None

    with _engine(lanes=lanes, refresh=refresh) as engine:
      early = engine.submit(lib.request(3)).result(timeout=600)
      window = late[0].result(timeout=600)
    self.assertEqual(set(early.versions), {0, 1})
    self.assertEqual(set(window.versions), {1})
    start = window.sampled.argmax()
    self.assertEqual(
        lib.score(lib.PARAMS[1], window)[start - 1 :].tobytes(),
        window.logps[start:].tobytes(),
    )

  def test_swaps_under_running_requests(self):
    calls = []

    def refresh():
      calls.append(None)
      if len(calls) % 4 == 0 and len(calls) <= 16:
        step = len(calls) // 4
        return lib.version(step), lib.PARAMS[step]
      return None

    with _engine(refresh=refresh) as engine:
      requests = [
          lib.request(i, tokens=range(i % 9 + 1), max_tokens=50)
          for i in range(100)
      ]
      windows = lib.run(engine, requests)
      stats = engine.stats()
      digests = dict(engine.digests)
    self.assertEqual((stats.swaps, stats.aborted), (4, 0))
    self.assertGreater(stats.swap_seconds, 0)
    self.assertEqual(digests, {i: f'digest-{i}' for i in range(5)})
    spans = 0
    for request, window in zip(requests, windows, strict=True):
      self.assertLen(window, len(request.context) + 50)
      self.assertTrue(np.all(np.diff(window.versions) >= 0))
      spans += window.versions[0] < window.versions[-1]
    self.assertGreater(spans, 40)

  def test_tokens_carry_the_weights_that_drew_them(self):
    swap = threading.Event()

    def refresh():
      if swap.is_set():
        swap.clear()
        return lib.version(1), lib.PARAMS[1]
      return None

    with _engine(refresh=refresh) as engine:
      request = lib.request(2, tokens=range(10), max_tokens=6)
      first = lib.run(engine, [request])[0]
      swap.set()
      second = lib.run(engine, [request])[0]
      follow = lib.append(first, [1, 2, 3])
      turn = lib.run(engine, [engine_lib.Request(follow, 5, frozenset(), 77)])[
          0
      ]
    self.assertEqual(set(first.versions), {0})
    self.assertEqual(set(second.versions), {1})  # nothing cached from before
    for window, params in ((first, lib.PARAMS[0]), (second, lib.PARAMS[1])):
      self.assertEqual(
          lib.score(params, window)[9:].tobytes(), window.logps[10:].tobytes()
      )
    # The next turn keeps what the first one recorded, its own is version 1.
    np.testing.assert_array_equal(turn.versions, [0] * 16 + [1] * 8)
    self.assertEqual(turn.logps[:16].tobytes(), first.logps.tobytes())
    np.testing.assert_array_equal(
        turn.routing.experts[:15], first.routing.experts[:15]
    )
    self.assertTrue(np.all(turn.routing.experts[15:-1] < lib.CFG.experts))
    self.assertEqual(
        lib.score(lib.PARAMS[1], turn)[18:].tobytes(), turn.logps[19:].tobytes()
    )

  def test_weights_are_copied(self):
    ours = jax.tree.map(lambda x: np.array(x), lib.PARAMS[0])
    donated = jax.tree.map(lambda x: x.copy(), lib.PARAMS[1])
    swap = threading.Event()

    def refresh():
      if swap.is_set():
        swap.clear()
        return lib.version(1), donated
      return None

    def sample():
      return lib.digest(lib.run(engine, [lib.request(1)])[0])

    with _engine(params=ours, refresh=refresh) as engine:
      first = sample()
      for leaf in jax.tree.leaves(ours):
        leaf[...] = 0
      self.assertEqual(first, sample())
      swap.set()
      second = sample()
      for leaf in jax.tree.leaves(donated):
        leaf.delete()
      self.assertEqual(second, sample())
    self.assertNotEqual(first, second)


class FailureTest(parameterized.TestCase):

  def _assert_fails(self, engine, pending, text):
    for future in pending:
      with self.assertRaisesRegex(RuntimeError, text):
        future.result(timeout=600)
    with self.assertRaisesRegex(RuntimeError, 'ended'):
      engine.submit(lib.request(1))
    self.assertEqual(engine.stats().aborted, len(pending))
    engine.close()

  @parameterized.parameters(1, 4)
  def test_an_error_reaches_every_caller(self, call):
    calls = []

    def refresh():
      calls.append(None)
      if len(calls) == call:
        raise OSError('the store is gone')

    engine = _engine(refresh=refresh)
    pending = engine.submit_group(
        [lib.request(i, max_tokens=60) for i in range(90)]
    )
    self._assert_fails(engine, pending, 'the store is gone')

  @parameterized.named_parameters(
      ('backwards', lambda: (lib.version(0), lib.PARAMS[1]), 'only go forward'),
      (
          'f32',
          lambda: (
              lib.version(1),
              jax.tree.map(lambda x: x.astype(jnp.float32), lib.PARAMS[1]),
          ),
          'shapes or types',
      ),
  )
  def test_bad_weights_are_refused(self, refresh, text):
    engine = _engine(refresh=refresh)
    pending = [engine.submit(lib.request(1))]
    self._assert_fails(engine, pending, text)

  def test_close_fails_what_is_left(self):
    gate, entered = threading.Event(), threading.Event()

    def refresh():
      entered.set()
      gate.wait(600)

    engine = _engine(refresh=refresh)
    pending = [engine.submit(lib.request(i, max_tokens=60)) for i in range(3)]
    self.assertTrue(entered.wait(600))
    closer = threading.Thread(target=engine.close)
    closer.start()
    gate.set()
    closer.join(600)
    self._assert_fails(engine, pending, 'closed')

  def test_cancelled_requests_take_no_slot(self):
    gate, entered = threading.Event(), threading.Event()

    def refresh():
      entered.set()
      gate.wait(600)

    with _engine(refresh=refresh) as engine:
      pending = [engine.submit(lib.request(0))]
      self.assertTrue(entered.wait(600))
      pending += [engine.submit(lib.request(i)) for i in range(1, 4)]
      self.assertTrue(pending[1].cancel())
      gate.set()
      for i in (0, 2, 3):
        self.assertNotEmpty(pending[i].result(timeout=600).tokens)
      self.assertEqual(engine.stats().decoded_tokens, 36)


if __name__ == '__main__':
  absltest.main()
