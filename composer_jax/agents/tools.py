"""The tools a policy calls, as plain data, and what they do.

Every mistake of the policy becomes text it can read (`ParseError`, or an
observation), never an exception of the harness: a policy whose broken calls
are dropped learns to break calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import re
import typing
from typing import Any, Protocol

from composer_jax import task as task_lib
from composer_jax.sandbox import child


class ParseError(ValueError):
  """A turn that is no sequence of tool calls; its text goes to the policy."""


@dataclasses.dataclass(frozen=True)
class Edit:
  """Replaces the first `old` in line number `line` (from 0) by `new`."""

  line: int
  old: str
  new: str


@dataclasses.dataclass(frozen=True)
class Read:
  """Shows lines `first` to `last` (from 1, inclusive) of a file."""

  path: str
  first: int = 1
  last: int = 200


@dataclasses.dataclass(frozen=True)
class Search:
  """Shows the lines of all files that contain a text."""

  text: str


@dataclasses.dataclass(frozen=True)
class Replace:
  """Replaces a text that occurs once in a file; '' makes a new file."""

  path: str
  old: str
  new: str


@dataclasses.dataclass(frozen=True)
class Ask:
  """Asks the user, who is not there: it costs a turn."""

  text: str


@dataclasses.dataclass(frozen=True)
class Run:
  """Executes the public tests."""


@dataclasses.dataclass(frozen=True)
class Done:
  """Submits the files as they are; ends the episode."""


ToolCall = Edit | Read | Search | Replace | Ask | Run | Done
BY_NAME: Mapping[str, type] = {
    kind.__name__.lower(): kind for kind in typing.get_args(ToolCall)
}
_MATCHES = 50  # lines that a search shows
_NAME_BYTES = 64  # shown of a name that there is not
_HALVES = re.compile('[\ud800-\udfff]')


class TestRunner(Protocol):
  """Runs the public tests of a task on some files."""

  async def __call__(
      self, task: task_lib.Task, files: Mapping[str, str]
  ) -> str:
    """Returns what the policy is shown."""


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Result of one call: the files after it and what the policy is shown."""

  files: Mapping[str, str]
  text: str
  failed: bool = False


def legible(text: str) -> str:
  """Text that has an encoding: half a surrogate pair is no character.

  JSON can write one ("\\ud800"), and neither UTF-8 nor a tokenizer takes it.
  """
  return _HALVES.sub('\ufffd', text)


def name_of(call: ToolCall) -> str:
  """Name of a call's tool in `BY_NAME`."""
  return type(call).__name__.lower()


def call_of(name: str, arguments: Mapping[str, Any]) -> ToolCall:
  """Reads a tool call that was written by name.

  Raises:
    ParseError: the call is malformed; the text is for the policy.
  """
  if name not in BY_NAME:
    shown = truncate(name, _NAME_BYTES)
    raise ParseError(f'no tool "{shown}"; have {", ".join(BY_NAME)}')
  kind = BY_NAME[name]
  known = {f.name: f for f in dataclasses.fields(kind)}
  for field, value in arguments.items():
    if field not in known:
      shown = truncate(field, _NAME_BYTES)
      raise ParseError(f'{name}: unknown argument "{shown}"')
    want = int if known[field].type == 'int' else str
    if type(value) is not want:
      raise ParseError(f'{name}: "{field}" must be {want.__name__}')
    if isinstance(value, str) and _HALVES.search(value):
      raise ParseError(f'{name}: "{field}" has half a surrogate pair')
  try:
    return kind(**arguments)
  except TypeError as e:
    raise ParseError(f'{name}: an argument is missing') from e


def edit(files: Mapping[str, str], call: Edit) -> Outcome:
  """Applies an edit to the only (or first) file."""
  path, source = next(iter(files.items()), ('', ''))
  lines = source.split('\n') if files else []
  if not 0 <= call.line < len(lines):
    return Outcome(files, f'no line {call.line}', failed=True)
  if call.old not in lines[call.line]:
    return Outcome(files, f'no {call.old} in line {call.line}', failed=True)
  if call.old == call.new:
    return Outcome(files, 'no change', failed=True)
  lines[call.line] = lines[call.line].replace(call.old, call.new, 1)
  return Outcome({**files, path: '\n'.join(lines)}, 'ok')


