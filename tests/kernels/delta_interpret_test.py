"""Delta kernels under the interpreter, against the reference, bit for bit."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from kernels_triton import delta
from tests import delta_cases


class DeltaTest(parameterized.TestCase):

  @parameterized.parameters(
      (1, 0), (1, 1), (delta.TILE, 9), (3 * delta.TILE + 5, 7000)
  )
  def test_same_as_the_reference(self, n, changed):
    old, new = map(jnp.asarray, delta_cases.words(n, changed))
    found = []
    for name in ('reference', 'interpret'):
      counts = delta.count(old, new, implementation=name)
      room = int(counts.sum()) + 3
      steps = delta.compact(old, new, counts, room=room, implementation=name)
      after = delta.apply(old, steps, implementation=name)
      np.testing.assert_array_equal(after, new)
      found.append((counts, *steps))
    for a, b in zip(*jax.device_get(found), strict=True):
      self.assertEqual(a.dtype, b.dtype)
      np.testing.assert_array_equal(a, b)


if __name__ == '__main__':
  absltest.main()
