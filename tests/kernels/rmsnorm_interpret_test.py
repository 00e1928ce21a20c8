"""RMSNorm kernels under the interpreter, against float64."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from kernels_triton import rmsnorm
from tests import kernel_cases

_EPS = 1e-6


def _exact(x, scale):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + _EPS) * scale


def _exact_vjp(x, scale, g):
  inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + _EPS)
  unit = x * inverse
  gs = g * scale
  dx = (gs - unit * (gs * unit).mean(-1, keepdims=True)) * inverse
  return dx, (g * unit).sum(0)


def _norm(x, scale):
  return rmsnorm.rms_norm(x, scale, _EPS, implementation='interpret')


class RmsNormTest(parameterized.TestCase):

  @parameterized.product(
      shape=((1, 16), (37, 48), (65, 100)), dtype=('float32', 'bfloat16')
  )
  def test_values_and_gradients(self, shape, dtype):
    cases = kernel_cases.Cases(dtype)
    x, g = cases.normal(*shape), kernel_cases.Cases('float32').normal(*shape)
    scale = cases.normal(shape[1])
    y, vjp = jax.vjp(_norm, x, scale)
    exact = [kernel_cases.exact(a) for a in (x, scale, g)]
    cases.check(y, _exact(*exact[:2]))
    for got, want in zip(vjp(g), _exact_vjp(*exact), strict=True):
      self.assertEqual(got.dtype, jnp.dtype(dtype))
      cases.check(got, want)


if __name__ == '__main__':
  absltest.main()
