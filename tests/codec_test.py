"""The codec is lossless for any bits, and its two implementations agree."""

import struct

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import ml_dtypes
import numpy as np
import zstandard

from composer_jax.weights import buckets
from composer_jax.weights import codec
from composer_jax.weights import layout
from composer_jax.weights import numba_kernels
from composer_jax.weights import range_coder
from composer_jax.weights import reference
from composer_jax.weights import rice_coder
from composer_jax.weights import ulp_steps
from tests import reference_buckets

_SPECIAL = np.array(
    # +-0, +-denormals, +-1, +-inf, quiet and signalling NaNs with payloads
    [0, 0x8000, 1, 0x8001, 0x7F, 0x3F80, 0xBF80, 0x7F80, 0xFF80]
    + [0x7FC0, 0xFFC0, 0x7F81, 0xFF81, 0x7FFF, 0xFFFF],
    np.uint16,
)
_words = st.one_of(st.sampled_from(_SPECIAL.tolist()), st.integers(0, 0xFFFF))
_small = hypothesis.settings(deadline=None, max_examples=60)
_DELTAS = (codec.D2, codec.E, codec.F)


def _drifted(n, update):
  """bf16 words before and after a small step of their f32 masters."""
  rng = np.random.default_rng(0)
  masters = rng.normal(0, 0.02, n).astype(np.float32)
  step = (rng.choice([-1, 1], n) * rng.gamma(2, update, n)).astype(np.float32)
  return tuple(
      m.astype(ml_dtypes.bfloat16).view(np.uint16)
      for m in (masters, masters + step)
  )


@st.composite
def _pairs(draw):
  """Two tiles of one size: few or many changes, of any size."""
  n = draw(st.integers(0, 700))
  old = draw(hnp.arrays(np.uint16, n, elements=_words))
  if n == 0 or draw(st.booleans()):
    return old, draw(hnp.arrays(np.uint16, n, elements=_words))
  where = draw(st.lists(st.integers(0, n - 1), max_size=20))
  new = old.copy()
  new[where] += np.uint16(draw(st.sampled_from([1, 0xFFFF, 2, 0x8000])))
  return old, new


def _split(old, new):
  return numba_kernels.split(*ulp_steps.between(old, new))


