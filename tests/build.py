"""BUILD, rendered from the files on disk and the imports they really have.

python3 -m tests.build

writes it. Nobody edits it by hand; the build test compares.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import pathlib
import textwrap

from tests import layers

FILE = layers.ROOT / 'BUILD'
_SUPPORT = 'test_support'
_RULES = ('py_binary', 'py_library', 'py_test')
_HEAD = f"""\
# Written by `python3 -m tests.build`; do not edit. One library per layer of
# tests/layers.py, one binary per experiment, one test per test file. Packages
# from PyPI are labels of a pip hub called "pypi".
load("@rules_python//python:defs.bzl", {', '.join(f'"{r}"' for r in _RULES)})

package(default_visibility = ["//visibility:public"])

licenses(["notice"])  # Apache-2.0

exports_files(["LICENSE"])
"""
# Import name -> name on PyPI, in the form of a label, where they differ.
_PYPI = {
    'absl': 'absl_py',
    'openenv': 'openenv_core',
    'orbax': 'orbax_checkpoint',
    'yaml': 'pyyaml',
}
# What a library reads at run time, beside its sources.
_DATA = {
    'composer_jax': 'composer_jax/__init__.pyi',
    'dashboard': 'composer_jax/dashboard/templates/*',
    'experiments': 'experiments/rubrics/*.yaml',
    _SUPPORT: 'tests/data/*',
}


@dataclasses.dataclass(frozen=True)
class Target:
  """One rule of BUILD.

  Attributes:
    name: of the target.
    srcs: paths of its files.
    deps: labels, those of this package first.
    data: pattern of the other files it needs.
  """

  name: str
  srcs: tuple[str, ...]
  deps: tuple[str, ...]
  data: str | None = None

  def library(self) -> str:
    """A rule of its own."""
    lines = ['py_library(', f'    name = "{self.name}",']
    lines.append(f'    srcs = {_list(self.srcs)},')
    if self.data:
      lines.append(f'    data = glob(["{self.data}"]),')
    lines.append('    imports = ["."],')
    if self.deps:
      lines.append(f'    deps = {_list(self.deps)},')
    return '\n'.join([*lines, ')'])

  def row(self) -> str:
    """An entry of the table of programs."""
    (path,) = self.srcs
    return f'    "{path}": {_list(self.deps)},'


def _list(items: tuple[str, ...]) -> str:
  """A list, in lines of at most 80 characters."""
  text = ', '.join(f'"{i}"' for i in items)
  if len(text) < 50:
    return f'[{text}]'
  indent = ' ' * 8
  text = textwrap.fill(
      text, 80, initial_indent=indent, subsequent_indent=indent
  )
  return f'[\n{text},\n    ]'


def _programs(rule: str, targets: list[Target]) -> str:
  """Programs of one kind: from path to deps."""
  rows = '\n'.join(t.row() for t in targets)
  return f"""\
[{rule}(
    name = path.removesuffix(".py"),
    srcs = [path],
    imports = ["."],
    main = path,
    deps = deps,
) for path, deps in {{
{rows}
}}.items()]"""


def _labels(inside: Iterable[str], outside: Iterable[str]) -> tuple[str, ...]:
  names = {_PYPI.get(p, p.lower()) for p in outside}
  own = sorted(f':{n}' for n in set(inside))
  return *own, *sorted(f'@pypi//{n}' for n in names)


def _path(file: pathlib.Path) -> str:
  return str(file.relative_to(layers.ROOT))


def _program(file: pathlib.Path, support: str) -> Target:
  inside, outside = layers.split(file)
  return Target(file.stem, (_path(file),), _labels(inside | {support}, outside))


def libraries() -> list[Target]:
  """Returns a target for each layer and one for what the tests share."""
  out = []
  for name, (_, inside, _) in layers.LAYERS.items():
    own = [f for f in layers.files(name) if not layers.is_binary(f)]
    outside = set().union(*(layers.split(f)[1] for f in own))
    srcs = tuple(map(_path, own))
    deps = _labels(inside.split(), outside)
    out.append(Target(name, srcs, deps, _DATA.get(name)))
  tests = (layers.ROOT / 'tests').glob('*.py')
  support = sorted(f for f in tests if not f.stem.endswith('_test'))
  found = [layers.split(f) for f in support]
  inside, outside = (set().union(*part) for part in zip(*found, strict=True))
  srcs = tuple(map(_path, support))
  out.append(Target(_SUPPORT, srcs, _labels(inside, outside), _DATA[_SUPPORT]))
  return out


def binaries() -> list[Target]:
  """Returns a target for each experiment."""
  found = filter(layers.is_binary, layers.files('experiments'))
  return [_program(f, 'experiments') for f in found]


def tests() -> list[Target]:
  """Returns a target for each file of tests."""
  found = sorted((layers.ROOT / 'tests').rglob('*_test.py'))
  return [_program(f, _SUPPORT) for f in found]


def render() -> str:
  """Returns the text of BUILD."""
  blocks = [
      _HEAD.strip(),
      *(t.library() for t in libraries()),
      _programs('py_binary', binaries()),
      _programs('py_test', tests()),
  ]
  return '\n\n'.join(blocks) + '\n'


if __name__ == '__main__':
  FILE.write_text(render())
