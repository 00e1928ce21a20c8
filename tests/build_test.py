"""BUILD says what is on disk: every file, with the imports it really has."""

from __future__ import annotations

import ast
import dataclasses

from absl.testing import absltest
from tests import layers

# Import name -> name on PyPI, in the form of a label, where they differ.
_PYPI = {
    'absl': 'absl_py',
    'openenv': 'openenv_core',
    'orbax': 'orbax_checkpoint',
    'yaml': 'pyyaml',
}


@dataclasses.dataclass(frozen=True)
class Target:
  """One rule of BUILD, as far as it follows from the files."""

  rule: str
  name: str
  srcs: frozenset[str]
  deps: frozenset[str]
  main: str | None = None

  def __str__(self) -> str:
    lines = [f'{self.rule}(', f'    name = "{self.name}",']
    for field in ('srcs', 'deps'):
      items = sorted(getattr(self, field), key=lambda s: (s[0] != ':', s))
      if len(items) == 1:
        lines.append(f'    {field} = ["{items[0]}"],')
      elif items:
        lines += [f'    {field} = [', *(f'        "{i}",' for i in items)]
        lines.append('    ],')
    if self.main:
      lines.insert(3, f'    main = "{self.main}",')
    return '\n'.join([*lines, ')'])


def _labels(inside, outside):
  names = {_PYPI.get(p, p.lower()) for p in outside}
  return frozenset({f':{n}' for n in inside} | {f'@pypi//{n}' for n in names})


def _path(file) -> str:
  return str(file.relative_to(layers.ROOT))


def _program(rule: str, file) -> Target:
  inside, outside = layers.split(file)
  if rule == 'py_test':
    inside |= {'test_support'}
  elif layers.layer_of(file) == 'experiments':
    inside |= {'experiments'}
  path = _path(file)
  return Target(
      rule, file.stem, frozenset({path}), _labels(inside, outside), path
  )


def expected() -> list[Target]:
  """Returns the targets that the files on disk call for."""
  out = []
  for name, (_, inside, _) in layers.LAYERS.items():
    own = [f for f in layers.files(name) if not layers.is_binary(f)]
    outside = set().union(*(layers.split(f)[1] for f in own))
    deps = _labels(inside.split(), outside)
    srcs = frozenset(map(_path, own))
    out.append(Target('py_library', name, srcs, deps))
  binaries = filter(layers.is_binary, layers.files('experiments'))
  out += [_program('py_binary', f) for f in binaries]
  tests = layers.ROOT / 'tests'
  support = [f for f in tests.glob('*.py') if not f.stem.endswith('_test')]
  found = [layers.split(f) for f in support]
  inside = set().union(*(i for i, _ in found))
  outside = set().union(*(o for _, o in found))
  srcs = frozenset(map(_path, support))
  deps = _labels(inside, outside)
  out.append(Target('py_library', 'test_support', srcs, deps))
  out += [_program('py_test', f) for f in sorted(tests.rglob('*_test.py'))]
  return out


def _strings(node) -> frozenset[str]:
  """Evaluates a list of strings, a glob, or a sum of them."""
  if isinstance(node, ast.BinOp):
    return _strings(node.left) | _strings(node.right)
  if isinstance(node, ast.Call):
    patterns = ast.literal_eval(node.args[0])
    return frozenset(_path(f) for p in patterns for f in layers.ROOT.glob(p))
  return frozenset(ast.literal_eval(node))


def parse(text: str) -> list[Target]:
  """Reads the python rules of a BUILD file; Starlark is python enough."""
  out = []
  for statement in ast.parse(text).body:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not call.func.id.startswith('py_'):
      continue
    fields = {k.arg: k.value for k in call.keywords}
    empty = ast.List(elts=[])
    main = fields.get('main')
    out.append(
        Target(
            call.func.id,
            ast.literal_eval(fields['name']),
            _strings(fields.get('srcs', empty)),
            _strings(fields.get('deps', empty)),
            ast.literal_eval(main) if main else None,
        )
    )
  return out


class BuildTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.have = parse((layers.ROOT / 'BUILD').read_text())
    self.want = expected()

  def test_every_file_has_its_target(self):
    have = {t.name: t for t in self.have}
    for target in self.want:
      with self.subTest(target.name):
        message = f'BUILD: {target.name} should read\n{target}\n'
        self.assertEqual(have.get(target.name), target, message)

  def test_no_target_without_files(self):
    names = [t.name for t in self.have]
    self.assertLen(set(names), len(names), 'two targets share a name')
    self.assertEmpty(set(names) - {t.name for t in self.want})

  def test_rules_are_loaded(self):
    tree = ast.parse((layers.ROOT / 'BUILD').read_text())
    loads = [
        [a.value for a in s.value.args]
        for s in tree.body
        if isinstance(s, ast.Expr)
        and isinstance(s.value, ast.Call)
        and s.value.func.id == 'load'
    ]
    rules = {t.rule for t in self.have}
    self.assertEqual(
        loads, [['@rules_python//python:defs.bzl', *sorted(rules)]]
    )

  def test_every_package_is_declared_in_setup(self):
    names = {d for t in self.want for d in t.deps if d.startswith('@pypi//')}
    setup = (layers.ROOT / 'setup.py').read_text().lower().replace('-', '_')
    missing = {n for n in names if n.removeprefix('@pypi//') not in setup}
    self.assertEmpty(missing, 'add to setup.py')


if __name__ == '__main__':
  absltest.main()