class CodecTest(parameterized.TestCase):

  @hypothesis.given(_pairs(), st.sampled_from(_DELTAS))
  @_small
  def test_round_trip(self, pair, delta):
    old, new = pair
    before = old.copy()
    e = codec.encode(old, new, codec=delta)
    self.assertEqual(e.changed, int((old != new).sum()))
    self.assertLessEqual(len(e.payload), new.nbytes)
    np.testing.assert_array_equal(codec.apply(e.codec, e.payload, old), new)
    np.testing.assert_array_equal(old, before)

  @hypothesis.given(_pairs())
  @_small
  def test_streams_and_their_reference(self, pair):
    # Also where `encode` would fall back to raw.
    old, new = pair
    for a, b in zip(_split(old, new), reference.split(old, new), strict=True):
      np.testing.assert_array_equal(a, b)
    for impl in (numba_kernels, reference):
      out = impl.merge(old, _split(old, new))
      np.testing.assert_array_equal(out, new)

  @hypothesis.given(_pairs())
  @_small
  def test_buckets_and_their_reference(self, pair):
    self._check_buckets(*pair)

  def _check_buckets(self, old, new):
    changes, found = buckets.between(old, new)
    for a, b in zip(found, ulp_steps.between(old, new), strict=True):
      np.testing.assert_array_equal(a, b)
    plain = reference_buckets.between(old, new)
    for a, b in zip(changes, plain, strict=True):
      np.testing.assert_array_equal(a, b)
    for impl in (buckets, reference_buckets):
      np.testing.assert_array_equal(impl.apply(old, changes), new)
    if not changes.gaps.size:
      return
    for packer, slow in (
        (rice_coder, reference_buckets.rice_pack),
        (range_coder, reference_buckets.range_pack),
    ):
      payload = packer.pack(changes)
      self.assertEqual(payload, slow(changes))
      for a, b in zip(packer.unpack(payload, old.size), changes, strict=True):
        np.testing.assert_array_equal(a, b)

  def test_every_special_pair(self):
    old = np.repeat(_SPECIAL, _SPECIAL.size)
    new = np.tile(_SPECIAL, _SPECIAL.size)
    for impl, split in ((numba_kernels, _split), (reference, reference.split)):
      out = impl.merge(old, split(old, new))
      np.testing.assert_array_equal(out, new)
    self._check_buckets(old, new)

  def test_every_word_and_step(self):
    """A step of any size from every word, in all 256 buckets."""
    old = np.arange(1 << 16).astype(np.uint16)
    for step in (1, 2, 3, 100, 32767, 32768, 32769, 65535):
      new = reference.from_key(reference.to_key(old) + np.uint16(step))
      for packer in (rice_coder, range_coder):
        changes, _ = buckets.between(old, new)
        again = packer.unpack(packer.pack(changes), old.size)
        np.testing.assert_array_equal(buckets.apply(old, again), new)

  def test_key_is_total_order(self):
    words = np.arange(1 << 16).astype(np.uint16)
    keys = reference.to_key(words)
    np.testing.assert_array_equal(reference.from_key(keys), words)
    values = words.view(ml_dtypes.bfloat16).astype(np.float32)
    finite = np.isfinite(values)
    by_key = values[finite][np.argsort(keys[finite], kind='stable')]
    self.assertTrue((np.diff(by_key) >= 0).all())
    # -0.0 and +0.0 are neighbors: one step apart, not equal.
    self.assertEqual(int(keys[0]) - int(keys[0x8000]), 1)

  @parameterized.product(
      at=(254, 255, 256, 509, 510, 511, 70_000, 262_143), delta=_DELTAS
  )
  def test_long_gaps(self, at, delta):
    old = np.full(262_144, 0x3F80, np.uint16)
    new = old.copy()
    new[[0, at, -1]] = (0x3F81, 0x3F90, 0xBF80)
    e = codec.encode(old, new, codec=delta)
    self.assertEqual((e.codec, e.changed), (delta, len({at, 0, 262_143})))
    np.testing.assert_array_equal(codec.apply(e.codec, e.payload, old), new)
    for a, b in zip(_split(old, new), reference.split(old, new), strict=True):
      np.testing.assert_array_equal(a, b)
    self._check_buckets(old, new)

  def test_gap_of_a_lonely_change_among_many(self):
    # The other gaps make the Rice parameter 0, so these are escapes.
    old = np.full(200_000, 0x3F80, np.uint16)
    new = old.copy()
    new[:5000] += 1
    new[[150_000, -1]] = 0xC000
    self._check_buckets(old, new)

  def test_tiles_at_any_address(self):
    old = np.arange(4100, dtype=np.uint16)
    new = old + (np.arange(4100) % 9 == 0).astype(np.uint16)
    for first in range(5):
      a, b = old[first:], new[first:4100]
      np.testing.assert_array_equal(numba_kernels.merge(a, _split(a, b)), b)
      changes, _ = buckets.between(a, b)
      np.testing.assert_array_equal(buckets.apply(a, changes), b)

  @parameterized.parameters('float32', 'int8', 'uint8', 'int64', 'bool')
  def test_other_types(self, dtype):
    rng = np.random.default_rng(0)
    old = {'x': rng.integers(0, 2, (37, 5)).astype(dtype)}
    new = {'x': old['x'].copy()}
    new['x'].view(np.uint8)[[3, 36], [0, -1]] ^= 1
    table = layout.Table.of(old, 1 << 18)
    a, b = table.read(old, 0), table.read(new, 0)
    e = codec.encode(a, b, itemsize=np.dtype(dtype).itemsize)
    self.assertEqual(e.changed, 2)
    self.assertEqual(e.codec, codec.XOR)
    out = table.empty()
    table.write(out, 0, codec.apply(e.codec, e.payload, a))
    self.assertEqual(out['x'].tobytes(), new['x'].tobytes())
    self.assertEqual(out['x'].dtype, new['x'].dtype)

  def test_raw_when_delta_does_not_pay(self):
    rng = np.random.default_rng(0)
    old, new = rng.integers(0, 1 << 16, (2, 5000)).astype(np.uint16)
    self.assertEqual(codec.encode(old, new).codec, codec.RAW)
    mild = old + (rng.random(5000) < 0.5).astype(np.uint16)
    self.assertEqual(codec.encode(old, mild).codec, codec.E)
    low = codec.encode(old, mild, raw_above=0.4)
    self.assertEqual(low.codec, codec.RAW)
    out = codec.apply(low.codec, low.payload, None, np.dtype(np.uint16))
    np.testing.assert_array_equal(out, mild)

  @hypothesis.given(st.data())
  @hypothesis.settings(deadline=None, max_examples=200)
  def test_damaged_payload_never_escapes(self, data):
    """Any flipped byte is an error or another result of the same size."""
    rng = np.random.default_rng(7)
    old = rng.integers(0, 1 << 16, 4000).astype(np.uint16)
    new = old.copy()
    new[rng.random(4000) < 0.05] += np.uint16(3)
    delta = data.draw(st.sampled_from(_DELTAS))
    payload = bytearray(codec.encode(old, new, codec=delta).payload)
    for _ in range(data.draw(st.integers(1, 3))):
      at = data.draw(st.integers(0, len(payload) - 1))
      payload[at] ^= data.draw(st.integers(1, 255))
    payload = bytes(payload[: data.draw(st.integers(0, 2 * len(payload)))])
    try:
      out = codec.apply(delta, payload, old)
      self.assertEqual(out.shape, old.shape)
    except ValueError:
      pass

  @parameterized.parameters(codec.E, codec.F)
  def test_payloads_of_noise(self, delta):
    """Any bytes at all end, inside the tile, as an error or as words."""
    rng = np.random.default_rng(3)
    old = rng.integers(0, 1 << 16, 500).astype(np.uint16)
    edges = [b'\0' * 9, b'\xff' * 99, b'\0\xff', b'\0\xff\x01']
    for payload in edges + [rng.bytes(k) for k in range(1, 300)]:
      try:
        self.assertEqual(codec.apply(delta, payload, old).shape, (500,))
      except ValueError as e:
        self.assertIn('damaged', str(e))

  def test_frame_that_claims_a_huge_size(self):
    frame = b'\x28\xb5\x2f\xfd\xe0' + (1 << 50).to_bytes(8, 'little')
    frame += b'\x01\x00\x00'  # an empty last block
    head = struct.pack('<7I', 100, 100, 0, 0, len(frame), 13, 0)
    with self.assertRaisesRegex(ValueError, 'names its size'):
      codec.apply(codec.D2, head + frame + bytes(13), np.zeros(200, np.uint16))

  def test_bits_per_changed_value(self):
    """At about 1% changed; bytes are deterministic, so these are exact."""
    old, new = _drifted(1 << 20, 1e-7)
    spans = [
        slice(i, i + layout.TILE_ELEMENTS)
        for i in range(0, old.size, layout.TILE_ELEMENTS)
    ]

    def size(delta):
      return sum(
          len(codec.encode(old[s], new[s], codec=delta)[1]) for s in spans
      )

    changed = int((old != new).sum())
    self.assertBetween(changed / old.size, 0.008, 0.012)
    limit = codec.bound(old, new)
    xor = zstandard.ZstdCompressor(level=1)
    generic = sum(len(xor.compress((old[s] ^ new[s]).tobytes())) for s in spans)
    d2, e, f = map(size, _DELTAS)
    self.assertLess(8 * d2 / changed, 11.5)
    self.assertLess(8 * e / changed, 8.5)
    self.assertLess(8 * f / changed, 7.4)
    self.assertGreater(limit / (8 * e), 0.82)
    self.assertGreater(limit / (8 * f), 0.92)
    self.assertGreater(old.nbytes / e, 150)
    self.assertGreater(generic / e, 2.5)
    self.assertGreater(generic / d2, 1.9)


