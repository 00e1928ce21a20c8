"""Text form of a config: `--set` overrides, JSON, what a resume may change."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import difflib
import hashlib
import importlib
import json
import types
import typing
from typing import Any


def override(cfg: Any, *assignments: str) -> Any:
  """Returns cfg with fields replaced, every value checked against its type.

  All assignments are applied at once, so two fields which constrain each other
  (`model.q_heads`, `model.kv_heads`) can change together; the last one of
  several to the same field wins.

  Args:
    cfg: a frozen dataclass, usually an `Experiment`.
    *assignments: `path=value`. The path goes through dataclasses and, by
      position or by the name of an item, through tuples: `rl.steps=50`,
      `loss.width=0.2`, `rewards.0.weight=2`, `phases.warmup.steps=9`.

  Raises:
    ValueError: no such field, wrong type, or refused by the dataclass itself.
  """
  edits = []
  for text in assignments:
    path, equals, value = text.partition('=')
    if not equals:
      raise ValueError(f'--set={text}: want FIELD=VALUE, such as rl.steps=50')
    edits.append((path.strip().split('.'), value.strip(), f'--set={text}'))
  return _edit(cfg, edits) if edits else cfg


def _edit(node: Any, edits: list[tuple[list[str], str, str]]) -> Any:
  """Applies (path, value, assignment) edits to a dataclass or a tuple."""
  if isinstance(node, tuple):
    names = [getattr(item, 'name', None) for item in node]
    fields = dict(zip(_keys(names), node, strict=True))
    numbers = dict(zip(map(str, range(len(node))), fields, strict=True))
    edits = [([numbers.get(p[0], p[0]), *p[1:]], v, t) for p, v, t in edits]
    hints = dict.fromkeys(fields, Any)
  else:
    fields = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
    hints = typing.get_type_hints(type(node))
  changed = {}
  for path, value, text in edits:
    if path[0] not in fields:
      near = difflib.get_close_matches(path[0], fields, n=1)
      cure = f'did you mean {near[0]!r}?' if near else 'it has ' + _list(fields)
      raise ValueError(
          f'{text}: {type(node).__name__} has no field {path[0]!r}; {cure}'
      )
    if not path[1:]:
      changed[path[0]] = _read(value, hints[path[0]], fields[path[0]], text)
  for key in dict.fromkeys(path[0] for path, _, _ in edits if path[1:]):
    deeper = [(p[1:], v, t) for p, v, t in edits if p[0] == key and p[1:]]
    if not (_is_object(fields[key]) or isinstance(fields[key], tuple)):
      raise ValueError(f'{deeper[0][2]}: {key} is a value, it has no fields')
    changed[key] = _edit(fields[key], deeper)
  if isinstance(node, tuple):
    return tuple((fields | changed).values())
  try:
    return dataclasses.replace(node, **changed)
  except ValueError as e:
    raise ValueError(f'{" ".join(t for _, _, t in edits)}: {e}') from e


def _keys(names: Sequence[Any]) -> list[str]:
  """What items of a tuple are addressed by: their names, or else positions."""
  if all(isinstance(n, str) for n in names) and len(set(names)) == len(names):
    return list(names)
  return [str(i) for i in range(len(names))]


def _read(value: str, hint: Any, old: Any, text: str) -> Any:
  """Reads a value as the declared type of its field."""
  if _is_object(old):
    raise ValueError(
        f'{text}: this is a {type(old).__name__} object; set one of its fields'
        f' ({_list(f.name for f in dataclasses.fields(old))}), or pass another'
        ' object in a config module'
    )
  if hint is Any and old is not None:
    hint = type(old)
  try:
    literal = ast.literal_eval(value)
  except (ValueError, SyntaxError):
    literal = {'true': True, 'false': False}.get(value, value)
  try:
    return _fit(literal, value, hint)
  except TypeError:
    name = getattr(hint, '__name__', None)
    want = str(hint).replace('typing.', '') if typing.get_args(hint) else name
    raise ValueError(f'{text}: want {want}, got {value!r}') from None


def _fit(value: Any, raw: Any, hint: Any) -> Any:
  """Returns the literal (or its raw text) as `hint`; TypeError if it is not."""
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    # A string accepts every text, so it is tried last: `None` is None.
    for option in sorted(args, key=lambda o: o is str):
      try:
        return _fit(value, raw, option)
      except TypeError:
        continue
  elif origin is typing.Literal and (value in args or raw in args):
    return value if value in args else raw
  elif origin is tuple and isinstance(value, tuple):
    want = args[:1] * len(value) if args[1:] == (...,) else args
    if len(want) == len(value):
      return tuple(_fit(v, v, w) for v, w in zip(value, want, strict=True))
  elif hint is str:
    return value if isinstance(value, str) else raw
  elif hint is float and type(value) is int:
    return float(value)
  elif hint is Any or type(value) is hint:
    return value
  raise TypeError(hint)


def _is_object(value: Any) -> bool:
  return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _list(names: Iterable[str]) -> str:
  return ', '.join(names) or 'none'


# Classes that a config of an older run names by where they were.
_MOVED = {
    f'composer_jax.agents.{old}': f'composer_jax.environments.{new}'
    for old, new in (
        ('harbor:Directory', 'harbor:HarborDirectory'),
        ('human_eval:HumanEval', 'human_eval:HumanEval'),
        ('micro_repair:MicroRepair', 'micro_repair:MicroRepair'),
        ('relay:Relay', 'summary_repair:SummaryRepair'),
    )
} | {
    f'composer_jax.config:{name}Config': f'composer_jax.reinforcement:{name}Config'
    for name in ('Eval', 'Harness', 'Rl', 'Rollout', 'Weights')
}


def _parse(text: str) -> Any:
  """JSON data of a config, with today's addresses."""

  def moved(data: dict[str, Any]) -> dict[str, Any]:
    if data.get('type') in _MOVED:
      data['type'] = _MOVED[data['type']]
    return data

  return json.loads(text, object_hook=moved)


