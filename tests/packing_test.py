"""Packing loses nothing, misplaces nothing, and refuses what it cannot do."""

import collections

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.learner import items as items_lib
from composer_jax.learner import packing

_MODEL = config.ModelConfig(layers=2, experts=4, top_k=2)
_DTYPE = trace.route_dtype(_MODEL.experts)
_BLANK = trace.blank_route(_DTYPE)
_NOW = 9
_FIELDS = ('tokens', 'sampled', 'logps', 'versions')


def _segment(rng, length, first=0):
  """A trace as an engine leaves it; tokens count up from `first`."""
  sampled = rng.random(length) < 0.5
  sampled[0] = False
  experts = rng.integers(
      0, _MODEL.experts, (length, _MODEL.layers, _MODEL.top_k), _DTYPE
  )
  experts[-1] = _BLANK
  return trace.TokenTrace(
      np.arange(first, first + length, dtype=np.int32),
      sampled,
      np.where(sampled, -rng.exponential(1.0, length), 0).astype(np.float32),
      np.sort(rng.integers(0, _NOW + 1, length)).astype(np.int32),
      trace.RoutingTrace(experts),
  )


def _unpack(b):
  """[(rollout, advantage, trace)] of a batch, read from its arrays alone."""
  found = []
  for row in range(b.tokens.shape[0]):
    for segment in range(1, b.segments[row].max(initial=0) + 1):
      here = row, np.flatnonzero(b.segments[row] == segment)
      (rollout,) = set(b.rollouts[here].tolist())
      (advantage,) = set(b.advantages[here].tolist())
      found.append(
          (
              rollout,
              advantage,
              trace.TokenTrace(
                  b.tokens[here],
                  b.sampled[here],
                  b.behaviour_logps[here],
                  _NOW - b.staleness[here],
                  trace.RoutingTrace(b.routing[here]),
              ),
              here,
          )
      )
  return found


@st.composite
def _problems(draw):
  """(items, shape); every segment fits a row and every rollout a batch."""
  key_block = draw(st.sampled_from([1, 4, 8]))
  tokens = draw(st.integers(1, 5)) * 8
  shape = packing.Shape(draw(st.integers(2, 4)), tokens, key_block)
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  items, first = [], 0
  rollouts = draw(st.permutations(range(1, draw(st.integers(1, 7)) + 1)))
  for rollout in rollouts:
    advantage = float(np.float32(rng.normal()))
    for _ in range(draw(st.integers(1, 2))):
      length = draw(st.integers(1, tokens))
      segment = _segment(rng, length, first)
      items.append(items_lib.Item(rollout, segment, advantage))
      first += length
  return items, shape


def _pack(items, shape, **options):
  options = dict(now=_NOW, replay=_MODEL) | options
  return packing.pack_all(items, shape, **options)


