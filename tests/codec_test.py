"""The codec is lossless for any bits, and its two implementations agree."""

import struct

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import ml_dtypes
import numpy as np

from composer_jax.weights import codec
from composer_jax.weights import kernels
from composer_jax.weights import layout
from composer_jax.weights import reference

_SPECIAL = np.array(
    # +-0, +-denormals, +-1, +-inf, quiet and signalling NaNs with payloads
    [0, 0x8000, 1, 0x8001, 0x7F, 0x3F80, 0xBF80, 0x7F80, 0xFF80]
    + [0x7FC0, 0xFFC0, 0x7F81, 0xFF81, 0x7FFF, 0xFFFF],
    np.uint16,
)
_words = st.one_of(st.sampled_from(_SPECIAL.tolist()), st.integers(0, 0xFFFF))
_small = hypothesis.settings(deadline=None, max_examples=60)


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


class CodecTest(parameterized.TestCase):

  @hypothesis.given(_pairs())
  @_small
  def test_round_trip_and_equal_bytes(self, pair):
    old, new = pair
    before = old.copy()
    fast = codec.encode(old, new)
    slow = codec.encode(old, new, impl=reference)
    self.assertEqual(fast, slow)
    self.assertEqual(fast.changed, int((old != new).sum()))
    self.assertLessEqual(len(fast.payload), new.nbytes)
    for impl in (kernels, reference):
      out = codec.apply(fast.codec, fast.payload, old, impl=impl)
      np.testing.assert_array_equal(out, new)
    np.testing.assert_array_equal(old, before)

  @hypothesis.given(_pairs())
  @_small
  def test_streams_round_trip(self, pair):
    # Also where `encode` would fall back to raw.
    old, new = pair
    for a, b in zip(
        kernels.split(old, new), reference.split(old, new), strict=True
    ):
      np.testing.assert_array_equal(a, b)
    for impl in (kernels, reference):
      out = impl.merge(old, kernels.split(old, new))
      np.testing.assert_array_equal(out, new)

  def test_every_special_pair(self):
    old = np.repeat(_SPECIAL, _SPECIAL.size)
    new = np.tile(_SPECIAL, _SPECIAL.size)
    for impl in (kernels, reference):
      out = impl.merge(old, impl.split(old, new))
      np.testing.assert_array_equal(out, new)

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

  @parameterized.parameters(254, 255, 256, 509, 510, 511, 70_000, 262_143)
  def test_long_gaps(self, at):
    old = np.full(262_144, 0x3F80, np.uint16)
    new = old.copy()
    new[[0, at, -1]] = (0x3F81, 0x3F90, 0xBF80)
    fast = codec.encode(old, new)
    self.assertEqual(fast.codec, codec.D2)
    self.assertEqual(fast, codec.encode(old, new, impl=reference))
    for impl in (kernels, reference):
      out = codec.apply(fast.codec, fast.payload, old, impl=impl)
      np.testing.assert_array_equal(out, new)

  def test_tiles_at_any_address(self):
    old = np.arange(4100, dtype=np.uint16)
    new = old + (np.arange(4100) % 9 == 0).astype(np.uint16)
    for first in range(5):
      a, b = old[first:], new[first:4100]
      np.testing.assert_array_equal(kernels.merge(a, kernels.split(a, b)), b)

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
    self.assertEqual(codec.encode(old, mild).codec, codec.D2)
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
    payload = bytearray(codec.encode(old, new).payload)
    for _ in range(data.draw(st.integers(1, 3))):
      at = data.draw(st.integers(0, len(payload) - 1))
      payload[at] ^= data.draw(st.integers(1, 255))
    payload = bytes(payload[: data.draw(st.integers(0, 2 * len(payload)))])
    for impl in (kernels, reference):
      try:
        out = codec.apply(codec.D2, payload, old, impl=impl)
        self.assertEqual(out.shape, old.shape)
      except ValueError:
        pass

  def test_frame_that_claims_a_huge_size(self):
    frame = b'\x28\xb5\x2f\xfd\xe0' + (1 << 50).to_bytes(8, 'little')
    frame += b'\x01\x00\x00'  # an empty last block
    head = struct.pack('<7I', 100, 100, 0, 0, len(frame), 13, 0)
    with self.assertRaisesRegex(ValueError, 'names its size'):
      codec.apply(codec.D2, head + frame + bytes(13), np.zeros(200, np.uint16))

  def test_bits_per_changed_value(self):
    """At about 1% changed: <= 11.5 bits, magnitudes and signs included."""
    rng = np.random.default_rng(0)
    n = 1 << 20
    masters = rng.normal(0, 0.02, n).astype(np.float32)
    step = (rng.choice([-1, 1], n) * rng.gamma(2, 1e-7, n)).astype(np.float32)
    old, new = (
        (m.astype(ml_dtypes.bfloat16).view(np.uint16))
        for m in (masters, masters + step)
    )
    size = changed = 0
    for i in range(0, n, layout.TILE_ELEMENTS):
      span = slice(i, i + layout.TILE_ELEMENTS)
      e = codec.encode(old[span], new[span])
      size, changed = size + len(e.payload), changed + e.changed
    self.assertBetween(changed / n, 0.006, 0.02)
    self.assertLess(8 * size / changed, 11.5)


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
