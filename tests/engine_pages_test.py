"""A small page pool changes when requests run, and never what they say."""

from concurrent import futures
import dataclasses
import threading

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.rollout import engine as engine_lib
from tests import engine_requests as lib

_ROOMY = config.RolloutConfig(slots=12, context_tokens=96, steps_per_sync=3)
# Seven pages for twelve windows of up to three, prompts in chunks of 20.
_TIGHT = config.RolloutConfig(
    slots=12,
    context_tokens=96,
    steps_per_sync=3,
    prefill_tokens=20,
    cache_tokens=7 * 32,
)


def _engine(rollout=_TIGHT, refresh=None, params=None):
  return lib.engine(rollout, lanes=1, refresh=refresh, params=params)


def _requests(count):
  rng = np.random.default_rng(3)
  return [
      lib.request(
          i, tokens=rng.integers(0, 64, rng.integers(1, 80)), max_tokens=40
      )
      for i in range(count)
  ]


def _group(engine, requests):
  """All are there before the first block."""
  return [f.result(timeout=600) for f in engine.submit_group(requests)]


class TightTest(parameterized.TestCase):

  def test_bits_do_not_depend_on_room_chunks_or_preemption(self):
    requests = _requests(24)
    with _engine(_ROOMY) as engine:
      want = [lib.digest(w) for w in lib.run(engine, requests)]
      self.assertEqual(engine.stats().preemptions, 0)
    with _engine() as engine:
      for order in (range(24), reversed(range(24))):
        order = list(order)
        windows = lib.run(engine, [requests[i] for i in order])
        got = dict(zip(order, map(lib.digest, windows), strict=True))
        self.assertEqual([got[i] for i in range(24)], want)
      self.assertGreater(engine.stats().preemptions, 5)
      self.assertEqual(engine.free(), (7, 12))

  def test_a_window_preempted_at_a_swap_keeps_its_old_keys(self):
    # In the ninth block each needs a third page: the youngest gives way, right
    # after the swap. Recomputing its old keys with the new weights would show.
    requests = [
        lib.request(i, tokens=range(i, 40 + i), max_tokens=50) for i in range(3)
    ]

    def run(cache_tokens):
      calls = []

      def refresh():
        calls.append(None)
        return (lib.version(1), lib.PARAMS[1]) if len(calls) == 9 else None

      rollout = dataclasses.replace(_ROOMY, cache_tokens=cache_tokens)
      with _engine(rollout, refresh) as engine:
        windows = _group(engine, requests)
        return windows, engine.stats().preemptions

    want, _ = run(None)
    got, preemptions = run(8 * 32)
    self.assertEqual(preemptions, 1)
    for a, b in zip(got, want, strict=True):
      self.assertEqual(lib.digest(a), lib.digest(b))
      self.assertEqual(np.sum(a.versions == 1), 90 - 64)

  def test_no_compilation_after_warmup(self):
    with _engine() as engine:
      engine.warmup()
      before = engine_lib.compilations()
      lib.run(engine, _requests(20))
      _group(engine, [lib.request(i, tokens=range(40)) for i in range(5)])
      self.assertGreater(engine.stats().preemptions, 0)
    self.assertEqual(engine_lib.compilations(), before)

  def test_cancelling_frees_the_pages(self):
    calls, pending, submitted = [], [], threading.Event()

    def refresh():
      submitted.wait(60)
      calls.append(None)
      if len(calls) == 4:
        # Of a group whose last page is half full its first; one that decodes;
        # one that has no slot yet.
        for i in (0, 3, 9):
          self.assertTrue(pending[i].cancel())
      return None

    requests = [
        lib.request(i, tokens=np.arange(90) % 64, max_tokens=20)
        for i in range(3)
    ] + [lib.request(i, tokens=[i], max_tokens=90) for i in range(3, 10)]
    with _engine() as engine:
      want = [lib.digest(w) for w in lib.run(engine, requests)]
    with _engine(refresh=refresh) as engine:
      pending += engine.submit_group(requests)
      submitted.set()
      futures.wait(pending, timeout=60)
      got = [None if f.cancelled() else lib.digest(f.result()) for f in pending]
      lib.run(engine, requests[:1])
      self.assertEqual(engine.stats().cancelled, 3)
      self.assertEqual(engine.stats().aborted, 0)
      self.assertEqual(engine.free(), (7, 12))
    for i in (0, 3, 9):
      want[i] = None
    self.assertEqual(got, want)


