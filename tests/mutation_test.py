"""Faults are small, valid, different, and found at the right place."""

import ast
import collections
import pathlib
import sysconfig
import textwrap

from absl.testing import absltest
from absl.testing import parameterized

from composer_jax.environments import mutation

_LIBRARY = pathlib.Path(sysconfig.get_path('stdlib'))


def _all(source):
  return {(f.kind, f.apply(source)) for f in mutation.faults(source)}


class FaultsTest(parameterized.TestCase):

  @parameterized.parameters(
      ('comparison', 'x = a < b', 'x = a <= b'),
      ('comparison', 'x = (a) not in (b)', 'x = (a) in (b)'),
      ('comparison', 'x = a is not None', 'x = a is None'),
      ('comparison', 'x = a < b == c', 'x = a < b != c'),
      ('arithmetic', 'x = "é" + (a)*b', 'x = "é" - (a)*b'),
      ('arithmetic', 'x = a // b', 'x = a * b'),
      ('update', 'x += y', 'x -= y'),
      ('logic', 'x = a and b or c', 'x = a or b or c'),
      ('negation', 'x = not a', 'x = a'),
      ('negation', 'if a.b: pass', 'if not a.b: pass'),
      ('constant', 'x = 1', 'x = 2'),
      ('constant', 'x = True', 'x = False'),
      ('return', 'def f(): return a', 'def f(): return None'),
      ('name', 'x = a.lower()', 'x = a.upper()'),
      ('name', 'x = min(a)', 'x = max(a)'),
      ('arguments', 'f(a,  b)', 'f(b, a)'),
      ('slice', 'x = a[:k + 1]', 'x = a[k + 1:]'),
  )
  def test_kind(self, kind, source, want):
    self.assertIn((kind, want), _all(source))

  @parameterized.parameters('x = 1.5', '"""Doc."""', 'f(a, *b)', 'x = a[1:]\n')
  def test_leaves_alone(self, source):
    kinds = {kind for kind, _ in _all(source)} - {'constant'}
    self.assertEmpty(kinds)

  @parameterized.parameters('textwrap', 'shlex')
  def test_of_a_module(self, name):
    source = (_LIBRARY / f'{name}.py').read_text('utf-8')
    faults = mutation.faults(source)
    self.assertGreater(len(faults), 100)
    self.assertGreaterEqual(len(collections.Counter(f.kind for f in faults)), 8)
    self.assertLen(set(faults), len(faults))
    good = ast.dump(ast.parse(source))
    for fault in faults[:: len(faults) // 40]:
      changed = fault.apply(source)
      self.assertNotEqual(ast.dump(ast.parse(changed)), good, fault)
      # One place, and everything else as it was written.
      self.assertEqual(changed[: fault.start], source[: fault.start])
      self.assertLess(abs(len(changed) - len(source)), 80)


class RemovalsTest(absltest.TestCase):

  def test_signature_and_docstring_stay(self):
    source = textwrap.dedent('''
        class A:
          def f(self, x):
            """Doubles x."""
            y = x
            # why
            y += x
            return (
                y)

          def short(self): return 1

          def __init__(self):
            a = 1
            b = 2
            c = 3
            self.d = 4
    ''')
    (fault,) = mutation.removals(source)
    changed = fault.apply(source)
    scope = {}
    exec(changed, scope)
    self.assertEqual(scope['A'].f.__doc__, 'Doubles x.')
    with self.assertRaisesRegex(NotImplementedError, '^f$'):
      scope['A']().f(1)
    self.assertEqual(scope['A']().short(), 1)
    self.assertNotIn('y += x', changed)


if __name__ == '__main__':
  absltest.main()
