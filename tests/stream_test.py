"""Streams and mixtures: exact coverage, exact resume, exact shares."""

import dataclasses
import fractions
import json
import math

from absl.testing import absltest
import hypothesis
from hypothesis import strategies as st
import numpy as np

from composer_jax.data import mixture
from composer_jax.data import stream
from composer_jax.learner import items
from composer_jax.learner import packing

_START = 0
_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)
_weights = st.lists(
    st.one_of(st.integers(1, 9), st.floats(0.01, 10)), min_size=1, max_size=4
).map(lambda ws: {f's{i}': w for i, w in enumerate(ws)})


def _tokens(lengths: list[int], first: int = 1) -> stream.Tokens:
  """Documents whose targets are all different: 1, 2, 3, ..."""
  parts, count = [], first
  for n in lengths:
    parts.append(np.array([_START, *range(count, count + n)], np.int32))
    count += n
  starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
  return stream.Tokens(np.concatenate(parts), starts, count - first)


def _stream(lengths, tokens_per_row=8, key_block=2, seed=1, first=1):
  tokens = _tokens(lengths, first)
  return stream.Stream(tokens, tokens_per_row, key_block, seed)


def _targets(chunks) -> list[int]:
  return sorted(int(t) for c in chunks for t in c.tokens[c.sampled])


def _pack(documents, shape):
  packed = [items.Item(i, d, 1.0) for i, d in enumerate(documents, 1)]
  return packing.pack_all(packed, shape, now=0)


class StreamTest(absltest.TestCase):

  @hypothesis.settings(deadline=None, max_examples=60)
  @hypothesis.given(_lengths, st.integers(1, 6), st.sampled_from([1, 2, 4]))
  def test_an_epoch_trains_every_token_once(self, lengths, rows, key_block):
    shape = packing.Shape(rows, 8, key_block)
    source = _stream(lengths, key_block=key_block, seed=3)
    cursor, seen = stream.Cursor(), []
    while cursor.epoch < 2:
      chunks, cursor = source.next(cursor, rows)
      self.assertLen(_pack(chunks, shape)[0], 1)  # what fits, fits
      seen += chunks
    want = list(range(1, sum(lengths) + 1))
    n = len(source)
    self.assertEqual(_targets(seen[:n]), want)
    self.assertEqual(_targets(seen[n : 2 * n]), want)

  @hypothesis.settings(deadline=None, max_examples=30)
  @hypothesis.given(_lengths, st.integers(1, 4), st.integers(0, 6))
  def test_resume_is_exact(self, lengths, rows, at):
    before, cursor, want, saved = _stream(lengths), stream.Cursor(), [], []
    for _ in range(12):
      saved.append(json.dumps(dataclasses.asdict(cursor)))
      chunks, cursor = before.next(cursor, rows)
      want.append([c.tokens.tolist() for c in chunks])
    after, cursor = _stream(lengths), stream.Cursor(**json.loads(saved[at]))
    for expected in want[at:]:
      chunks, cursor = after.next(cursor, rows)
      self.assertEqual([c.tokens.tolist() for c in chunks], expected)

  def test_rows_are_well_filled_and_not_with_one_document(self):
    rng = np.random.default_rng(0)
    source = _stream(rng.integers(1, 4000, 50).tolist(), 256, 32)
    cursor, filled, documents = stream.Cursor(), 0, []
    for _ in range(10):
      chunks, cursor = source.next(cursor, 16)
      filled += sum(map(len, chunks))
      first = [c.tokens[1] for c in chunks]
      starts = source.tokens.starts - np.arange(len(source.tokens.starts))
      documents.append(len(set(np.searchsorted(starts, first).tolist())))
    self.assertGreater(filled / (10 * 16 * 256), 0.9)
    self.assertGreater(np.mean(documents), 8)

  def test_order_depends_on_seed_and_epoch_only(self):
    # Golden: raw Philox4x64 words with key (5, 1), numpy 2.4; stable by
    # numpy's compatibility policy for bit generators.
    def order(seed, epoch):
      source = _stream([1] * 8, 2, 1, seed)
      chunks, _ = source.next(stream.Cursor(epoch), 8)
      return [int(c.tokens[1]) - 1 for c in chunks]

    self.assertEqual(order(5, 1), [7, 4, 5, 1, 6, 0, 2, 3])
    self.assertNotEqual(order(5, 0), order(5, 1))
    self.assertNotEqual(order(6, 1), order(5, 1))

  def test_cursor_of_another_stream_is_refused(self):
    _, cursor = _stream([30, 7]).next(stream.Cursor(), 1)
    for other in (
        _stream([30, 7], seed=2),
        _stream([30, 7], tokens_per_row=16),
        _stream([30, 8]),
    ):
      with self.assertRaisesRegex(ValueError, 'Cursor.stream=.*start from'):
        other.next(cursor, 1)
    _stream([30, 7]).next(cursor, rows=2)

  def test_what_fits_in_order_but_not_longest_first_is_cut_short(self):
    # 2+2+8, 12, 6+3+3 fill three rows in this order; longest first it is
    # 12, 8+3, 6+3+2 and a 2 left over.
    tokens, shape = _tokens([1, 1, 7, 11, 5, 2, 2, 8]), packing.Shape(3, 12, 1)
    parts = list(stream.batches(tokens, shape))
    for chunks in parts:
      self.assertLen(_pack(chunks, shape)[0], 1)
    self.assertLen(parts[0], 6)
    self.assertEqual(sum(map(len, parts)), 8)

  def test_rows_without_a_target_are_refused(self):
    with self.assertRaisesRegex(ValueError, 'tokens_per_row=1: must be'):
      _stream([3], tokens_per_row=1)

  @hypothesis.settings(deadline=None, max_examples=30)
  @hypothesis.given(_lengths, st.integers(1, 6))
  def test_held_out_pass_covers_everything_once(self, lengths, rows):
    shape = packing.Shape(rows, 8, 2)
    parts = list(stream.batches(_tokens(lengths), shape))
    self.assertEqual(
        _targets([c for p in parts for c in p]),
        list(range(1, sum(lengths) + 1)),
    )
    for chunks in parts:
      self.assertLen(_pack(chunks, shape)[0], 1)

  @hypothesis.settings(deadline=None, max_examples=30)
  @hypothesis.given(_lengths, st.randoms(use_true_random=False))
  def test_a_mask_follows_its_tokens_through_every_cut(self, lengths, random):
    tokens = _tokens(lengths)
    mask = np.array([random.random() < 0.5 for _ in tokens.ids])
    tokens = dataclasses.replace(tokens, trained=mask)
    parts = list(stream.batches(tokens, packing.Shape(2, 8, 2)))
    want = tokens.ids[mask & (tokens.ids != _START)]
    self.assertEqual(_targets([c for p in parts for c in p]), want.tolist())

  def test_bits_per_byte_of_uniform_bytes_is_eight(self):
    self.assertAlmostEqual(
        stream.bits_per_byte(100 * math.log(256), 100), 8.0, places=12
    )