def read(files: Mapping[str, str], call: Read) -> Outcome:
  """Lines after their numbers."""
  if call.path not in files:
    return Outcome(files, f'no file {call.path}', failed=True)
  lines = files[call.path].split('\n')
  first = max(call.first, 1)
  shown = lines[first - 1 : max(call.last, first)]
  if not shown:
    return Outcome(files, f'{call.path} has {len(lines)} lines', failed=True)
  text = '\n'.join(f'{n} {line}' for n, line in enumerate(shown, first))
  return Outcome(files, text)


def search(files: Mapping[str, str], call: Search) -> Outcome:
  """Lines after their path and number; no patterns, which can take forever."""
  if not call.text:
    return Outcome(files, 'nothing to search for', failed=True)
  found = [
      f'{path}:{n}: {line}'
      for path, source in sorted(files.items())
      for n, line in enumerate(source.split('\n'), 1)
      if call.text in line
  ]
  rest = len(found) - _MATCHES
  found[_MATCHES:] = [f'and {rest} more'] * (rest > 0)
  return Outcome(files, '\n'.join(found) or 'not found')


def replace(files: Mapping[str, str], call: Replace) -> Outcome:
  """Applies a replacement, or says why it cannot be applied."""
  if not call.old:
    if call.path in files:
      return Outcome(files, f'{call.path} exists', failed=True)
    return Outcome({**files, call.path: call.new}, 'ok')
  count = files.get(call.path, '').count(call.old)
  if count != 1:
    text = f'found {count} times in {call.path}'
    text = text if call.path in files else f'no file {call.path}'
    return Outcome(files, text, failed=True)
  if call.old == call.new:
    return Outcome(files, 'no change', failed=True)
  source = files[call.path].replace(call.old, call.new)
  return Outcome({**files, call.path: source}, 'ok')


async def execute(
    call: ToolCall,
    task: task_lib.Task,
    files: Mapping[str, str],
    run_tests: TestRunner,
) -> Outcome:
  """Carries out one call; `Done` changes nothing and says nothing."""
  match call:
    case Edit():
      return edit(files, call)
    case Read():
      return read(files, call)
    case Search():
      return search(files, call)
    case Replace():
      return replace(files, call)
    case Ask():
      return Outcome(files, 'nobody is there to answer; decide')
    case Run():
      return Outcome(files, await run_tests(task, files))
    case Done():
      return Outcome(files, '')


def truncate(text: str, limit_bytes: int) -> str:
  """Makes a text legible, and cuts the middle out if it is too long.

  The start says what ran and the end says how it went: both stay.

  Args:
    text: any.
    limit_bytes: bytes of the result, in UTF-8.
  """
  text = legible(text)
  data = text.encode()
  if len(data) <= limit_bytes:
    return text
  mark = b'...'
  keep = max(limit_bytes - len(mark), 0)
  head, tail = keep - keep // 2, keep // 2
  data = data[:head] + mark + (data[-tail:] if tail else b'')
  return data.decode(errors='ignore')


def report(
    cases: Sequence[task_lib.Case],
    values: Sequence[str | None],
    errors: Sequence[str],
    failure: str,
) -> str:
  """What `run` shows: the first failing case, in the prompt's notation."""
  for case, value, error in zip(cases, values, errors, strict=True):
    expected = child.canonical(case.expected)
    if value != expected:
      arguments = ','.join(child.canonical(a) for a in case.args)
      got = value or error or failure
      return f'{arguments}={expected} not {got}'
  return failure or 'ok'


def report_suite(
    ids: Sequence[str],
    outcomes: Mapping[str, str],
    errors: Mapping[str, str],
    failure: str,
) -> str:
  """What `run` shows of a suite: every test that did not pass, and why."""
  failing = [i for i in ids if outcomes.get(i) != 'passed']
  if failure or not failing:
    return failure or f'ok, {len(ids)} tests'
  lines = [f'{i}: {errors.get(i, "did not run")}' for i in failing]
  return '\n'.join([f'{len(failing)} of {len(ids)} tests fail', *lines])
