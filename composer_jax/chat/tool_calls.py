"""Tool calls in the text of replies, in the formats of open models."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import json
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """One tool call.

  Attributes:
    name: name of the tool.
    arguments: JSON text of an object, as the model wrote it.
    id: id of the call, if the format has one.
  """

  name: str
  arguments: str
  id: str | None = None


@dataclasses.dataclass(frozen=True)
class Reply:
  """What a model said.

  Attributes:
    content: text for the user; None if there are tool calls only.
    tool_calls: calls in the order of the text.
    reasoning: text inside <think>, or None.
  """

  content: str | None
  tool_calls: tuple[ToolCall, ...] = ()
  reasoning: str | None = None


# Reads what stands between the marks of a call; ValueError if it cannot.
Reader = Callable[[str], ToolCall]


def parsed(arguments: Any) -> Any:
  """Arguments as an object, if they are the JSON text of one."""
  if isinstance(arguments, str):
    try:
      value = json.loads(arguments)
    except (ValueError, RecursionError):
      return arguments
    return value if isinstance(value, dict) else arguments
  return arguments


def _json_call(text: str) -> ToolCall:
  fields = json.loads(text)
  if not isinstance(fields, dict) or not isinstance(fields.get('name'), str):
    raise ValueError('no name')
  arguments = fields.get('arguments', {})
  if isinstance(arguments, str):
    arguments = json.loads(arguments)
  if not isinstance(arguments, dict):
    raise ValueError('arguments are no object')
  return ToolCall(fields['name'], json.dumps(arguments, ensure_ascii=False))


_FUNCTION = re.compile(r'\s*<function=([^>\s]+)>(.*)</function>\s*', re.S)
_PARAMETER = re.compile(r'<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>', re.S)


def _xml_call(text: str) -> ToolCall:
  match = _FUNCTION.fullmatch(text)
  if not match:
    raise ValueError('no function')
  arguments = {}
  for key, value in _PARAMETER.findall(match[2]):
    try:  # numbers, lists and objects are JSON; everything else is text
      arguments[key] = json.loads(value)
    except (ValueError, RecursionError):
      arguments[key] = value
  return ToolCall(match[1], json.dumps(arguments, ensure_ascii=False))


def _kimi_call(text: str) -> ToolCall:
  name, found, arguments = text.partition('<|tool_call_argument_begin|>')
  name, arguments = name.strip(), arguments.strip()
  match = re.fullmatch(r'(?:functions\.)?(.+?)(?::\d+)?', name)
  if not found or not match or not isinstance(json.loads(arguments), dict):
    raise ValueError('no arguments')
  return ToolCall(match[1], arguments, name)


_QWEN = re.compile(r'<tool_call>(.*?)</tool_call>', re.S)
_KIMI = re.compile(r'<\|tool_call_begin\|>(.*?)<\|tool_call_end\|>', re.S)
_KIMI_SECTION = re.compile(r'<\|tool_calls_section_(?:begin|end)\|>')
_STARTS = ('<tool_call>', '<|tool_calls_section_begin|>', '<|tool_call_begin|>')
_THINK, _THOUGHT = '<think>', '</think>'  # of reasoning


def reader_of(template: str) -> Reader:
  """Which kind of call a chat template teaches: Kimi's, or one of Qwen's."""
  if '<|tool_call_begin|>' in template:
    return _kimi_call
  return _xml_call if '<function=' in template else _json_call


def _without_thought(text: str) -> tuple[str | None, str]:
  """Splits (reasoning, rest); a thought that has no end is all there is."""
  if not text.lstrip().startswith(_THINK):
    return None, text
  reasoning, _, rest = text.partition(_THOUGHT)
  return reasoning.replace(_THINK, '', 1).strip('\n'), rest.lstrip('\n')


def read(text: str, reader: Reader) -> Reply:
  """Takes a reply apart; nothing is lost if a call cannot be read."""
  reasoning, text = _without_thought(text)
  pattern = _KIMI if reader is _kimi_call else _QWEN
  try:
    calls = tuple(reader(body) for body in pattern.findall(text))
  except (ValueError, RecursionError):
    calls = ()
  if not calls:
    return Reply(text, (), reasoning)
  rest = _KIMI_SECTION.sub('', pattern.sub('', text)).rstrip()
  return Reply(rest or None, calls, reasoning)


def certain_thought(text: str) -> str:
  """The reasoning that `read` will begin with, however the text goes on."""
  thought, _ = _without_thought(text)
  if not thought or _THOUGHT in text:
    return thought or ''
  ends = [n for n in range(1, len(_THOUGHT)) if text.endswith(_THOUGHT[:n])]
  thought, _ = _without_thought(text[: len(text) - max(ends, default=0)])
  return (thought or '').rstrip('\ufffd').rstrip('\n')


def certain(text: str) -> str:
  """The content that `read` will begin with, however the text goes on.

  Without what may be the start of a thought, a call or a character, and without
  space at the end, which is dropped if a call follows.
  """
  if text.lstrip() and _THINK.startswith(text.lstrip()):
    return ''
  _, text = _without_thought(text)
  at = [text.find(mark) for mark in _STARTS if mark in text]
  for mark in _STARTS:
    starts = (mark[:size] for size in range(1, len(mark)))
    at += [len(text) - len(start) for start in starts if text.endswith(start)]
  return text[: min(at, default=len(text))].rstrip('\ufffd').rstrip()
