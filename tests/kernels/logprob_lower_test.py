"""Log-prob kernels compiled for sm_90."""

from absl.testing import absltest
import jax
import jax.numpy as jnp

from kernels_triton import logprob
from tests import lowered

_HIDDEN = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16)
_SCALE = jax.ShapeDtypeStruct((2048,), jnp.float32)
_UNEMBED = jax.ShapeDtypeStruct((2048, 10_000), jnp.bfloat16)
_TARGETS = jax.ShapeDtypeStruct((4096,), jnp.int32)


class LogprobTest(absltest.TestCase):

  def _check(self, found):
    for ptx in found:
      self.assertEmpty(lowered.atomics(ptx))
      self.assertEqual(lowered.resources(ptx)['spilled'], 0)
      if lowered.name(ptx) in ('tiles_kernel', 'errors_kernel'):
        self.assertIn('wgmma.mma_async', ptx)
        self.assertIn('cp.async', ptx)  # loads run ahead of the products

  def test_training(self):
    def f(scale, unembed, hidden, targets):
      logps, _ = logprob.target_log_probs(
          (scale, unembed), hidden, targets, eps=1e-6, implementation='triton'
      )
      return logps.sum()

    gradient = jax.grad(f, (0, 1, 2))
    found = lowered.kernels(gradient, _SCALE, _UNEMBED, _HIDDEN, _TARGETS)
    names = {lowered.name(ptx) for ptx in found}
    self.assertContainsSubset(
        {'tiles_kernel', 'merge_kernel', 'errors_kernel'}, names
    )
    self._check(found)

  def test_decode(self):
    def f(scale, unembed, hidden):
      return logprob.log_probs(
          (scale, unembed), hidden, eps=1e-6, implementation='triton'
      )

    found = lowered.kernels(f, _SCALE, _UNEMBED, _HIDDEN)
    self.assertIn('tiles_kernel', [lowered.name(ptx) for ptx in found])
    self._check(found)


if __name__ == '__main__':
  absltest.main()
