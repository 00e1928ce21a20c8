"""The layers import only what the table allows; effects stay at the edge."""

import ast

from absl.testing import absltest
from absl.testing import parameterized
from tests import layers

_MAX_LINES = 400

# Names that read the command line, the environment or the wall clock.
_EFFECTS = (
    'absl.app',
    'absl.flags',
    'datetime.date.today',
    'datetime.datetime.now',
    'datetime.datetime.today',
    'datetime.datetime.utcnow',
    'os.environ',
    'os.getenv',
    'sys.argv',
    'time.localtime',
    'time.time',
    'time.time_ns',
)

# (module, effect) -> why it may be there.
_ALLOWED: dict[tuple[str, str], str] = {
    ('composer_jax/rewards/judge.py', 'os.environ'): (
        'a key in a config would be written down with it'
    ),
}


def _names(tree):
  """Yields dotted names that a module uses, resolved through its imports."""
  known = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for a in node.names:
        known[a.asname or a.name] = a.name if a.asname else a.name
    elif isinstance(node, ast.ImportFrom):
      for a in node.names:
        known[a.asname or a.name] = f'{node.module}.{a.name}'
        yield f'{node.module}.{a.name}'
  for node in ast.walk(tree):
    parts = []
    while isinstance(node, ast.Attribute):
      parts.append(node.attr)
      node = node.value
    if isinstance(node, ast.Name) and node.id in known:
      yield '.'.join([known[node.id], *reversed(parts)])


def _effects(tree):
  used = set(_names(tree))
  return {
      effect
      for effect in _EFFECTS
      for name in used
      if name == effect or name.startswith(effect + '.')
  }


class LayeringTest(parameterized.TestCase):

  @parameterized.parameters(*layers.LAYERS)
  def test_layer_imports_what_the_table_allows(self, layer):
    _, inside, outside = layers.LAYERS[layer]
    for path in layers.files(layer):
      used_layers, packages = layers.split(path)
      with self.subTest(str(path.relative_to(layers.ROOT))):
        self.assertLessEqual(used_layers, set(inside.split()))
        self.assertLessEqual(packages, set(outside.split()))

  def test_table_has_no_cycle_and_every_module(self):
    below = {name: set(row[1].split()) for name, row in layers.LAYERS.items()}
    while below:
      free = {name for name, deps in below.items() if not deps & set(below)}
      self.assertNotEmpty(free, f'cycle among {sorted(below)}')
      below = {n: deps for n, deps in below.items() if n not in free}
    listed = {p for layer in layers.LAYERS for p in layers.files(layer)}
    missing = set(layers.modules()) - listed
    empty = {p for p in missing if p.read_text() == ''}
    self.assertEmpty(missing - empty, 'add these to tests/layers.py')

  def test_only_experiments_reads_flags_environment_and_clock(self):
    found = set()
    for path in layers.modules():
      if path.is_relative_to(layers.ROOT / 'experiments'):
        continue
      module = str(path.relative_to(layers.ROOT))
      tree = ast.parse(path.read_text())
      found |= {(module, effect) for effect in _effects(tree)}
    self.assertEmpty(found - set(_ALLOWED), 'pass the value as an argument')
    self.assertEmpty(set(_ALLOWED) - found, 'no longer needed: remove it')

  @parameterized.parameters(
      ('import os\nos.environ["A"]', {'os.environ'}),
      ('from os import environ', {'os.environ'}),
      ('import time\ntime.time()', {'time.time'}),
      ('import time as t\nt.time()', {'time.time'}),
      ('import datetime\ndatetime.datetime.now()', {'datetime.datetime.now'}),
      ('from absl import flags', {'absl.flags'}),
      ('import time\ntime.perf_counter(); time.monotonic()', set()),
      ('def f(time): return time.time', set()),
  )
  def test_effects_are_found(self, text, want):
    self.assertEqual(_effects(ast.parse(text)), want)

  def test_the_public_face_is_of_the_layers_that_it_may_import(self):
    stub = ast.parse((layers.ROOT / 'composer_jax/__init__.pyi').read_text())
    homes = {node.module.replace('.', '/') for node in stub.body}
    root = layers.ROOT / 'composer_jax'
    self.assertEqual(
        {layers.layer_of(root / f'{home}.py') for home in homes},
        set(layers.LAYERS['composer_jax'][1].split()),
    )

  def test_modules_are_short(self):
    lengths = {
        str(p.relative_to(layers.ROOT)): len(p.read_text().splitlines())
        for p in layers.modules()
    }
    long = {p: n for p, n in lengths.items() if n > _MAX_LINES}
    self.assertEmpty(long, f'split what is over {_MAX_LINES} lines')


if __name__ == '__main__':
  absltest.main()
