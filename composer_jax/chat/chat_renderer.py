"""Tasks in a model's own chat format: a conversation with tool calls.

For tasks of files rather than numbered lines, and for every model that was not
trained here. What was sampled is never encoded again: observations, queries and
the start of another window go around its exact ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import json

from composer_jax import task as task_lib
from composer_jax.agents import tools
from composer_jax.agents import windows
from composer_jax.chat import template

_JSON_TYPES = {'str': 'string', 'int': 'integer'}
_SUMMARY_QUERY = (
    'The context is nearly full. Reply with a summary, not with tool calls:'
    ' what you have found out, what you have changed, what remains to be done.'
    ' You will go on with the task and this summary only.'
)
_RESUMED = 'You have worked on this before. Your summary:'


def _schema(name: str, kind: type) -> template.Message:
  """A tool as the OpenAI API describes one."""
  fields = dataclasses.fields(kind)
  function = {
      'name': name,
      'description': ' '.join((kind.__doc__ or '').split()),
      'parameters': {
          'type': 'object',
          'properties': {
              f.name: {'type': _JSON_TYPES[str(f.type)]} for f in fields
          },
          'required': [
              f.name for f in fields if f.default is dataclasses.MISSING
          ],
      },
  }
  return {'type': 'function', 'function': function}


SCHEMAS = tuple(_schema(name, kind) for name, kind in tools.BY_NAME.items())


def _user(text: str) -> template.Message:
  return {'role': 'user', 'content': text}


def _id(name: str, number: int) -> str:
  # Kimi's templates show the id only, and the name is read from it.
  return f'functions.{name}:{number}'


class ChatRenderer:
  """Translates between tasks, tool calls and the token ids of one model."""

  def __init__(self, chat_format: template.ChatFormat):
    """Checks that the format has tools.

    Raises:
      ValueError: its template does not show them.
    """
    self._format = chat_format
    self.stop_ids = chat_format.stop_ids
    self._end = min(self.stop_ids)
    if chat_format.prompt([_user('-')]) == chat_format.prompt(
        [_user('-')], SCHEMAS
    ):
      raise ValueError(
          'chat template: shows no tools; take one of an instruct model'
      )

  def encode_task(self, task: task_lib.Task) -> list[int]:
    """Instruction and names of the files, which are to be read."""
    return self._format.prompt([_user(_problem(task, task.files))], SCHEMAS)

  def encode_observation(self, text: str) -> list[int]:
    """What follows a turn that did not end the episode."""
    message = {'role': 'tool', 'content': text, 'tool_call_id': _id('run', 0)}
    return self._after_turn(message)

  def encode_summary_query(self) -> list[int]:
    """What asks for a summary."""
    return self._after_turn(_user(_SUMMARY_QUERY))

  def _after_turn(self, message: template.Message) -> list[int]:
    said = [_user('-'), {'role': 'assistant', 'content': '-'}, message]
    return self._format.tail(said, SCHEMAS, known=2, ended=True)

  def encode_resumed(
      self, task: task_lib.Task, summary: Sequence[int], state: windows.State
  ) -> list[int]:
    """Problem, changed files by name, summary and counts."""
    before = f'{_problem(task, state.files)}\n\n{_RESUMED}\n'
    after = (
        f'\nSummaries so far: {state.summaries}. Turns left:'
        f' {state.turns_left}.'
    )
    kept = [i for i in summary if i not in self.stop_ids]
    return self._format.around(before, kept, after, SCHEMAS)

  def encode_turn(self, calls: Sequence[tools.ToolCall]) -> list[int]:
    """A turn as a policy would write it; for demonstrations."""
    made = [
        {
            'id': _id(tools.name_of(call), i),
            'type': 'function',
            'function': {
                'name': tools.name_of(call),
                'arguments': json.dumps(vars(call)),
            },
        }
        for i, call in enumerate(calls)
    ]
    turn = {'role': 'assistant', 'content': '', 'tool_calls': made}
    return self._format.turn([_user('-'), turn], SCHEMAS, 1)[1]

  def encode_summary(self, text: str) -> list[int]:
    """A summary as a policy would write it; for demonstrations."""
    return [*self._format.encode(text), self._end]

  def parse(self, ids: Sequence[int]) -> list[tools.ToolCall]:
    """Reads a sampled turn.

    Raises:
      ParseError: the text is for the policy; nothing may then be executed.
    """
    if not ids or ids[-1] not in self.stop_ids:
      raise tools.ParseError('turn has no end')
    found = self._format.parse(ids, SCHEMAS).tool_calls
    if not found:
      raise tools.ParseError('no tool call that can be read')
    calls = [tools.call_of(c.name, json.loads(c.arguments)) for c in found]
    if any(isinstance(call, tools.Done) for call in calls[:-1]):
      raise tools.ParseError('call after done')
    return calls

  def text(self, ids: Sequence[int]) -> str:
    """Human-readable form, special tokens spelled out; for displays only."""
    return self._format.spelled(ids)


def _problem(task: task_lib.Task, files: Mapping[str, str]) -> str:
  names = '\n'.join(
      f'- {path}, {source.count(chr(10)) + 1} lines'
      + ', changed' * (source != task.files.get(path))
      for path, source in sorted(files.items())
  )
  return f'{task.instruction}\nFiles:\n{names}\n\nReply with tool calls.'
