"""Delta kernels compiled for sm_90."""

from absl.testing import absltest
import jax
import jax.numpy as jnp

from kernels_triton import delta
from tests import lowered


class DeltaTest(absltest.TestCase):

  def test_count_compact_and_apply(self):
    def f(old, new):
      counts = delta.count(old, new, implementation='triton')
      steps = delta.compact(
          old, new, counts, room=4096, implementation='triton'
      )
      return delta.apply(old, steps, implementation='triton')

    words = jax.ShapeDtypeStruct((100_000,), jnp.uint16)
    found = lowered.kernels(f, words, words)
    names = ['count_kernel', 'compact_kernel', 'apply_kernel']
    self.assertEqual([lowered.name(ptx) for ptx in found], names)
    for ptx in found:
      self.assertEmpty(lowered.atomics(ptx))
      self.assertEqual(lowered.resources(ptx)['spilled'], 0)
      self.assertIn('setp.ne.b', ptx.replace('setp.ne.s', 'setp.ne.b'))
      self.assertNotRegex(ptx, r'\bsetp\.\w+\.(ftz\.)?f')


if __name__ == '__main__':
  absltest.main()