class PrefixTest(parameterized.TestCase):

  def _cached(self, engine, request):
    before = engine.stats().cached_tokens
    (window,) = lib.run(engine, [request])
    return window, engine.stats().cached_tokens - before

  def test_pages_are_found_by_equal_prompts_and_later_turns(self):
    first = lib.request(1, tokens=range(60), max_tokens=20)
    with _engine(_ROOMY) as engine:
      window, cached = self._cached(engine, first)
      self.assertEqual(cached, 0)
      again, cached = self._cached(engine, first)
      self.assertEqual(cached, 32)
      self.assertEqual(lib.digest(again), lib.digest(window))
      turn = lib.append(window, [5] * 5)
      second = engine_lib.Request(turn, 6, frozenset(), 7)
      found, cached = self._cached(engine, second)
      self.assertEqual(cached, 64)
      # Other routes in the prompt are other keys and values.
      other = window.routing.experts[:60].copy()
      other[3] = other[3, :, ::-1]
      context = lib.context(range(60), trace.RoutingTrace(other))
      request = engine_lib.Request(context, 6, frozenset(), 7)
      _, cached = self._cached(engine, request)
      self.assertEqual(cached, 0)
    with _engine(_ROOMY) as engine:
      fresh, cached = self._cached(engine, second)
      self.assertEqual(cached, 0)
    self.assertEqual(lib.digest(found), lib.digest(fresh))
    np.testing.assert_array_equal(
        found.routing.experts[:79], window.routing.experts[:79]
    )

  def test_a_swap_hides_what_older_weights_have_filled(self):
    fresh = []
    request = lib.request(1, tokens=np.arange(70) % 64, max_tokens=8)
    refresh = lambda: fresh.pop() if fresh else None
    with _engine(_ROOMY, refresh) as engine:
      old, _ = self._cached(engine, request)
      fresh.append((lib.version(1), lib.PARAMS[1]))
      new, cached = self._cached(engine, request)
      self.assertEqual(cached, 0)
      _, cached = self._cached(engine, request)
      self.assertEqual(cached, 64)
    self.assertNotEqual(lib.digest(old), lib.digest(new))
    start = len(request.context)
    self.assertEqual(
        lib.score(lib.PARAMS[1], new)[start - 1 :].tobytes(),
        new.logps[start:].tobytes(),
    )

  def test_one_version_prefills_a_context(self):
    # In chunks of 20; the swap comes after the first of four, when another
    # prompt has found an old page.
    group = [
        lib.request(i, tokens=np.arange(75) % 64, max_tokens=6)
        for i in range(3)
    ]
    page = lib.request(8, tokens=[*range(32), *[7] * 40], max_tokens=6)
    with _engine(params=lib.PARAMS[1]) as engine:
      want = [lib.digest(w) for w in _group(engine, [*group, page])]
    calls, started = [], threading.Event()

    def refresh():
      started.wait(60)
      calls.append(None)
      return (lib.version(1), lib.PARAMS[1]) if len(calls) == 4 else None

    with _engine(refresh=refresh) as engine:
      first = engine.submit(lib.request(9, tokens=range(40), max_tokens=1))
      pending = engine.submit_group([*group, page])
      started.set()
      first.result(timeout=600)
      windows = [f.result(timeout=600) for f in pending]
      self.assertEqual(engine.stats().swaps, 1)
      self.assertEqual(engine.free(), (7, 12))
    for window in windows:
      self.assertEqual(set(window.versions), {1})
    renamed = [
        dataclasses.replace(w, versions=np.zeros_like(w.versions))
        for w in windows
    ]
    self.assertEqual([lib.digest(w) for w in renamed], want)

  def test_a_session_comes_back_to_the_lane_with_its_pages(self):
    rollout = dataclasses.replace(_ROOMY, slots=24)
    with lib.engine(rollout, lanes=2) as engine:
      sessions = _group(
          engine,
          [lib.request(i, tokens=[i] * 40, max_tokens=24) for i in range(8)],
      )
      before = engine.stats().cached_tokens
      turns = [
          engine_lib.Request(lib.append(w, [5] * 5), 3, frozenset(), i)
          for i, w in enumerate(sessions)
      ]
      _group(engine, turns[::-1])
      # Each had 64 tokens, the last of which was never fed.
      self.assertEqual(engine.stats().cached_tokens - before, 8 * 32)

  def test_a_common_prefix_does_not_crowd_one_lane(self):
    rollout = dataclasses.replace(_ROOMY, slots=24)
    with lib.engine(rollout, lanes=2) as engine:
      lib.run(engine, [lib.request(0, tokens=range(40), max_tokens=1)])
      before = engine.stats().prefill_tokens
      _group(
          engine,
          [
              lib.request(i, tokens=[*range(32), i, i], max_tokens=3)
              for i in range(12)
          ],
      )
      cold = engine.stats().prefill_tokens - before - 12 * 2
      # Some had to prefill the prefix again, on the other lane.
      self.assertIn(cold, [32 * n for n in range(1, 7)])

  def test_one_prefill_for_a_group_of_128(self):
    group = [lib.request(i, tokens=range(50), max_tokens=3) for i in range(128)]
    with _engine(_ROOMY) as engine:
      windows = _group(engine, group)
      stats = engine.stats()
      alone = lib.run(engine, group[100:101])
    # Twelve slots: later members find the whole page and redo the rest.
    self.assertEqual(stats.prefill_tokens + stats.cached_tokens, 11 * 50)
    self.assertEqual(stats.cached_tokens, 10 * 32)
    self.assertEqual(lib.digest(windows[100]), lib.digest(alone[0]))


