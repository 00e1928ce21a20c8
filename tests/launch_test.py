"""The seam: what runs where, and what no kernel's text may contain."""

import ast
import importlib.metadata
import re

from absl.testing import absltest
from absl.testing import parameterized
from kernels_triton import launch
from tests import layers

_HAS_TRITON = any(
    d.name == 'triton' for d in importlib.metadata.distributions()
)
_SOURCES = {p.stem: p.read_text() for p in layers.files('kernels_triton')}
_KERNELS = {n: t for n, t in _SOURCES.items() if n.endswith('_kernel')}


class ResolveTest(parameterized.TestCase):

  @parameterized.parameters(None, 'reference')
  def test_a_cpu_runs_the_reference(self, implementation):
    self.assertEqual(launch.resolve(implementation), 'reference')
    self.assertEqual(launch.facts(implementation), {'kernels': 'reference'})

  @parameterized.parameters(
      ('triton', 'no GPU', 'gpu'),
      ('interpret', 'TRITON_INTERPRET', 'kernels'),
  )
  def test_what_cannot_run_says_what_to_do(self, name, lacking, extra):
    cure = lacking if _HAS_TRITON else rf'pip install .*\[{extra}\]'
    with self.assertRaisesRegex(ValueError, f'{name}.*{cure}'):
      launch.resolve(name)

  def test_an_unknown_name_is_refused(self):
    with self.assertRaisesRegex(ValueError, "'cuda': must be"):
      launch.resolve('cuda')


class SourceTest(parameterized.TestCase):

  def test_kernels_are_found(self):
    self.assertGreaterEqual(len(_KERNELS), 3)
    for text in _KERNELS.values():
      self.assertIn('@triton.jit', text)
      self.assertRegex(text, r'(?m)^[A-Z_]*CONFIGS = \{')

  @parameterized.parameters(
      'autotune', 'atomic_', 'heuristics', 'allow_tf32', 'tl.rand'
  )
  def test_kernels_do_without(self, word):
    for name, text in _KERNELS.items():
      self.assertNotIn(word, text, name)

  def test_every_dot_names_its_precision(self):
    for name, text in _KERNELS.items():
      for call in _calls(text, 'tl.dot'):
        given = {k.arg for k in call.keywords}
        self.assertIn('input_precision', given, f'{name}:{call.lineno}')

  def test_one_call_and_it_names_fp_fusion(self):
    calls = {
        n: _calls(t, 'jax_triton.triton_call') for n, t in _SOURCES.items()
    }
    self.assertEqual({n for n, found in calls.items() if found}, {'launch'})
    (call,) = calls['launch']
    named = {k.arg: ast.unparse(k.value) for k in call.keywords}
    self.assertEqual(named['enable_fp_fusion'], '_FP_FUSION')
    self.assertRegex(_SOURCES['launch'], r'(?m)^_FP_FUSION = (True|False)$')

  def test_a_light_install_never_imports_triton(self):
    for name, text in _SOURCES.items():
      if name in _KERNELS or name == 'interpreter':
        continue
      for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
          line = ast.unparse(node)
          self.assertIsNone(
              re.search(r'\w+_kernel$|jax_triton|import triton', line),
              f'{name}: {line}',
          )


def _calls(text, function):
  return [
      node
      for node in ast.walk(ast.parse(text))
      if isinstance(node, ast.Call) and ast.unparse(node.func) == function
  ]


if __name__ == '__main__':
  absltest.main()
