"""Every number of every shipped config, and values that it may not like."""

from __future__ import annotations

import dataclasses
import pathlib
import typing

import composer_jax as cj
from experiments.configs import coder
from experiments.configs import kimi_k2
from experiments.configs import midtrain
from experiments.configs import qwen3_30b_a3b
from experiments.configs import summary
from experiments.configs import tiny

SHIPPED = (coder, kimi_k2, midtrain, qwen3_30b_a3b, summary, tiny)
_CODE = pathlib.Path(__file__).parents[1] / 'composer_jax' / 'runs'
VALUES = ('0', '-1', '1', '1000000000000', '0.5', '1e30', 'nan')


def objects(node):
  """Yields (path, dataclass) of everything that an experiment is made of."""
  todo = [((), node)]
  while todo:
    path, value = todo.pop()
    if isinstance(value, tuple):
      names = [getattr(item, 'name', str(i)) for i, item in enumerate(value)]
      parts = zip(names, value, strict=True)
    elif dataclasses.is_dataclass(value):
      yield path, value
      names = [f.name for f in dataclasses.fields(value)]
      parts = ((name, getattr(value, name)) for name in names)
    else:
      continue
    todo += [((*path, name), part) for name, part in parts]


def is_number(hint) -> bool:
  """Says whether a field of this type holds a number, or None."""
  options = typing.get_args(hint) or (hint,)
  return bool({int, float} & set(options))


def numbers(node):
  """Yields the path of every number, as --set takes it."""
  for path, thing in objects(node):
    for name, hint in typing.get_type_hints(type(thing)).items():
      if is_number(hint):
        yield '.'.join((*path, name))


def here(module) -> cj.Experiment:
  """A shipped config, with tasks and code that are on every machine."""
  cfg = module.experiment()
  if isinstance(cfg.tasks, cj.HarborDirectory):
    cfg = dataclasses.replace(cfg, tasks=cj.MicroRepair())
  corpus = cj.CorpusConfig(path=str(_CODE))
  return dataclasses.replace(cfg, base=None, corpus=corpus)
