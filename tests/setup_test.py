"""A plain install is light: no torch, no CUDA, no triton."""

import importlib.metadata
import re

from absl.testing import absltest
from tests import layers

# Import names of packages that are called something else.
_MODULES = {'absl-py': 'absl', 'orbax-checkpoint': 'orbax', 'pyyaml': 'yaml'}
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
    self.assertContainsSubset(self._core_modules(), {u.lower() for u in used})

  def test_extras_are_used(self):
    used = set().union(*(layers.split(p)[1] for p in layers.modules()))
    for requirement in self.extras:
      name, extra = re.fullmatch(r'([\w-]+).*"(\w+)"', requirement).groups()
      if extra in ('data', 'kernels', 'serve'):  # Peers are for tests.
        self.assertIn(name.replace('-', '_'), used, requirement)

  def test_core_is_all_that_the_first_run_imports(self):
    todo, seen = [layers.ROOT / 'experiments/quickstart.py'], set()
    while todo:
      path = todo.pop()
      if path.exists() and path not in seen:
        seen.add(path)
        names = layers.imports(path)
        todo += [layers.ROOT / (n.replace('.', '/') + '.py') for n in names]
    used = set().union(*(layers.split(path)[1] for path in seen))
    self.assertGreater(len(used), 10)
    kernels = {'jax_triton', 'triton'}  # of a GPU only
    core = self._core_modules()
    self.assertContainsSubset({u.lower() for u in used - kernels}, core)

  def _core_modules(self):
    """Import names, in lower case, of what a plain install has."""
    names = [re.split('[<>=]', r)[0].lower() for r in self.core]
    return {_MODULES.get(n, n.replace('-', '_')) for n in names}


if __name__ == '__main__':
  absltest.main()
