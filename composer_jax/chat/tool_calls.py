"""Tool calls in the text of replies, in the formats of open models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import json
import re
from typing import Any

from composer_jax.agents import tools as agent_tools
from composer_jax.chat import schemas


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


@dataclasses.dataclass(frozen=True)
class Reader:
  """How a family of models writes tool calls.

  Attributes:
    starts: what calls begin with: what is said to the user ends there.
    begin: finds where calls begin.
    body: (text, place behind `begin`, tools) -> (calls, where they end);
      ValueError if it cannot read them.
    marks: what may not be left over behind a call; the marks around a list of
      calls, which may, are in `around`.
    around: see `marks`.
    closed: whether a mark ends a call. If not, nothing may follow it.
    short_ids: whether ids of calls must be nine letters and digits.
  """

  starts: tuple[str, ...]
  begin: re.Pattern[str]
  body: Callable[[str, int, Sequence[Any]], tuple[list[ToolCall], int]]
  marks: re.Pattern[str]
  around: re.Pattern[str] = re.compile(r'(?!)')
  closed: bool = True
  short_ids: bool = False


def parsed(arguments: Any) -> Any:
  """Arguments as an object, if they are the JSON text of one."""
  if isinstance(arguments, str):
    try:
      value = json.loads(arguments)
    except (ValueError, RecursionError):
      return arguments
    return value if isinstance(value, dict) else arguments
  return arguments


def _text(arguments: dict[str, Any]) -> str:
  """JSON text that has an encoding, whatever strings are in it."""
  text = json.dumps(arguments, ensure_ascii=False)
  return text if text == agent_tools.legible(text) else json.dumps(arguments)


def _past(text: str, at: int, mark: re.Pattern[str]) -> int:
  """Where a mark that must come next ends."""
  match = mark.match(text, at)
  if not match:
    raise ValueError('text is left over')
  return match.end()


def _named(fields: Any, key: str) -> ToolCall:
  """A call that is written as a JSON object."""
  if not isinstance(fields, dict) or not isinstance(fields.get('name'), str):
    raise ValueError('no name')
  arguments = fields.get(key, {})
  if isinstance(arguments, str):
    arguments, end = schemas.decode(source := arguments)
    _past(source, end, _END)
  if not isinstance(arguments, dict):
    raise ValueError('arguments are no object')
  name, text = agent_tools.legible(fields['name']), _text(arguments)
  return ToolCall(name, text, fields['id'] if _is_text(fields, 'id') else None)


def _is_text(fields: Mapping[str, Any], key: str) -> bool:
  return isinstance(fields.get(key), str) and bool(fields[key])


_END = re.compile(r'\s*\Z')
_CLOSE = re.compile(r'\s*</tool_call>')


def _json_call(text, at, tools):
  del tools
  fields, end = schemas.decode(text, at)
  return [_named(fields, 'arguments')], _past(text, end, _CLOSE)


_FUNCTION = re.compile(r'\s*<function=([^>\s]+)>\s*')
_PARAMETER = re.compile(r'<parameter=([^>\s]+)>\n?')
_LINE = re.compile(r'^<parameter=([^>\s]+)>', re.M)
_FUNCTION_END = re.compile(r'</function>\s*</tool_call>')
# The mark alone may be part of a text; what follows makes it an end.
_PARAMETER_END = re.compile(
    r'\n?</parameter>\s*(?=<parameter=[^>\s]+>|</function>\s*</tool_call>)'
)


def _xml_call(text, at, tools):
  function = _FUNCTION.match(text, at)
  if not function:
    raise ValueError('no function')
  declared = schemas.properties(tools, function[1])
  arguments, at = {}, function.end()
  while parameter := _PARAMETER.match(text, at):
    name, end = parameter[1], _PARAMETER_END.search(text, parameter.end())
    if not end or name in arguments:
      raise ValueError(f'{name}: has no end, or two values')
    value = text[parameter.end() : end.start()]
    inside = {m[1] for m in _LINE.finditer(value)}
    if inside and (declared is None or inside & declared.keys()):
      raise ValueError(f'{name}: another parameter begins before its end')
    arguments[name] = schemas.typed(value, (declared or {}).get(name))
    at = end.end()
  made = ToolCall(function[1], _text(arguments))
  return [made], _past(text, at, _FUNCTION_END)


_KIMI_NAME = re.compile(r'([^<]*)<\|tool_call_argument_begin\|>')
_KIMI_END = re.compile(r'\s*<\|tool_call_end\|>')


def _kimi_call(text, at, tools):
  del tools
  head = _KIMI_NAME.match(text, at)
  name = head[1].strip() if head else ''
  match = re.fullmatch(r'(?:functions\.)?(.+?)(?::\d+)?', name)
  if not head or not match:
    raise ValueError('no name')
  value, end = schemas.decode(text, head.end())
  if not isinstance(value, dict):
    raise ValueError('arguments are no object')
  written = text[head.end() : end].strip()
  made = ToolCall(match[1], written, name)
  return [made], _past(text, end, _KIMI_END)


def _listed_calls(text, at, tools):
  del tools
  fields, end = schemas.decode(text, at)
  if not isinstance(fields, list):
    raise ValueError('no list of calls')
  return [_named(each, 'arguments') for each in fields], end


_NEXT = re.compile(r'\s*;\s*(?=\{)')


def _bare_calls(text, at, tools):
  if not tools:  # an object that is no call
    raise ValueError('no tools are on offer')
  calls = []
  while True:
    fields, at = schemas.decode(text, at)
    key = 'arguments' if 'parameters' not in fields else 'parameters'
    calls.append(_named(fields, key))
    following = _NEXT.match(text, at)
    if not following:
      return calls, at
    at = following.end()


# With the characters of DeepSeek's own tokens, or their ASCII likes.
_DEEP = r'<[|｜]tool[_▁]call[_▁]'
_DEEP_NAME = re.compile(
    r'\s*([^<\n]*?)\s*<[|｜]tool[_▁]sep[|｜]>([^\n{]*)(\n```json)?\s*(?=\{)'
)
_DEEP_END = re.compile(rf'\s*{_DEEP}(?:end|stop)[|｜]>')
_DEEP_FENCED = re.compile(rf'\s*```{_DEEP_END.pattern}')


def _deepseek_call(text, at, tools):
  del tools
  head = _DEEP_NAME.match(text, at)
  if not head or bool(head[2].strip()) != bool(head[3]):
    raise ValueError('no name')
  # "function<sep>name" and a block of JSON; since V3.1 "name<sep>" and JSON.
  name = head[2].strip() if head[3] else head[1]
  value, end = schemas.decode(text, head.end())
  made = _named({'name': name, 'arguments': value}, 'arguments')
  return [made], _past(text, end, _DEEP_FENCED if head[3] else _DEEP_END)


_MARKS = re.compile(r'</?tool_call>')
_QWEN = (('<tool_call>',), re.compile('<tool_call>'))
JSON = Reader(*_QWEN, _json_call, _MARKS)
XML = Reader(*_QWEN, _xml_call, _MARKS)
KIMI = Reader(
    ('<|tool_calls_section_begin|>', '<|tool_call_begin|>'),
    re.compile(r'<\|tool_call_begin\|>'),
    _kimi_call,
    re.compile(r'<\|tool_call'),
    re.compile(r'<\|tool_calls_section_(?:begin|end)\|>'),
)
DEEPSEEK = Reader(
    tuple(
        mark.translate(str.maketrans('|_', signs))
        for signs in ('｜▁', '|_')
        for mark in (
            '<|tool_calls_begin|>',
            '<|tool_calls_start|>',
            '<|tool_call_begin|>',
            '<|tool_call_start|>',
        )
    ),
    re.compile(rf'{_DEEP}(?:begin|start)[|｜]>'),
    _deepseek_call,
    re.compile(r'<[|｜]tool[_▁]'),
    re.compile(r'<[|｜]tool[_▁]calls[_▁](?:begin|start|end|stop)[|｜]>'),
)
MISTRAL = Reader(
    ('[TOOL_CALLS]',),
    re.compile(r'\[TOOL_CALLS\]'),
    _listed_calls,
    re.compile(r'\[TOOL_CALLS\]'),
    closed=False,
    short_ids=True,
)
LLAMA = Reader(
    ('<|python_tag|>',),
    re.compile(r'(?:\A\s*|<\|python_tag\|>\s*)(?=\{)'),
    _bare_calls,
    re.compile(r'<\|python_tag\|>'),
    closed=False,
)
_THINK, _THOUGHT = '<think>', '</think>'  # of reasoning


def reader_of(template: str) -> Reader:
  """Which kind of call a chat template teaches; Qwen's if it says nothing."""
  if re.search(r'<[|｜]tool[_▁]sep[|｜]>', template):
    return DEEPSEEK
  if '<|tool_call_begin|>' in template:
    return KIMI
  if '[TOOL_CALLS]' in template:
    return MISTRAL
  if '<function=' in template:
    return XML
  llama = '<|start_header_id|>' in template or '"parameters": ' in template
  return LLAMA if llama and '<tool_call>' not in template else JSON


