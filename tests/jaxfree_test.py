"""What plays and judges episodes runs where there is no jax.

CONTRIBUTING.md names the same packages.
"""

import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
from tests import layers

_LAYERS = (
    'atomic',
    'trace',
    'task',
    'checks',
    'rope',
    'phases',
    'reinforcement',
    'config',
    'config_text',
    'sandbox',
    'agents',
    'chat',
    'environments',
    'rewards',
    'fleet',
    'dashboard',
)
_CHECK = """
import importlib, sys
for name in sys.argv[1:]:
  importlib.import_module(name)
print(*sorted({'jax', 'jaxlib', 'flax', 'torch', 'triton'} & set(sys.modules)))
"""


class JaxFreeTest(parameterized.TestCase):

  @parameterized.parameters(*_LAYERS)
  def test_fresh_interpreter_imports_no_jax(self, layer):
    names = [
        '.'.join(p.relative_to(layers.ROOT).with_suffix('').parts)
        for p in layers.files(layer)
    ]
    self.assertNotEmpty(names)
    out = subprocess.run(
        [sys.executable, '-c', _CHECK, *names],
        cwd=layers.ROOT,
        capture_output=True,
        text=True,
    )
    self.assertEqual(out.returncode, 0, out.stderr)
    self.assertEqual(out.stdout.split(), [])

  def test_contributors_are_told(self):
    guide = ' '.join((layers.ROOT / 'CONTRIBUTING.md').read_text().split())
    named = ', '.join(
        f'`{layer}/`'
        for layer in _LAYERS
        if layers.LAYERS[layer][0].endswith('/*.py')
    )
    self.assertIn(named.replace(', `dash', ' and `dash'), guide)

  def test_the_check_sees_jax(self):
    out = subprocess.run(
        [sys.executable, '-c', _CHECK, 'composer_jax.learner.batch'],
        cwd=layers.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    self.assertContainsSubset({'jax', 'flax'}, out.stdout.split())


if __name__ == '__main__':
  absltest.main()