class BoundTest(absltest.TestCase):

  def test_of_counted_odds(self):
    # Two buckets: in one 1 of 4 words changes, in the other none of 4.
    old = np.array([0x3F80] * 4 + [0x4000] * 4, np.uint16)
    new = old.copy()
    new[2] += 1
    self.assertAlmostEqual(codec.bound(old, new), 4 * 0.8112781244591328)
    new[1] -= 1  # half of the words; then the two steps take a bit each
    self.assertAlmostEqual(codec.bound(old, new), 4 + 2)

  def test_nothing_changed(self):
    old = np.arange(9, dtype=np.uint16)
    self.assertEqual(codec.bound(old, old), 0.0)


class StepsTest(absltest.TestCase):

  @hypothesis.given(
      hnp.arrays(np.uint16, st.tuples(st.integers(2, 5), st.integers(0, 99)))
  )
  @_small
  def test_sum_of_steps_is_the_step_over_all(self, versions):
    parts = [
        ulp_steps.between(old, new)
        for old, new in zip(versions, versions[1:], strict=False)
    ]
    total = ulp_steps.compose(parts, versions[0].size)
    direct = ulp_steps.between(versions[0], versions[-1])
    for a, b in zip(total, direct, strict=True):
      np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(
        ulp_steps.undo(versions[-1], total), versions[0]
    )