def short_id(text: str) -> str:
  """An id of nine letters and digits, the same for the same text."""
  if re.fullmatch(r'[A-Za-z0-9]{9}', text):
    return text
  return hashlib.sha256(text.encode(errors='replace')).hexdigest()[:9]


def _without_thought(text: str) -> tuple[str | None, str]:
  """Splits (reasoning, rest); a thought that has no end is all there is."""
  if not text.lstrip().startswith(_THINK):
    return None, text
  reasoning, _, rest = text.partition(_THOUGHT)
  return reasoning.replace(_THINK, '', 1).strip('\n'), rest.lstrip('\n')


def _split(
    text: str, reader: Reader, tools: Sequence[Any]
) -> tuple[list[ToolCall], str]:
  """Splits (calls, what is said besides them).

  Raises:
    ValueError, RecursionError: a call cannot be read to its end.
  """
  match = reader.begin.search(text)
  if not match:
    return [], text
  calls, said = [], [text[: match.start()]]
  while match:
    found, at = reader.body(text, match.end(), tools)
    calls += found
    match = reader.begin.search(text, at)
    said.append(text[at : match.start() if match else None])
  left = reader.around.sub('', ''.join(said[1:]))
  if reader.marks.search(left) or (left.strip() and not reader.closed):
    raise ValueError('text is left over')
  return calls, reader.around.sub('', said[0]) + left


