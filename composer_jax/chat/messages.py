"""The normal form of a message, whichever way it came.

Requests, JSON lines and columns of Parquet go through here, so that the same
conversation has the same tokens. A column has one type for all of its rows:
what a row lacks is null there, and objects of many shapes are JSON text.
Therefore null is absent, but in lists and in arguments that are text; and a
list or an object may be the JSON text of one.
"""

from __future__ import annotations

from collections.abc import Mapping
import json
from typing import Any

_ROLES = {
    'system': 'system',
    'developer': 'system',
    'user': 'user',
    'assistant': 'assistant',
    'tool': 'tool',
}
_TEXTS = ('text', 'input_text', 'output_text')  # kinds of parts that are text
_CALL = 'want {"function": {name, arguments}} with arguments an object'


class FieldError(ValueError):
  """A field that is not understood; one line with its value and the cure.

  Attributes:
    param: name of the field.
  """

  def __init__(self, param: str, value: Any, why: str):
    shown = json.dumps(value, default=repr)
    shown = shown if len(shown) <= 60 else shown[:57] + '...'
    super().__init__(f'{param}={shown}: {why}')
    self.param = param


def message(value: Any) -> dict[str, Any]:
  """A message with its content as text.

  Args:
    value: as in the OpenAI API.

  Raises:
    FieldError: names the field.
  """
  if not isinstance(value, Mapping):
    raise FieldError('messages', value, 'a message must be an object')
  _unicode('messages', value)
  role = value.get('role')
  if not isinstance(role, str) or role not in _ROLES:
    raise FieldError('messages.role', role, f'want one of {sorted(_ROLES)}')
  kept = {k: v for k, v in value.items() if v is not None}
  content = _text(kept.get('content', ''))
  out = {**kept, 'role': _ROLES[role], 'content': content}
  if 'tool_calls' in kept:
    listed = _items('messages.tool_calls', kept['tool_calls'], _CALL)
    out['tool_calls'] = [_call(call) for call in listed]
  return out


def tools(value: Any) -> tuple[dict[str, Any], ...]:
  """Tools on offer, none of whose fields is null.

  Args:
    value: as in the OpenAI API, or JSON text of that; None: no tools.

  Raises:
    FieldError: names the field.
  """
  _unicode('tools', value)
  return tuple(map(_tool, _items('tools', value, 'want a list of tools')))


def _unicode(param: str, value: Any) -> None:
  try:
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
  except (TypeError, ValueError, RecursionError) as e:
    why = str(e).partition('\n')[0]
    raise FieldError(param, '...', f'no JSON of Unicode text: {why}') from e


def _read(param: str, text: Any, why: str) -> Any:
  """JSON text as what it stands for; all else as it is."""
  if not isinstance(text, str):
    return text
  try:
    value = json.loads(text)
    _unicode(param, value)
  except FieldError:
    raise
  except (ValueError, RecursionError) as e:
    raise FieldError(param, text, why) from e
  return value


def _items(param: str, value: Any, why: str) -> list[Any]:
  value = _read(param, value, why)
  if value is not None and not isinstance(value, list):
    raise FieldError(param, value, why)
  return [_read(param, item, why) for item in value or ()]


def _dense(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {k: _dense(v) for k, v in value.items() if v is not None}
  return [*map(_dense, value)] if isinstance(value, list) else value


def _call(call: Any) -> dict[str, Any]:
  function = call.get('function') if isinstance(call, Mapping) else None
  if not isinstance(function, Mapping):
    raise FieldError('messages.tool_calls', call, _CALL)
  name, arguments = function.get('name'), function.get('arguments')
  arguments = {} if arguments is None or arguments == '' else arguments
  found = _read('messages.tool_calls', arguments, _CALL)
  if not isinstance(name, str) or not isinstance(found, Mapping):
    raise FieldError('messages.tool_calls', call, _CALL)
  if not isinstance(arguments, str):
    arguments = _dense(arguments)
  function = {**_dense(function), 'arguments': arguments}
  return {**_dense(call), 'function': function}


def _text(content: Any) -> str:
  if isinstance(content, str):
    return content
  texts = []
  for part in content if isinstance(content, list) else [content]:
    fields = part if isinstance(part, Mapping) else {}
    text = fields.get('text')
    if not isinstance(text, str) or (fields.get('type') or 'text') not in (
        _TEXTS
    ):
      raise FieldError('messages.content', part, 'only text can be read')
    texts.append(text)
  return '\n'.join(texts)


def _tool(tool: Any) -> dict[str, Any]:
  function = tool.get('function') if isinstance(tool, Mapping) else None
  if not isinstance(function, Mapping) or not isinstance(
      function.get('name'), str
  ):
    raise FieldError('tools', tool, 'want {"type": "function", "function": {}}')
  return _dense(tool)