class MixtureTest(absltest.TestCase):

  @hypothesis.settings(deadline=None, max_examples=60)
  @hypothesis.given(_weights, st.lists(st.integers(1, 9), max_size=12))
  def test_no_source_is_a_row_ahead_and_none_starves(self, weights, steps):
    exact = {name: fractions.Fraction(w) for name, w in weights.items()}
    total, given, rows = sum(exact.values()), dict.fromkeys(weights, 0), 0
    for step in steps:
      dealt = mixture.deal(weights, given, step)
      self.assertEqual(sum(dealt.values()), step)
      given = {name: given[name] + dealt[name] for name in given}
      rows += step
      for name, w in exact.items():
        ahead = given[name] - rows * w / total
        self.assertLess(ahead, 1)
        self.assertGreater(ahead, -len(weights))
    # The cut into steps, and so the number of readers, does not matter.
    whole = mixture.deal(weights, dict.fromkeys(weights, 0), rows)
    self.assertEqual(given, whole)

  @hypothesis.settings(deadline=None, max_examples=30)
  @hypothesis.given(
      st.lists(_lengths, min_size=2, max_size=3),
      st.lists(st.integers(1, 5), min_size=3, max_size=3),
      st.integers(1, 5),
      st.integers(0, 9),
  )
  def test_resume_is_exact_and_epochs_are_whole(self, texts, shares, rows, at):
    def made():
      sources, first = {}, 1
      for i, lengths in enumerate(texts):
        sources[f's{i}'] = _stream(lengths, first=first)
        first += sum(lengths)
      weights = dict(zip(sources, shares, strict=False))
      return mixture.Mixture(sources, weights)

    before, cursors, want, saved = made(), {}, [], []
    shape = packing.Shape(rows, 8, 2)
    for _ in range(10):
      plain = {k: dataclasses.asdict(c) for k, c in cursors.items()}
      saved.append(json.dumps(plain))
      documents, cursors = before.next(cursors, rows)
      want.append([d.tokens.tolist() for d in documents])
      # Each document is a segment of its own: none attends to another.
      batches, stats = _pack(documents, shape)
      segments = sum(int(b.segments.max(axis=1).sum()) for b in batches)
      self.assertEqual(segments, len(documents))
      self.assertEqual(stats.tokens, sum(map(len, documents)))
    after = made()
    cursors = {k: stream.Cursor(**c) for k, c in json.loads(saved[at]).items()}
    for expected in want[at:]:
      documents, cursors = after.next(cursors, rows)
      self.assertEqual([d.tokens.tolist() for d in documents], expected)
    targets = [t for step in want for chunk in step for t in chunk[1:]]
    first = 1
    for i, lengths in enumerate(texts):
      last, size = first + sum(lengths), len(before.sources[f's{i}'])
      epochs, chunk = cursors[f's{i}'].epoch, cursors[f's{i}'].chunk
      for target in range(first, last):
        count = targets.count(target)
        self.assertBetween(count, epochs, epochs + bool(chunk), f'{size}')
      first = last

  def test_shares_are_of_rows(self):
    long, short = _stream([100] * 9), _stream([3] * 99)
    mixed = mixture.Mixture({'a': long, 'b': short}, {'a': 3, 'b': 1})
    cursors = {}
    for _ in range(5):
      _, cursors = mixed.next(cursors, 8)
    self.assertEqual((cursors['a'].rows, cursors['b'].rows), (30, 10))


if __name__ == '__main__':
  absltest.main()