def to_json(cfg: Any) -> str:
  """Writes a config as text; objects carry their type as `module:Class`."""
  return json.dumps(_to_data(cfg, type(cfg).__name__), indent=2) + '\n'


def from_json(text: str) -> Any:
  """Inverse of `to_json`; imports the modules of the objects in it."""
  return _from_data(_parse(text))


def digest(cfg: Any) -> str:
  """Returns the sha256 of the text form, in hexadecimal."""
  return hashlib.sha256(to_json(cfg).encode()).hexdigest()


def _to_data(value: Any, path: str) -> Any:
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  if isinstance(value, tuple):
    return [_to_data(v, f'{path}.{i}') for i, v in enumerate(value)]
  if _is_object(value):
    names = [f.name for f in dataclasses.fields(value)]
    fields = {n: _to_data(getattr(value, n), f'{path}.{n}') for n in names}
    return {'type': _address(type(value))} | fields
  if callable(value) and hasattr(value, '__qualname__'):
    return {'function': _address(value)}
  raise ValueError(
      f'{path}={value!r}: a config holds numbers, text, tuples, functions and'
      f' frozen dataclasses, not {type(value).__name__}'
  )


def _address(thing: Any) -> str:
  return f'{thing.__module__}:{thing.__qualname__}'


def _from_data(data: Any) -> Any:
  if isinstance(data, list):
    return tuple(_from_data(v) for v in data)
  if not isinstance(data, dict):
    return data
  address = data['type'] if 'type' in data else data['function']
  module, _, name = address.partition(':')
  try:
    thing: Any = importlib.import_module(module)
    for part in name.split('.'):
      thing = getattr(thing, part)
  except (ImportError, AttributeError) as e:
    raise ValueError(f'config: {address} cannot be imported: {e}') from e
  if 'function' in data:
    return thing
  return thing(**{k: _from_data(v) for k, v in data.items() if k != 'type'})


def diff(old: str, new: str) -> dict[str, tuple[Any, Any]]:
  """Compares two configs in text form.

  Returns:
    Path of every field that differs -> (old, new); None where it is absent.
  """
  a, b = (dict(_leaves(_parse(text), '')) for text in (old, new))
  paths = dict.fromkeys([*a, *b])
  return {p: (a.get(p), b.get(p)) for p in paths if a.get(p) != b.get(p)}


def _leaves(data: Any, path: str) -> Iterator[tuple[str, Any]]:
  """Yields (path, scalar) of a config's JSON data."""
  if isinstance(data, list):
    names = [v.get('name') if isinstance(v, dict) else None for v in data]
    data = dict(zip(_keys(names), data, strict=True))
  if not isinstance(data, dict):
    yield path, data
    return
  for key, value in data.items():
    yield from _leaves(value, f'{path}.{key}' if path else key)


# What may change when a run continues: how long it runs and how often it
# looks at itself. Anything else would make it another run.
MAY_CHANGE = (
    'rl.steps',
    'rl.checkpoint_every_steps',
    'rl.eval_every_steps',
    'rl.stop_on_mismatch',
    'rl.workers',
    'rl.lease_seconds',
    'harness.episode_seconds',
    'evaluation.showcase',
)


def check_resume(stored: str, cfg: Any) -> None:
  """Refuses to continue a run under another config.

  Args:
    stored: text form of the config that the run was started with.
    cfg: config of the process that wants to continue it.

  Raises:
    ValueError: a field outside `MAY_CHANGE` differs; all are named.
  """
  changed = diff(stored, to_json(cfg))
  parts = [
      f'{path} {old!r} -> {new!r}'
      for path, (old, new) in changed.items()
      if path not in MAY_CHANGE
  ]
  if parts:
    raise ValueError(
        f'this run was started with another config ({"; ".join(parts)}); set'
        ' the old values or choose a new work directory'
    )
