"""A plain install is light: no torch, no CUDA, no triton."""

import importlib.metadata

from absl.testing import absltest
from tests import layers

_HEAVY = ('torch', 'triton', 'cuda', 'nvidia', 'rocm', 'transformers')


class SetupTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.meta = importlib.metadata.metadata('composer_jax')
    lines = importlib.metadata.requires('composer_jax')
    self.core = [r for r in lines if 'extra ==' not in r]
    self.extras = set(lines) - set(self.core)

  def test_core_has_nothing_heavy(self):
    self.assertGreater(len(self.core), 10)
    heavy = [r for r in self.core for word in _HEAVY if word in r.lower()]
    self.assertEmpty(heavy)

  def test_extras(self):
    names = self.meta.get_all('Provides-Extra')
    self.assertCountEqual(
        names,
        [
            *('data', 'fleet', 'gpu', 'humaneval', 'kernels', 'openenv'),
            *('peers', 'serve', 'test'),
        ],
    )
    peers = {r for r in self.extras if 'peers' in r}
    self.assertTrue(any('torch==2.13.0' in r for r in peers), peers)

  def test_what_it_is(self):
    self.assertEqual(self.meta['Requires-Python'], '>=3.11')
    self.assertEqual(self.meta['Name'], 'composer_jax')
    self.assertStartsWith(
        (layers.ROOT / 'LICENSE').read_text().strip(), 'Apache License'
    )

  def test_core_is_used(self):
    used = set().union(*(layers.split(p)[1] for p in layers.modules()))
    for requirement in self.core:
      name = requirement.split('>')[0].split('<')[0].lower().replace('-', '_')
      module = {'absl_py': 'absl', 'orbax_checkpoint': 'orbax'}.get(name, name)
      with self.subTest(name):
        self.assertIn(module, {u.lower() for u in used})


if __name__ == '__main__':
  absltest.main()