class SyncTest(parameterized.TestCase):

  def test_a_turn_ends_on_its_version_and_new_requests_wait(self):
    calls, late = [], []

    def refresh():
      calls.append(None)
      if len(calls) == 3:
        late.append(engine.submit(lib.request(9, tokens=[9], max_tokens=4)))
        return lib.version(1), lib.PARAMS[1]
      return None

    rollout = dataclasses.replace(_ROOMY, swap='sync')
    with _engine(rollout, refresh) as engine:
      windows = _group(engine, _requests(5))
      after = late[0].result(timeout=600)
      stats = engine.stats()
    for window in windows:
      self.assertEqual(set(window.versions), {0})
    self.assertEqual(set(after.versions), {1})
    self.assertEqual((stats.swaps, stats.aborted), (1, 0))
    self.assertGreater(stats.longest_swap_seconds, 0)


class StopSequenceTest(parameterized.TestCase):

  def test_a_sampled_sequence_ends_the_sample(self):
    free = lib.request(4, tokens=range(8), max_tokens=30)
    with _engine(_ROOMY) as engine:
      (whole,) = lib.run(engine, [free])
      drawn = whole.tokens[8:].tolist()
      for size in (1, 2, 5):
        stop = tuple(drawn[7 : 7 + size])
        ends = next(
            i + size for i in range(30) if tuple(drawn[i : i + size]) == stop
        )
        # One across the border of prompt and sample does not count.
        border = (7, drawn[0])
        request = lib.request(
            4, tokens=range(8), max_tokens=30, stop_sequences=(stop, border)
        )
        (window,) = lib.run(engine, [request])
        self.assertEqual(window.tokens[8:].tolist(), drawn[:ends])
      with self.assertRaisesRegex(ValueError, 'stop_sequences'):
        engine.submit(lib.request(1, stop_sequences=((),)))


if __name__ == '__main__':
  absltest.main()
