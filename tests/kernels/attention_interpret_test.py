"""Attention kernels under the interpreter: values, gradients, equal bits."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from kernels_triton import attention
from kernels_triton import contract
from tests import kernel_cases

_PAGE = contract.KEY_BLOCK


def _pack(shape, *segments):
  """(segments, positions) i32 from (row, start, length) each."""
  ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
  for number, (row, start, length) in enumerate(segments, 1):
    ids[row, start : start + length] = number
    positions[row, start : start + length] = np.arange(length)
  return ids, positions


def _plain(q, k, v, segments, positions):
  seen = segments[:, :, None] == segments[:, None]
  seen &= positions[:, None] <= positions[:, :, None]
  group = q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
  s = jnp.einsum('btnh,bsnh->bnts', q, k)
  p = jax.nn.softmax(jnp.where(seen[:, None], s, -1e30), axis=-1)
  return jnp.einsum('bnts,bsnh->btnh', p, v)


def _kernel(q, k, v, segments, positions):
  return attention.segment_attention(
      q, k, v, segments, positions, implementation='interpret'
  )


def _operands(dtype, shape, heads, kv_heads, width, tail=0):
  """A key has `tail` columns more than a value."""
  cases = kernel_cases.Cases(dtype)
  q = cases.normal(*shape, heads, width + tail) * width**-0.5
  k = cases.normal(*shape, kv_heads, width + tail)
  return cases, (q.astype(dtype), k, cases.normal(*shape, kv_heads, width))


def _cache(k, v, batch):
  """Pages in random places, all else NaN, for sequences that end at `batch`.

  Args:
    k: [T M H].
    v: [T M H].
    batch: tokens of each sequence.

  Returns:
    (k_pages, v_pages [P M PAGE H], table i32 [B S/PAGE]).
  """
  width = -(-max(batch) // _PAGE)
  count = 2 * len(batch) * width
  pages = [
      np.full((count, x.shape[1], _PAGE, x.shape[2]), np.nan, x.dtype)
      for x in (k, v)
  ]
  places = np.random.default_rng(0).permutation(count)
  table = places[: len(batch) * width].reshape(-1, width).astype(np.int32)
  for i, at in np.ndindex(*table.shape):
    span = slice(at * _PAGE, min((at + 1) * _PAGE, batch[i]))
    for to, x in zip(pages, (k, v), strict=True):
      part = np.asarray(x[span]).swapaxes(0, 1)
      to[table[i, at], :, : part.shape[1]] = part
  return *map(jnp.asarray, pages), table


class SegmentTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ('ragged', 'float32', 4, 2, 16, 0),
      ('ragged_bf16', 'bfloat16', 4, 2, 16, 0),
      ('odd_width', 'bfloat16', 3, 1, 24, 0),
      ('many_heads', 'float32', 16, 2, 16, 0),
      ('long_keys', 'float32', 8, 1, 24, 6),
      ('long_keys_bf16', 'bfloat16', 8, 1, 16, 16),
  )
  def test_values_and_gradients(self, dtype, heads, kv_heads, width, tail):
    shape = 2, 96
    cases, args = _operands(dtype, shape, heads, kv_heads, width, tail)
    where = _pack(shape, (0, 0, 40), (0, 64, 1), (1, 0, 96))
    real = (where[0] > 0)[:, :, None, None]
    g = kernel_cases.Cases('float32').normal(*shape, heads, width) * real
    got, vjp = jax.vjp(lambda *a: _kernel(*a, *where), *args)
    with jax.enable_x64(True):
      exact = [kernel_cases.exact(a) for a in args]
      want, exact_vjp = jax.vjp(lambda *a: _plain(*a, *where), *exact)
      gradients = exact_vjp(kernel_cases.exact(g))
    want, gradients = jax.device_get((want, gradients))
    cases.check(got * real, want * real)
    for a, b in zip(vjp(g), gradients, strict=True):
      self.assertEqual(a.dtype, jnp.dtype(dtype))
      cases.check(a, b)

  def test_gradient_is_the_slope(self):
    _, args = _operands('float32', (1, 32), 2, 1, 16)
    where = _pack((1, 32), (0, 0, 32))
    along = kernel_cases.Cases('float32').normal(*args[1].shape)
    loss = lambda k: jnp.sum(_kernel(args[0], k, args[2], *where) ** 2)
    step = 1e-2
    ends = [float(loss(args[1] + s * along)) for s in (-step, step)]
    slope = float(jnp.sum(jax.grad(loss)(args[1]) * along))
    np.testing.assert_allclose(slope, (ends[1] - ends[0]) / 2 / step, 1e-2)

  def test_bits_depend_on_the_segment_alone(self):
    _, args = _operands('float32', (2, 128), 4, 2, 16)
    here = _pack((2, 128), (0, 0, 32), (0, 32, 70))
    there = _pack((2, 128), (1, 0, 70), (1, 96, 9))
    moved = [x.at[1, :70].set(x[0, 32:102]) for x in args]
    a = _kernel(*args, *here)[0, 32:102]
    b = _kernel(*moved, *there)[1, :70]
    np.testing.assert_array_equal(kernel_cases.bits(a), kernel_cases.bits(b))


class PagedTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ('one_split', 'float32', 4, 2, 90, 0),
      ('two_splits', 'bfloat16', 8, 1, 580, 0),
      ('many_heads', 'float32', 8, 1, 90, 0),
      ('long_keys', 'bfloat16', 64, 1, 90, 8),
  )
  def test_row_has_the_bits_of_the_prefill(
      self, dtype, heads, kv_heads, tokens, tail
  ):
    length = -(-tokens // _PAGE) * _PAGE + _PAGE
    _, args = _operands(dtype, (1, length), heads, kv_heads, 16, tail)
    if tail:  # as in latent attention
      args = *args[:2], args[1][..., :16]
    q, k, v = (x[0, _PAGE:] for x in args)
    where = _pack((1, length), (0, _PAGE, tokens))
    want = np.asarray(_kernel(*args, *where))[0, _PAGE:]
    for batch in (
        [[tokens - 1]],
        [[0], [tokens // 2], [tokens - 1]],
        [[31, 32, -1], [tokens - 3, tokens - 2, tokens - 1]],
    ):
      positions = np.array(batch, np.int32)
      *pages, table = _cache(k, v, [max(row) + 1 for row in batch])
      if tail:
        pages[1] = pages[0]
      got = attention.paged_attention(
          q[positions],
          *pages,
          table,
          positions,
          width=16,
          implementation='interpret',
      )
      used = positions >= 0
      np.testing.assert_array_equal(
          kernel_cases.bits(got)[used],
          kernel_cases.bits(want)[positions[used]],
      )
      self.assertTrue(np.isfinite(got).all())


if __name__ == '__main__':
  absltest.main()
