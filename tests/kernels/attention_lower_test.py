"""Attention kernels compiled for sm_90: tensor cores, no atomics, one loop."""

import collections
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp

from kernels_triton import attention
from kernels_triton import contract
from tests import lowered

_ARITHMETIC = re.compile(
    r'^\s*(?:@!?%\w+\s+)?((?:wgmma\.mma_async|mma|fma|add|sub|mul|max|div|ex2|shfl'
    r'|cvt)\.[\w.:]*(?:f32|bf16|b32))\s',
    re.MULTILINE,
)


def _loop(ptx: str) -> collections.Counter[str]:
  """Float instructions of the basic block with most products.

  Not their order, which the scheduler is free to change.
  """
  blocks = re.split(r'^\$L__BB\w+:', ptx, flags=re.MULTILINE)
  found = [collections.Counter(_ARITHMETIC.findall(b)) for b in blocks]
  products = 'wgmma.mma_async', 'mma.sync', 'fma.rn.f32'
  count = lambda ops: sum(ops[o] for o in ops if o.startswith(products))
  return max(found, key=count)


def _spec(dtype, *shape):
  return jax.ShapeDtypeStruct(shape, dtype)


def _prefill(dtype):
  """Operands as those of a 30B-parameter mixture of experts."""
  k = _spec(dtype, 2, 2048, 4, 128)
  ids = _spec(jnp.int32, 2, 2048)
  return _spec(dtype, 2, 2048, 32, 128), k, k, ids, ids


def _paged(dtype):
  pages = _spec(dtype, 256, 4, contract.KEY_BLOCK, 128)
  table, positions = _spec(jnp.int32, 64, 64), _spec(jnp.int32, 64)
  return _spec(dtype, 64, 32, 128), pages, pages, table, positions


def _latent_prefill():
  """Operands as those of a model of 1T parameters with latent attention."""
  q, k = (_spec(jnp.bfloat16, 1, 1024, heads, 576) for heads in (64, 1))
  ids = _spec(jnp.int32, 1, 1024)
  return q, k, _spec(jnp.bfloat16, 1, 1024, 1, 512), ids, ids


def _latent_attention(q, pages, table, positions):
  """Of chunks: four query tokens a tile."""
  return attention.paged_attention(
      q, pages, pages, table, positions, width=512, implementation='triton'
  )


def _segment_attention(*args):
  return attention.segment_attention(*args, implementation='triton')


def _decode_attention(*args):
  return attention.paged_decode_attention(*args, implementation='triton')


class AttentionTest(parameterized.TestCase):

  def test_gradients(self):
    loss = lambda *args: _segment_attention(*args).sum()
    found = lowered.kernels(jax.grad(loss, (0, 1, 2)), *_prefill(jnp.bfloat16))
    self.assertEqual(
        [lowered.name(ptx) for ptx in found],
        ['forward_kernel', 'backward_q_kernel', 'backward_kv_kernel'],
    )
    for ptx in found:
      self.assertEmpty(lowered.atomics(ptx))
      self.assertEqual(lowered.resources(ptx)['spilled'], 0)
      self.assertIn('wgmma.mma_async', ptx)

  def test_latent_attention(self):
    loss = lambda *args: _segment_attention(*args).sum()
    found = lowered.kernels(jax.grad(loss, (0, 1, 2)), *_latent_prefill())
    pages = _spec(jnp.bfloat16, 256, 1, contract.KEY_BLOCK, 576)
    found += lowered.kernels(
        _latent_attention,
        _spec(jnp.bfloat16, 64, 4, 64, 576),
        pages,
        _spec(jnp.int32, 64, 64),
        _spec(jnp.int32, 64, 4),
    )
    kernels = {lowered.name(ptx): ptx for ptx in found}
    self.assertLen(kernels, 5)
    for name, ptx in kernels.items():
      self.assertEmpty(lowered.atomics(ptx))
      # Sums of keys and of values of 16 tokens at once: all registers there are.
      most = 1024 if name == 'backward_kv_kernel' else 0
      self.assertLessEqual(lowered.resources(ptx)['spilled'], most, name)
    prefill, split = (
        _loop(kernels[name])
        for name in ('forward_kernel', 'paged_split_kernel')
    )
    self.assertEqual(prefill, split)
    self.assertTrue(any(op.startswith('mma.sync') for op in prefill))

  @parameterized.parameters((640, 576), (640, 512))
  def test_what_fits_no_tile_is_refused(self, columns, width):
    q, k, v = (
        _spec(jnp.bfloat16, 1, 64, 1, c) for c in (columns,) * 2 + (width,)
    )
    ids = _spec(jnp.int32, 1, 64)
    with self.assertRaisesRegex(
        ValueError, f'keys of {columns} and values of {width}.*reference'
    ):
      lowered.kernels(_segment_attention, q, k, v, ids, ids)

  @parameterized.parameters('float32', 'bfloat16')
  def test_prefill_and_decode_run_the_same_instructions(self, dtype):
    (prefill,) = lowered.kernels(_segment_attention, *_prefill(dtype))
    split, merge = lowered.kernels(_decode_attention, *_paged(dtype))
    loop = _loop(prefill)
    self.assertEqual(loop, _loop(split))
    product = 'fma.rn.f32' if dtype == 'float32' else 'wgmma.mma_async'
    self.assertTrue(any(op.startswith(product) for op in loop))
    self.assertTrue(any(op.startswith('ex2') for op in loop))
    for ptx in (prefill, split, merge):
      self.assertEmpty(lowered.atomics(ptx))
      self.assertEqual(lowered.resources(ptx)['spilled'], 0)


if __name__ == '__main__':
  absltest.main()
