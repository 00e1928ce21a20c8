"""`import composer_jax as cj`: all that experiments need, and nothing heavy."""

import ast
import importlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
import composer_jax as cj
from tests import layers

_STUB = layers.ROOT / 'composer_jax/__init__.pyi'
_LOADED = """
import sys
import composer_jax as cj
for name in sys.argv[1:]:
  getattr(cj, name)
print(*(m for m in ('jax', 'matplotlib', 'torch', 'triton') if m in sys.modules))
"""


def _homes():
  """Name -> module of every name in the stub."""
  return {
      alias.name: f'composer_jax.{node.module}'
      for node in ast.parse(_STUB.read_text()).body
      for alias in node.names
  }


def _loaded(*names):
  """Which heavy packages a fresh interpreter has after using some names."""
  out = subprocess.run(
      [sys.executable, '-c', _LOADED, *names],
      cwd=layers.ROOT,
      capture_output=True,
      text=True,
  )
  assert out.returncode == 0, out.stderr
  return out.stdout.split()


class PublicFaceTest(parameterized.TestCase):

  def test_every_name_is_that_of_its_module(self):
    homes = _homes()
    self.assertCountEqual(cj.__all__, homes)
    self.assertGreater(len(homes), 50)
    for name, home in homes.items():
      module = importlib.import_module(home)
      self.assertIs(getattr(cj, name), getattr(module, name), name)

  def test_every_name_is_documented(self):
    for name in cj.__all__:
      thing = getattr(cj, name)
      if not isinstance(thing, (int, float)):  # Those have a comment.
        text = thing.__doc__ or ''
        # A dataclass without a docstring gets its own signature.
        self.assertFalse(not text or text.startswith(f'{name}('), name)

  def test_importing_it_loads_nothing_heavy(self):
    self.assertEmpty(_loaded())

  def test_what_runs_without_jax_does_so_from_here(self):
    names = [n for n, home in _homes().items() if '.learner.' not in home]
    self.assertGreater(len(names), 30)
    self.assertEmpty(_loaded(*names))

  def test_no_name_loads_torch_triton_or_matplotlib(self):
    self.assertEqual(_loaded(*_homes()), ['jax'])

  def test_a_name_that_is_not_there(self):
    with self.assertRaisesRegex(AttributeError, 'Rlconfig'):
      _ = cj.Rlconfig


if __name__ == '__main__':
  absltest.main()
