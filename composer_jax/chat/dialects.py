"""What chat templates expect tool calls to look like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
import itertools
import json
from typing import Any

from composer_jax.chat import texts
from composer_jax.chat import tool_calls

Message = Mapping[str, Any]

# A conversation that shows how a template writes a call.
HELLO: Message = {'role': 'user', 'content': 'Hello'}
TOOL: Message = {
    'type': 'function',
    'function': {
        'name': 'note',
        'description': 'Keeps a note.',
        'parameters': {
            'type': 'object',
            'properties': {
                'text': {'type': 'string'},
                'line': {'type': 'integer'},
            },
            'required': ['text', 'line'],
        },
    },
}
CALL: Message = {
    'id': 'functions.note:0',
    'type': 'function',
    'function': {
        'name': 'note',
        'arguments': {'text': 'a "b"\n{c}', 'line': 1},
    },
}


@dataclasses.dataclass(frozen=True)
class Dialect:
  """What templates expect calls to look like.

  Attributes:
    text: arguments as JSON text, not as objects.
    none: no content beside calls is None, not ''.
    short_ids: see `tool_calls.Reader`.
  """

  text: bool = False
  none: bool = False
  short_ids: bool = False

  def message(self, message: Message) -> dict[str, Any]:
    """A message as the template expects it."""
    out = dict(message)
    if out.get('tool_calls'):
      out['tool_calls'] = [self._call(call) for call in out['tool_calls']]
      if self.none and not out.get('content'):
        out['content'] = None
    if self.short_ids and isinstance(out.get('tool_call_id'), str):
      out['tool_call_id'] = tool_calls.short_id(out['tool_call_id'])
    return out

  def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call['function'])
    arguments = texts.legible(tool_calls.parsed(function['arguments']))
    if self.text and not isinstance(arguments, str):
      arguments = json.dumps(arguments, ensure_ascii=False)
    function['arguments'] = arguments
    out = {**call, 'function': function}
    if self.short_ids:
      out['id'] = tool_calls.short_id(str(call.get('id', function['name'])))
    return out


def of(reader: tool_calls.Reader) -> Iterator[Dialect]:
  """The dialects that templates of a family have, the usual one first."""
  for text, none in itertools.product((False, True), repeat=2):
    yield Dialect(text, none, reader.short_ids)
