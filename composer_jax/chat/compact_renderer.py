"""Token ids of tasks and tool calls, and back; and the tokenizer behind it.

Structure is special tokens, content is byte-level BPE. The harness hands the
sampled ids back unchanged, so nothing the policy wrote is ever re-encoded;
`parse` decodes the content pieces only in order to execute them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import itertools

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

from composer_jax import task as task_lib
from composer_jax.agents import tools
from composer_jax.agents import windows

MAX_LINES = 16
PAD, BOS, TASK, CASE, OBS, ACT = (
    f'<|{name}|>' for name in ('pad', 'bos', 'task', 'case', 'obs', 'act')
)
EDIT, TO, RUN, DONE, END = (
    f'<|{name}|>' for name in ('edit', 'to', 'run', 'done', 'end')
)
_LINES = tuple(f'<|{k}|>' for k in range(MAX_LINES))
SPECIAL_TOKENS = (PAD, BOS, TASK, CASE, OBS, ACT, EDIT, TO, RUN, DONE, END)
SPECIAL_TOKENS += _LINES

# What edits are made of. Each has to be one token, whatever the corpus says.
OPERATORS = (
    *('+=', '-=', '*=', '//=', '/=', '%=', '==', '!=', '<=', '>='),
    *('//', '**', '->', '[0]', '[1]', '[-1]', '):'),
)
# Entries of every tokenizer: what a fit starts from, and room for operators.
LEAST_VOCAB = len(SPECIAL_TOKENS) + 256 + 2 * len(OPERATORS)
_PIECES = (
    r' ?[A-Za-z_]+',  # identifiers and words with the space before them
    r'\[-?\d\]',  # constant index
    r'(?<=[\[(,=])-\d',  # sign of a literal, unlike the operator
    r'\d',
    r'//=|\*\*=|<<=|>>=|[-+*/%&|^@<>=!]=|//|\*\*|<<|>>|->',
    r'\n *',  # indentation
    r' +',
    r'[()\[\]{},:.]+',
    r'\s|\S',
)


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
  """Cuts text where a merge must never cross: operators, digits, names."""
  pattern = tokenizers.Regex('|'.join(_PIECES))
  return pre_tokenizers.Sequence(
      [
          pre_tokenizers.Split(pattern, 'isolated'),
          pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
      ]
  )


def train_tokenizer(texts: Iterable[str], vocab: int) -> tokenizers.Tokenizer:
  """Fits a byte-level BPE that encodes any text without loss.

  Args:
    texts: samples of what will be encoded: code and task texts.
    vocab: entries in all: specials, 256 bytes, merges.

  Returns:
    The tokenizer; special tokens have the ids 0, 1, ... of `SPECIAL_TOKENS`.

  Raises:
    ValueError: `vocab` leaves no room for the operators.
  """
  if vocab < LEAST_VOCAB:
    raise ValueError(f'vocab={vocab}: must be at least {LEAST_VOCAB}')
  # Frequent enough to be merged early, however rare in the texts.
  drill: Iterator[str] = itertools.repeat(' '.join(OPERATORS * 20), 2000)
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizer()
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
      vocab_size=vocab,
      special_tokens=list(SPECIAL_TOKENS),
      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False,
  )
  tokenizer.train_from_iterator(itertools.chain(texts, drill), trainer)
  return tokenizer


class CompactRenderer:
  """Renders a task in as few tokens as its content allows.

  A prompt is `<|bos|><|task|>` then every line after its number, then
  `<|case|>` and the instruction, then `<|act|>`. A turn is
  `<|edit|><|3|>+=<|to|>-=<|done|><|end|>`: one or more calls, then the end.
  """

  def __init__(self, tokenizer: tokenizers.Tokenizer):
    # A source or a tool output that spells a special token must not become
    # one: it could end a turn or forge an observation.
    tokenizer.encode_special_tokens = True
    self._tokenizer = tokenizer
    ids = {s: tokenizer.token_to_id(s) for s in SPECIAL_TOKENS}
    missing = [s for s, i in ids.items() if i is None]
    if missing:
      raise ValueError(
          f'tokenizer: lacks {missing}; train it with train_tokenizer'
      )
    self._ids = ids
    self._special = {i: s for s, i in ids.items()}
    self.stop_ids = frozenset([ids[END]])

  def _encode(self, text: str) -> list[int]:
    text = tools.legible(text)
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def _decode(self, ids: Sequence[int]) -> str:
    return self._tokenizer.decode(list(ids), skip_special_tokens=False)

  def encode_task(self, task: task_lib.Task) -> list[int]:
    """Returns the prompt.

    Raises:
      ValueError: more lines than line markers.
    """
    (source,) = task.files.values()
    count = len(source.split('\n'))
    if count > MAX_LINES:
      raise ValueError(
          f'{task.id}: {count} lines; CompactRenderer takes {MAX_LINES}'
      )
    return [*self._encode_problem(task, source), self._ids[ACT]]

  def _encode_problem(self, task: task_lib.Task, source: str) -> list[int]:
    """Lines of a source as far as they can be numbered, and the instruction."""
    ids = [self._ids[BOS], self._ids[TASK]]
    for mark, line in zip(_LINES, source.split('\n'), strict=False):
      ids += [self._ids[mark], *self._encode(line)]
    if task.instruction:
      ids += [self._ids[CASE], *self._encode(task.instruction)]
    return ids

  def encode_summary_query(self) -> list[int]:
    """Returns what asks for a summary: no text can be mistaken for it."""
    return [self._ids[OBS], self._ids[TASK], self._ids[ACT]]

  def encode_resumed(
      self, task: task_lib.Task, summary: Sequence[int], state: windows.State
  ) -> list[int]:
    """Returns the start of another window.

    `<|obs|>`, the summary, `<|task|>` and both counts stand between the problem
    with its file as it is now and `<|act|>`.
    """
    (source,) = state.files.values()
    counts = self._encode(f'{state.summaries} {state.turns_left}')
    return [
        *self._encode_problem(task, source),
        self._ids[OBS],
        *summary,
        self._ids[TASK],
        *counts,
        self._ids[ACT],
    ]

  def encode_observation(self, text: str) -> list[int]:
    """Returns what follows a turn that did not end the episode."""
    return [self._ids[OBS], *self._encode(text), self._ids[ACT]]

  def encode_turn(self, calls: Sequence[tools.ToolCall]) -> list[int]:
    """Returns a turn as a policy would write it; for demonstrations."""
    ids = []
    for call in calls:
      match call:
        case tools.Edit(line, old, new):
          ids += [self._ids[EDIT], self._ids[_LINES[line]], *self._encode(old)]
          ids += [self._ids[TO], *self._encode(new)]
        case tools.Run():
          ids.append(self._ids[RUN])
        case tools.Done():
          ids.append(self._ids[DONE])
    return [*ids, self._ids[END]]

  def encode_summary(self, text: str) -> list[int]:
    """Returns a summary as a policy would write it; for demonstrations."""
    return [*self._encode(text), self._ids[END]]

  def parse(self, ids: Sequence[int]) -> list[tools.ToolCall]:
    """Reads a sampled turn.

    Raises:
      ParseError: the text is for the policy; nothing may then be executed.
    """
    if not ids or ids[-1] != self._ids[END]:
      raise tools.ParseError('turn has no end')
    calls: list[tools.ToolCall] = []
    pieces = list(ids[:-1])
    while pieces:
      if calls and isinstance(calls[-1], tools.Done):
        raise tools.ParseError('call after done')
      name = self._special.get(pieces.pop(0))
      if name == RUN:
        calls.append(tools.Run())
      elif name == DONE:
        calls.append(tools.Done())
      elif name == EDIT:
        mark = self._special.get(pieces.pop(0)) if pieces else None
        if mark not in _LINES:
          raise tools.ParseError('edit needs a line')
        old = self._take(pieces)
        if not old or not pieces or pieces.pop(0) != self._ids[TO]:
          raise tools.ParseError('edit needs old and new')
        new = self._take(pieces)
        calls.append(tools.Edit(_LINES.index(mark), old, new))
      else:
        raise tools.ParseError('no tool call')
    if not calls:
      raise tools.ParseError('no tool call')
    return calls

  def _take(self, pieces: list[int]) -> str:
    """Removes the leading run of ordinary tokens; returns its text."""
    text = list(itertools.takewhile(lambda i: i not in self._special, pieces))
    del pieces[: len(text)]
    return self._decode(text)

  def text(self, ids: Sequence[int]) -> str:
    """Human-readable form, special tokens spelled out; for displays only."""
    groups = itertools.groupby(ids, key=lambda i: i in self._special)
    return ''.join(
        ''.join(self._special[i] for i in run) if special else self._decode(run)
        for special, run in ((s, list(r)) for s, r in groups)
    )
