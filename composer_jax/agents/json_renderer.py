"""Repository tasks for a model that reads and writes text.

A turn is a line of JSON per tool call. As with `renderer`, only special tokens
mark structure, and what was sampled is never encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import json

import tokenizers

from composer_jax.agents import renderer
from composer_jax.agents import tasks
from composer_jax.agents import tools
from composer_jax.agents import windows

TOOLS: Mapping[str, type] = {
    'read': tools.Read,
    'search': tools.Search,
    'replace': tools.Replace,
    'ask': tools.Ask,
    'run': tools.Run,
    'done': tools.Done,
}
_NAMES = {kind: name for name, kind in TOOLS.items()}
_HELP = """\
Reply with tool calls only, one JSON object a line.
{"tool": "read", "path": P, "first": 1, "last": 200} shows lines of a file.
{"tool": "search", "text": T} shows the lines that contain T.
{"tool": "replace", "path": P, "old": T, "new": T} changes a text that occurs \
once; with "old": "" it makes a file.
{"tool": "run"} runs tests.
{"tool": "ask", "text": T} asks the user.
{"tool": "done"} hands in the files as they are.
"""
_SUMMARY_QUERY = (
    'The context is nearly full. Reply with a summary, not with tool calls:'
    ' what you have found out, what you have changed, what remains to be done.'
    ' You will go on with the task and this summary only.'
)
_RESUMED = 'You have worked on this before. Your summary:'


def call_of(line: str) -> tools.ToolCall:
  """Reads one tool call.

  Raises:
    ParseError: with a text for the policy.
  """
  try:
    fields = json.loads(line)
  except (ValueError, RecursionError) as e:
    raise tools.ParseError(f'no JSON: {e}') from e
  name = fields.pop('tool', None) if isinstance(fields, dict) else None
  if not isinstance(name, str) or name not in TOOLS:
    raise tools.ParseError(f'"tool" must be one of {", ".join(TOOLS)}')
  kind = TOOLS[name]
  known = {f.name: f for f in dataclasses.fields(kind)}
  for name, value in fields.items():
    if name not in known:
      raise tools.ParseError(f'unknown argument "{name}"')
    want = int if known[name].type == 'int' else str
    if type(value) is not want:
      raise tools.ParseError(f'"{name}" must be {want.__name__}')
  try:
    return kind(**fields)
  except TypeError as e:
    raise tools.ParseError('an argument is missing') from e


def line_of(call: tools.ToolCall) -> str:
  return json.dumps({'tool': _NAMES[type(call)], **vars(call)})


class JsonRenderer:
  """Between tasks, JSON tool calls and token ids."""

  def __init__(self, tokenizer: tokenizers.Tokenizer):
    # What spells a special token in a file or an output must not become one.
    tokenizer.encode_special_tokens = True
    self._tokenizer = tokenizer
    self._ids = {s: tokenizer.token_to_id(s) for s in renderer.SPECIAL_TOKENS}
    self.pad_id = self._ids[renderer.PAD]
    self.stop_ids = frozenset([self._ids[renderer.END]])

  def _encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def encode_task(self, task: tasks.Task) -> list[int]:
    """Instruction, names of the files, tools; the files are to be read."""
    return [*self._encode_problem(task, task.files), self._ids[renderer.ACT]]

  def _encode_problem(
      self, task: tasks.Task, files: Mapping[str, str]
  ) -> list[int]:
    names = '\n'.join(
        f'- {path}, {source.count(chr(10)) + 1} lines'
        + ', changed' * (source != task.files.get(path))
        for path, source in sorted(files.items())
    )
    text = f'{task.instruction}\nFiles:\n{names}\n\n{_HELP}'
    start = [self._ids[renderer.BOS], self._ids[renderer.TASK]]
    return [*start, *self._encode(text)]

  def encode_summary_query(self) -> list[int]:
    """What asks for a summary."""
    return self.encode_observation(_SUMMARY_QUERY)

  def encode_resumed(
      self, task: tasks.Task, summary: Sequence[int], state: windows.State
  ) -> list[int]:
    """Problem, changed files by name, summary and counts."""
    counts = f'Summaries so far: {state.summaries}. Turns left:'
    return [
        *self._encode_problem(task, state.files),
        self._ids[renderer.OBS],
        *self._encode(f'{_RESUMED}\n'),
        *summary,
        *self._encode(f'\n{counts} {state.turns_left}.'),
        self._ids[renderer.ACT],
    ]

  def encode_observation(self, text: str) -> list[int]:
    """What follows a turn that did not end the episode."""
    ids = self._encode(text)
    return [self._ids[renderer.OBS], *ids, self._ids[renderer.ACT]]

  def encode_turn(self, calls: Sequence[tools.ToolCall]) -> list[int]:
    """A turn as a policy would write it; for demonstrations."""
    text = '\n'.join(map(line_of, calls))
    return [*self._encode(text), self._ids[renderer.END]]

  def parse(self, ids: Sequence[int]) -> list[tools.ToolCall]:
    """Reads a sampled turn.

    Raises:
      ParseError: with a text for the policy; nothing may then be executed.
    """
    *content, end = ids or [None]
    if end not in self.stop_ids:
      raise tools.ParseError('turn has no end')
    if set(content) & set(self._ids.values()):
      raise tools.ParseError('special token inside a turn')
    text = self._tokenizer.decode(content, skip_special_tokens=False)
    calls = [call_of(line) for line in text.split('\n') if line.strip()]
    if not calls:
      raise tools.ParseError('no tool call')
    if any(isinstance(call, tools.Done) for call in calls[:-1]):
      raise tools.ParseError('call after done')
    return calls
