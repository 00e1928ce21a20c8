"""Strings inside of messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from composer_jax.agents import tools

# Stand-ins are pairs of surrogates, which no legible text contains.
_PLANES = 1024
HERE = chr(0xD800 + _PLANES - 1) + chr(0xDFFF)  # the last of them


def stand_in(number: int) -> str:
  """What stands for a text while a template is rendered."""
  return chr(0xD800 + number // _PLANES) + chr(0xDC00 + number % _PLANES)


def strings(value: Any) -> Iterator[str]:
  """Every string of a JSON value, keys included."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, Mapping):
    for key, item in value.items():
      yield from (*strings(key), *strings(item))
  elif isinstance(value, Sequence):
    for item in value:
      yield from strings(item)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
  """A JSON value with every string changed, keys included."""
  if isinstance(value, str):
    return change(value)
  if isinstance(value, Mapping):
    return {change(k): map_strings(v, change) for k, v in value.items()}
  if isinstance(value, Sequence):
    return [map_strings(item, change) for item in value]
  return value


def legible(value: Any) -> Any:
  """A JSON value whose strings all have an encoding."""
  return map_strings(value, tools.legible)