class PackingTest(parameterized.TestCase):

  @hypothesis.settings(deadline=None, max_examples=60, derandomize=True)
  @hypothesis.given(_problems())
  def test_what_went_in_comes_out(self, problem):
    items, shape = problem
    batches, stats = _pack(items, shape)
    self.assertEqual(stats.batches, len(batches))
    got, homes = {}, collections.defaultdict(set)
    for n, b in enumerate(batches):
      for leaf in (b.tokens, b.segments, b.positions, b.sampled):
        self.assertEqual(leaf.shape, (shape.rows, shape.tokens_per_row))
      for rollout, advantage, t, (_, columns) in _unpack(b):
        self.assertEqual(columns[0] % shape.key_block, 0)
        np.testing.assert_array_equal(np.diff(columns), 1)
        got[int(t.tokens[0])] = rollout, advantage, t
        homes[rollout].add(n)
    self.assertLen(got, len(items))  # tokens are unique: no copy, no loss
    for item in items:
      rollout, advantage, t = got[int(item.trace.tokens[0])]
      self.assertEqual((rollout, advantage), (item.rollout, item.advantage))
      for name in _FIELDS:
        want = getattr(item.trace, name)
        np.testing.assert_array_equal(getattr(t, name), want)
      np.testing.assert_array_equal(
          t.routing.experts, item.trace.routing.experts
      )
    self.assertTrue(all(len(h) == 1 for h in homes.values()))
    trained = sum(int(b.sampled.sum()) for b in batches)
    self.assertEqual(trained, sum(i.trace.sampled.sum() for i in items))
    self.assertEqual(trained, stats.sampled_tokens)

  @hypothesis.settings(deadline=None, max_examples=30, derandomize=True)
  @hypothesis.given(_problems())
  def test_pads_and_positions(self, problem):
    items, shape = problem
    for b in _pack(items, shape)[0]:
      pad = b.segments == 0
      for leaf in (b.rollouts, b.sampled, b.advantages, b.staleness):
        self.assertFalse(leaf[pad].any())
      self.assertFalse(b.behaviour_logps[pad].any())
      self.assertTrue((b.routing[pad] == _BLANK).all())
      for *_, here in _unpack(b):
        np.testing.assert_array_equal(
            b.positions[here], np.arange(len(here[1]))
        )
      self.assertFalse(b.behaviour_logps[~b.sampled].any())

  @hypothesis.settings(deadline=None, max_examples=20, derandomize=True)
  @hypothesis.given(_problems())
  def test_is_a_function_of_the_items(self, problem):
    items, shape = problem
    first, again = _pack(items, shape), _pack(list(items), shape)
    self.assertEqual(first[1], again[1])
    for a, b in zip(first[0], again[0], strict=True):
      for name in ('tokens', 'segments', 'rollouts', 'routing'):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))

  def _items(self, *lengths, rollouts=None):
    rng = np.random.default_rng(0)
    starts = np.cumsum([0, *lengths])
    return [
        items_lib.Item(r, _segment(rng, n, int(s)), 0.5)
        for r, n, s in zip(
            rollouts or range(1, len(lengths) + 1),
            lengths,
            starts,
            strict=False,
        )
    ]

  def test_longest_first_fills_the_rows(self):
    (b,), stats = _pack(self._items(4, 28, 12, 20), packing.Shape(2, 32, 4))
    self.assertEqual(stats.fill_fraction, 1.0)
    np.testing.assert_array_equal(b.segments[0], [1] * 28 + [2] * 4)
    np.testing.assert_array_equal(b.segments[1], [1] * 20 + [2] * 12)

  def test_ties_keep_their_order(self):
    (b,), _ = _pack(self._items(8, 8, 8, 8), packing.Shape(2, 16, 8))
    np.testing.assert_array_equal(b.rollouts[:, ::8], [[1, 2], [3, 4]])

  def test_the_last_segment_of_a_row_needs_no_alignment_room(self):
    (b,), _ = _pack(self._items(5, 5), packing.Shape(1, 13, 8))
    np.testing.assert_array_equal(np.flatnonzero(b.segments[0] == 2) >= 8, True)

  def test_pack_says_how_much_more_it_needs(self):
    items, shape = self._items(30, 30, 30), packing.Shape(1, 32, 4)
    with self.assertRaisesRegex(ValueError, '3 segments.*need 3 batches'):
      packing.pack(items, shape, now=_NOW)
    b, _ = packing.pack(items, packing.Shape(3, 32, 4), now=_NOW)
    self.assertIsNone(b.routing)

  def test_a_rollout_is_never_split(self):
    items = self._items(30, 30, 30, rollouts=[1, 2, 1])
    batches, _ = _pack(items, packing.Shape(2, 32, 4))
    self.assertLen(batches, 2)
    self.assertEqual(set(batches[0].rollouts[:, 0].tolist()), {1})
    with self.assertRaisesRegex(ValueError, 'rollout 1: its 2 segments of 60'):
      _pack(items, packing.Shape(1, 32, 4))

  def test_nothing_to_pack_is_one_batch_of_pads(self):
    (b,), stats = _pack([], packing.Shape(2, 16, 4))
    self.assertFalse(b.segments.any())
    self.assertEqual((stats.tokens, stats.age_mean), (0, 0.0))

  def test_withheld_tokens_stay_as_context(self):
    (item,) = self._items(16)
    shape = packing.Shape(1, 16, 4)
    # The bound is an age that occurs: a token exactly as old is kept.
    drawn = np.unique(item.trace.versions[item.trace.sampled])
    oldest = int(drawn[len(drawn) // 2])
    (b,), stats = _pack(
        [item], shape, withhold_staleness_versions=_NOW - oldest
    )
    (full,), _ = _pack([item], shape)
    fresh = item.trace.versions >= oldest
    np.testing.assert_array_equal(b.sampled[0], item.trace.sampled & fresh)
    self.assertEqual(stats.withheld_tokens, (item.trace.sampled & ~fresh).sum())
    self.assertBetween(stats.withheld_tokens, 1, stats.sampled_tokens - 1)
    for name in ('tokens', 'segments', 'advantages', 'staleness', 'routing'):
      np.testing.assert_array_equal(getattr(b, name), getattr(full, name))

  def test_stats(self):
    versions = np.array([0, 7, 7, 9, 9], np.int32)
    mixed = trace.TokenTrace(
        np.arange(5, dtype=np.int32),
        np.array([False, True, True, True, False]),
        np.zeros(5, np.float32),
        versions,
        _segment(np.random.default_rng(0), 5).routing,
    )
    mixed.routing.experts[0] = _BLANK
    _, stats = _pack([items_lib.Item(1, mixed, 1.0)], packing.Shape(2, 8, 4))
    self.assertEqual(stats.tokens, 5)
    self.assertAlmostEqual(stats.fill_fraction, 5 / 16)
    self.assertAlmostEqual(stats.age_mean, 4 / 3)
    self.assertEqual((stats.age_max, stats.mixed_version_fraction), (2, 1.0))
    self.assertAlmostEqual(stats.blank_route_fraction, 1 / 4)


class DocumentsTest(absltest.TestCase):

  def test_every_token_but_the_first_is_a_target(self):
    docs = [np.arange(n, dtype=np.int32) for n in (7, 12, 3)]
    b, stats = packing.pack_documents(docs, packing.Shape(2, 16, 4))
    self.assertEqual(stats.sampled_tokens, 6 + 11 + 2)
    np.testing.assert_array_equal(b.sampled, b.positions > 0)
    self.assertIsNone(b.routing)
    self.assertFalse(b.staleness.any())
    np.testing.assert_array_equal(
        b.tokens[b.segments > 0], b.positions[b.segments > 0]
    )

  def test_a_mask_keeps_only_its_targets(self):
    doc = np.arange(6, dtype=np.int32)
    keep = np.array([True, False, True, True, False, True])
    item = items_lib.Item(1, items_lib.document(doc, keep), 1.0)
    b, _ = packing.pack([item], packing.Shape(1, 8, 4), now=0)
    np.testing.assert_array_equal(np.flatnonzero(b.sampled[0]), [2, 3, 5])

  def test_refuses_a_document_longer_than_a_row(self):
    with self.assertRaisesRegex(ValueError, 'segment of 9 tokens'):
      packing.pack_documents(
          [np.arange(9, dtype=np.int32)], packing.Shape(1, 8, 4)
      )


if __name__ == '__main__':
  absltest.main()
