"""RMSNorm kernels compiled for sm_90."""

from absl.testing import absltest
import jax
import jax.numpy as jnp

from kernels_triton import rmsnorm
from tests import lowered


class RmsNormTest(absltest.TestCase):

  def test_forward_and_backward(self):
    def f(x, scale):
      return rmsnorm.rms_norm(x, scale, 1e-6, implementation='triton').sum()

    x = jax.ShapeDtypeStruct((100, 2048), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((2048,), jnp.float32)
    found = lowered.kernels(jax.grad(f, (0, 1)), x, scale)
    names = ['forward_kernel', 'backward_kernel', 'sum_kernel']
    self.assertEqual([lowered.name(ptx) for ptx in found], names)
    for ptx in found:
      self.assertEmpty(lowered.atomics(ptx))
      self.assertEqual(lowered.resources(ptx)['spilled'], 0)


if __name__ == '__main__':
  absltest.main()