def read(text: str, reader: Reader, tools: Sequence[Any] = ()) -> Reply:
  """Takes a reply apart; nothing is lost if a call cannot be read.

  Args:
    text: all of the reply.
    reader: how the model writes calls.
    tools: tools on offer, as in the OpenAI API. Where a format does not say of
      what type an argument is, its schema does; without one it is text.
  """
  reasoning, text = _without_thought(text)
  try:
    calls, rest = _split(text, reader, tools)
  except (ValueError, RecursionError):
    calls, rest = [], text
  if not calls:
    return Reply(text, (), reasoning)
  return Reply(rest.rstrip() or None, tuple(calls), reasoning)


def certain_thought(text: str) -> str:
  """The reasoning that `read` will begin with, however the text goes on."""
  thought, _ = _without_thought(text)
  if not thought or _THOUGHT in text:
    return thought or ''
  ends = [n for n in range(1, len(_THOUGHT)) if text.endswith(_THOUGHT[:n])]
  thought, _ = _without_thought(text[: len(text) - max(ends, default=0)])
  return (thought or '').rstrip('\ufffd').rstrip('\n')


def certain(text: str, reader: Reader) -> str:
  """The content that `read` will begin with, however the text goes on.

  Without what may be the start of a thought, a call or a character, and without
  space at the end, which is dropped if a call follows.
  """
  text = text.rstrip('\ufffd')  # which hides that a mark has begun
  if text.lstrip() and _THINK.startswith(text.lstrip()):
    return ''
  _, text = _without_thought(text)
  if reader is LLAMA and text.lstrip().startswith('{'):
    return ''
  at = [text.find(mark) for mark in reader.starts if mark in text]
  for mark in reader.starts:
    starts = (mark[:size] for size in range(1, len(mark)))
    at += [len(text) - len(start) for start in starts if text.endswith(start)]
  return text[: min(at, default=len(text))].rstrip()
