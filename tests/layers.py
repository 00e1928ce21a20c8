"""Who may import whom: one table, which the code and BUILD must both match."""

from __future__ import annotations

import ast
import functools
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]

_TOPS = ('composer_jax', 'kernels_triton', 'experiments')
_HELPERS = 'tests'  # package of the tests' own helpers, `from tests import x`

# Layer -> (its files, layers it may import, packages it may import). A layer
# is also a py_library of BUILD, with these deps.
_HOST = 'numpy'
_JAX = 'jax numpy optax flax'
LAYERS: dict[str, tuple[str, str, str]] = {
    'atomic': ('composer_jax/atomic.py', '', ''),
    'trace': ('composer_jax/trace.py', '', _HOST),
    'task': ('composer_jax/task.py', '', ''),
    'checks': ('composer_jax/checks.py', '', ''),
    'rope': ('composer_jax/rope.py', 'checks', ''),
    'phases': ('composer_jax/phases.py', 'checks', ''),
    'reinforcement': ('composer_jax/reinforcement.py', 'checks', ''),
    'config': (
        'composer_jax/config.py',
        'checks phases reinforcement rope',
        '',
    ),
    'config_text': ('composer_jax/config_text.py', '', ''),
    'typing': ('composer_jax/typing.py', '', 'beartype jaxtyping'),
    'kernels_triton': (
        'kernels_triton/*.py',
        '',
        'jax numpy triton jax_triton',
    ),
    'model': (
        'composer_jax/model/*.py',
        'atomic config kernels_triton rope trace typing',
        f'{_JAX} jaxtyping safetensors ml_dtypes',
    ),
    'learner': (
        'composer_jax/learner/*.py',
        'checks config model trace',
        _JAX,
    ),
    'rollout': (
        'composer_jax/rollout/*.py',
        'config kernels_triton model trace typing',
        'jax jaxtyping numpy',
    ),
    'weights': (
        'composer_jax/weights/*.py',
        'config trace',
        'ml_dtypes numba numpy orbax tensorstore xxhash zstandard',
    ),
    'sandbox': ('composer_jax/sandbox/*.py', 'task', ''),
    'agents': (
        'composer_jax/agents/*.py',
        'config sandbox task trace',
        f'{_HOST} websockets',
    ),
    'chat': (
        'composer_jax/chat/*.py',
        'agents task',
        'jinja2 tokenizers',
    ),
    'environments': (
        'composer_jax/environments/*.py',
        'agents atomic checks sandbox task',
        '',
    ),
    'rewards': (
        'composer_jax/rewards/*.py',
        'agents checks task trace',
        f'{_HOST} httpx yaml',
    ),
    'fleet': (
        'composer_jax/fleet/*.py',
        'atomic config trace',
        f'{_HOST} nats tensorstore zstandard',
    ),
    'dashboard': ('composer_jax/dashboard/*.py', 'atomic', 'jinja2 matplotlib'),
    'data': (
        'composer_jax/data/*.py',
        'atomic chat config kernels_triton learner task trace',
        f'{_HOST} pyarrow tokenizers',
    ),
    'runs': (
        'composer_jax/runs/*.py',
        'agents atomic chat config config_text dashboard data environments'
        ' fleet kernels_triton learner model rewards rollout rope sandbox task'
        ' trace weights',
        'jax numpy optax rich tensorboardX tokenizers',
    ),
    'serving': (
        'composer_jax/serving/*.py',
        'agents chat config rollout runs trace',
        'h11 jax llguidance numpy prometheus_client starlette uvicorn',
    ),
    'inspect': (
        'composer_jax/inspect/*.py',
        'chat config dashboard kernels_triton learner model runs trace weights',
        'jax ml_dtypes numpy rich tokenizers',
    ),
    # What users import, of whose parts __init__.pyi is the list.
    'composer_jax': (
        'composer_jax/__init__.py',
        'agents config config_text environments learner phases reinforcement'
        ' rewards rope task trace',
        'lazy_loader',
    ),
    'configs': ('experiments/configs/*.py', 'composer_jax', ''),
    'bench_suites': (
        'experiments/bench_suites/*.py',
        'config dashboard kernels_triton learner model rollout sandbox serving'
        ' trace weights',
        'jax ml_dtypes numpy orbax torch transformers zstandard',
    ),
    'experiments': (
        'experiments/*.py',
        'atomic bench_suites config config_text configs dashboard data'
        ' environments fleet inspect kernels_triton learner model rewards'
        ' rollout runs sandbox serving weights',
        'absl jax nkeys rich',
    ),
}


@functools.cache
def files(layer: str) -> list[pathlib.Path]:
  """Returns the modules of a layer."""
  return sorted(ROOT.glob(LAYERS[layer][0]))


def modules() -> list[pathlib.Path]:
  """Returns every module of the product."""
  return sorted(p for top in _TOPS for p in (ROOT / top).rglob('*.py'))


def is_binary(path: pathlib.Path) -> bool:
  """Says whether a module of experiments/ is a program."""
  return "\nif __name__ == '__main__':\n" in path.read_text()


@functools.cache
def imports(path: pathlib.Path) -> tuple[str, ...]:
  """Returns the full names that a file imports, `a.b` for `from a import b`."""
  names = []
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      if node.level:
        raise ValueError(f'{path}:{node.lineno}: write the import in full')
      names += [f'{node.module}.{alias.name}' for alias in node.names]
  return tuple(names)


@functools.cache
def layer_of(path: pathlib.Path) -> str | None:
  """Returns the layer of a file; None for a test."""
  return next((layer for layer in LAYERS if path in files(layer)), None)


def split(path: pathlib.Path) -> tuple[set[str], set[str]]:
  """Returns (layers, packages) that a file imports, its own layer apart."""
  own = layer_of(path)
  inside, outside = set(), set()
  for name in imports(path):
    top = name.partition('.')[0]
    if top in _TOPS:
      inside.add(_layer_of_import(name, path))
    elif top not in sys.stdlib_module_names and top != _HELPERS:
      outside.add(top)
  return inside - {own}, outside


def _layer_of_import(name: str, path: pathlib.Path) -> str:
  """Finds the layer of `from package import module`, which is house style."""
  if name in ('composer_jax.typing.typed', 'composer_jax.checks.Range'):
    name = name.rpartition('.')[0]  # As one imports from typing.
  elif name in _TOPS:  # As users do.
    name += '.__init__'
  layer = layer_of(ROOT / (name.replace('.', '/') + '.py'))
  if layer is None:
    where = path.relative_to(ROOT)
    raise ValueError(f'{where}: {name} is not a module; import the module')
  return layer
