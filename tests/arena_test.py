"""Memory is used again, and never while somebody can still see it."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from composer_jax.weights import arena


def _fresh(**shapes):
  return {k: np.empty(s, ml_dtypes.bfloat16) for k, s in shapes.items()}


def _address(a):
  return a.__array_interface__['data'][0]


class SpareTest(absltest.TestCase):

  def test_comes_back_with_the_last_view(self):
    pool = arena.Spare()
    first = pool.lend(_fresh(a=(64, 32), b=()))
    where = {k: _address(a) for k, a in first.items()}
    first['a'][...] = 3
    seen = first['a'][2:5].view(np.uint16)[1]
    del first
    second = pool.lend(_fresh(a=(64, 32), b=()))
    self.assertEqual(_address(second['b']), where['b'])
    self.assertNotEqual(_address(second['a']), where['a'])
    second['a'][...] = 7
    self.assertTrue((seen == np.uint16(0x4040)).all())
    del seen
    third = pool.lend(_fresh(a=(32, 64)))
    self.assertEqual(_address(third['a']), where['a'])
    self.assertEqual(third['a'].shape, (32, 64))

  def test_device_arrays_keep_what_they_share(self):
    pool = arena.Spare()
    lent = pool.lend({'a': np.empty((64, 64), np.float32)})
    lent['a'][...] = 5
    on_device = jnp.asarray(lent['a'])
    del lent
    again = pool.lend({'a': np.empty((64, 64), np.float32)})
    again['a'][...] = 6
    self.assertTrue(bool(jax.numpy.all(on_device == 5)))

  def test_other_sizes_and_nothing_at_all(self):
    pool = arena.Spare()
    pool.lend(_fresh(a=(4,)))
    self.assertEqual(pool.lend(_fresh(a=(8,)))['a'].shape, (8,))
    self.assertEqual(pool.lend(_fresh(a=(0, 3)))['a'].shape, (0, 3))


if __name__ == '__main__':
  absltest.main()
