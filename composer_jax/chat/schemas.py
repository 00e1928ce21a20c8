"""Arguments of tools by what their schemas declare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import json
import math
from typing import Any

_DEPTH = 8  # of schemas inside schemas that are looked at
_ALIASES = {
    'int': 'integer',
    'float': 'number',
    'bool': 'boolean',
    'list': 'array',
    'dict': 'object',
    'str': 'string',
}
_KINDS = {
    bool: {'boolean'},
    int: {'integer', 'number'},
    float: {'number'},
    str: {'string'},
    list: {'array'},
    dict: {'object'},
    type(None): {'null'},
}
# How Jinja writes what is neither text nor a container.
_PYTHON = {'True': 'true', 'False': 'false', 'None': 'null'}


def _refuse(text: str):
  raise ValueError(f'{text} is no JSON')


def _finite(text: str) -> float:
  value = float(text)
  return value if math.isfinite(value) else _refuse(text)


_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)


def decode(text: str, at: int = 0) -> tuple[Any, int]:
  """Reads the JSON value at a place.

  Returns:
    (value, where it ends).

  Raises:
    ValueError, RecursionError: there is none, or a number is not finite.
  """
  while at < len(text) and text[at] in ' \t\n\r':
    at += 1
  return _JSON.raw_decode(text, at)


def properties(tools: Sequence[Any], name: str) -> Mapping[str, Any] | None:
  """Declared parameters of a tool; None if it is not on offer."""
  for tool in tools:
    function = tool.get('function') if isinstance(tool, Mapping) else None
    if isinstance(function, Mapping) and function.get('name') == name:
      declared = function.get('parameters')
      declared = declared if isinstance(declared, Mapping) else {}
      found = declared.get('properties')
      found = found if isinstance(found, Mapping) else {}
      return {k: (v, declared) for k, v in found.items()}
  return None


def typed(text: str, declared: tuple[Any, Any] | None) -> Any:
  """A value that was written without quotes, as its schema wants it.

  Args:
    text: as it was written.
    declared: (schema of the value, schema that its references are in); None:
      nothing is known.

  Returns:
    The text itself if the schema allows text, says nothing, or does not fit.
  """
  kinds = set(_types(*declared, _DEPTH)) if declared else set()
  if not kinds or 'string' in kinds:
    return text
  source = text.strip()
  try:
    value, end = decode(_PYTHON.get(source, source))
  except (ValueError, RecursionError):
    return text
  whole = end == len(_PYTHON.get(source, source))
  return value if whole and _KINDS[type(value)] & kinds else text


def _types(schema: Any, root: Any, depth: int) -> Iterator[str]:
  """JSON types that a schema names."""
  if not isinstance(schema, Mapping) or not depth:
    return
  kinds = schema.get('type')
  for kind in kinds if isinstance(kinds, list) else [kinds]:
    if isinstance(kind, str):
      yield _ALIASES.get(kind, kind)
  values = schema.get('enum')
  values = [*values] if isinstance(values, list) else []
  for value in [*values, *([schema['const']] if 'const' in schema else [])]:
    yield from _KINDS.get(type(value), ())
  for name in ('anyOf', 'oneOf', 'allOf'):
    branches = schema.get(name)
    for branch in branches if isinstance(branches, list) else ():
      yield from _types(branch, root, depth - 1)
  reference = schema.get('$ref')
  if isinstance(reference, str) and reference.startswith('#/'):
    found = root
    for key in reference[2:].split('/'):
      found = found.get(key) if isinstance(found, Mapping) else None
    yield from _types(found, root, depth - 1)