class LayoutTest(parameterized.TestCase):

  @hypothesis.given(
      hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9),
      st.integers(1, 600),
  )
  @_small
  def test_tiles_cover_every_element_once(self, shape, tile_elements):
    array = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    named = {'b': array, 'a': array.astype(np.float16)}
    table = layout.Table.of(named, tile_elements)
    seen = np.zeros(shape, int)
    for name, block in table.tiles:
      seen[block] += name == 'b'
      self.assertLessEqual(array[block].size, tile_elements)
    self.assertTrue((seen == 1).all())
    out = table.empty()
    for i in range(len(table.tiles)):
      table.write(out, i, table.read(named, i))
    for name, value in named.items():
      np.testing.assert_array_equal(out[name], value)
    self.assertEqual(layout.Table.from_json(table.to_json()), table)

  def test_shards_are_unions_of_tiles(self):
    grid = layout.grid((48, 128, 2048, 768), layout.TILE_ELEMENTS)
    self.assertEqual(grid, (48, 128, 4, 2))

  @hypothesis.given(
      st.lists(st.integers(1, 48), min_size=1, max_size=3), st.data()
  )
  @_small
  def test_edges_of_boxes_are_cuts(self, shape, data):
    axes = []
    for dim in shape:
      start = data.draw(st.integers(0, dim - 1))
      axes.append(slice(start, data.draw(st.integers(start + 1, dim))))
    named = {'x': np.zeros(shape, np.float32)}
    tiles = data.draw(st.integers(1, 3000))
    boxes = {'x': tuple(axes)}
    table = layout.Table.of(named, tiles, [boxes])
    grown = layout.View.covering(table, boxes).boxes
    self.assertEqual(grown, boxes)

  def test_root_depends_on_everything(self):
    a = np.zeros((4, 6), ml_dtypes.bfloat16)
    minus = a.copy()
    minus[2, 3] = -0.0
    roots = [
        codec.root(x)
        for x in (
            {'x': a},
            {'y': a},
            {'x': minus},
            {'x': a.reshape(6, 4)},
            {'x': a.view(np.uint16)},
            {'x': a, 'y': a},
        )
    ]
    self.assertLen(set(roots), len(roots))
    self.assertEqual(
        codec.root({'x': a, 'y': minus}), codec.root({'y': minus, 'x': a})
    )
    self.assertEqual(codec.root({'x': a.T}), codec.root({'x': a.T.copy()}))


if __name__ == '__main__':
  absltest.main()
