"""Replies that must have a form: JSON of a schema, or a call of a tool.

The form is a grammar, which `llguidance` turns into the tokens that may come
next. What the model's own template writes around a call or an answer is part of
it, so that a constrained reply is one that the model might have given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
import functools
import json
import re
from typing import Any

import numpy as np

from composer_jax.serving import api_errors
from composer_jax.serving import openai_requests
from composer_jax.serving import session

_SLOT = 'argument_of_this_call'
_CONTENT = re.compile(_SLOT)
_ARGUMENTS = re.compile(rf'\{{\s*"{_SLOT}"\s*:\s*0\s*\}}')
# As `json.dumps` writes it, and templates do: no model is lost in white space.
_STYLE = {
    'whitespace_flexible': False,
    'item_separator': ', ',
    'key_separator': ': ',
}
_SCHEMA_CHARS = 65536
_NO_PARAMETERS = {'type': 'object', 'additionalProperties': False}


class Constraint:
  """`slots.Constraint` of one reply.

  Attributes:
    broken: the grammar grew beyond the bounds of `llguidance`: the reply ended
      there, as if it had been cut by its length.
  """

  broken = False

  def __init__(self, matcher: Any, stop: frozenset[int], words: int):
    self._matcher = matcher
    self._stop = stop
    self._words = words

  def allow(self, bits: np.ndarray) -> None:
    """See `slots.Constraint`."""
    known = bits[: self._words]
    if not self._matcher.is_stopped():
      self._matcher.unsafe_compute_mask_ptr(known.ctypes.data, known.nbytes)
    self.broken = self._matcher.is_error()
    # At its end, or where the grammar's bounds were reached: nothing is left
    # to be said.
    if not known.any():
      for token in self._stop:
        bits[token // 32] |= np.int32(np.uint32(1 << token % 32).view(np.int32))

  def take(self, token: int) -> None:
    """See `slots.Constraint`."""
    if not self._matcher.is_stopped():
      self._matcher.consume_token(token)


class Compiler:
  """Makes the constraints of requests to one model."""

  def __init__(self, chat: session.ChatFormat):
    self._chat = chat

  @functools.cached_property
  def _tokenizer(self) -> Any:
    import llguidance  # a second for a large vocabulary; few servers need it

    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Vocabulary(self._chat)),
        eos_token=sorted(self._chat.stop_ids),
    )

  async def constraints(
      self, ask: openai_requests.Ask
  ) -> Sequence[Constraint | None]:
    """One for each choice of a request; None where it does not ask for any.

    Raises:
      ApiError: the schema cannot be obeyed, or not in this model's format.
    """
    if ask.form is None:
      return [None] * ask.n
    return await asyncio.to_thread(self._compile, ask)

  def _compile(self, ask: openai_requests.Ask) -> list[Constraint]:
    import llguidance

    assert ask.form is not None
    try:
      chat = session.chat_of(self._chat, ask)
      grammar = _grammar(ask, ask.form, chat)
    except ValueError as e:
      raise _refusal(ask.form, str(e)) from e
    matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
    # What a matcher warns of is a part of the schema that it would not obey.
    faults = [matcher.get_error(), *matcher.get_grammar_warnings()]
    for fault in filter(None, faults):
      raise _refusal(ask.form, ' '.join(fault.split())[:300])
    words = -(-self._chat.vocab_size // 32)
    return [
        Constraint(matcher.deep_copy(), self._chat.stop_ids, words)
        for _ in range(ask.n)
    ]


class _Vocabulary:
  """A vocabulary as `llguidance` reads it."""

  def __init__(self, chat: session.ChatFormat):
    known = chat.vocabulary()
    self.eos_token_id = min(chat.stop_ids)
    self.bos_token_id = None
    # The byte 255 is in no text: what it begins is named in grammars only.
    self.tokens = [
        b'\xff[%d]' % i if piece is None else piece
        for i, piece in enumerate(known)
    ]
    self.special_token_ids = [i for i, x in enumerate(known) if x is None]
    self._encode = chat.encode

  def __call__(self, text: str) -> list[int]:
    return self._encode(text)


def _refusal(form: openai_requests.Form, why: str) -> api_errors.ApiError:
  return api_errors.ApiError(
      400, f'{form.param}: cannot be obeyed: {why}', param=form.param
  )


def _grammar(
    ask: openai_requests.Ask,
    form: openai_requests.Form,
    chat: session.ChatFormat,
) -> str:
  """The whole reply, in the Lark of `llguidance`.

  Raises:
    ValueError: a schema is too long, or the model's format has no JSON.
  """
  if form.schema is not None:
    reply = {'role': 'assistant', 'content': _SLOT}
    parts = [_part(chat.frame(reply, _CONTENT, ask.tools), form.schema)]
  else:
    parts = [_call(chat, ask, tool['function']) for tool in form.tools]
  lines = [f'part{i}: {part}' for i, part in enumerate(parts)]
  start = ' | '.join(f'part{i}' for i in range(len(parts)))
  return '\n'.join([f'start: {start}', *lines])


def _call(
    chat: session.ChatFormat,
    ask: openai_requests.Ask,
    function: Mapping[str, Any],
) -> str:
  before = sum(len(m.get('tool_calls') or ()) for m in ask.messages or ())
  call = {
      'id': f'functions.{function["name"]}:{before}',
      'type': 'function',
      'function': {'name': function['name'], 'arguments': {_SLOT: 0}},
  }
  reply = {'role': 'assistant', 'content': '', 'tool_calls': [call]}
  try:
    frame = chat.frame(reply, _ARGUMENTS, ask.tools)
  except ValueError as e:
    raise ValueError(f'{e}; the calls of this model are not JSON') from e
  return _part(frame, function.get('parameters') or _NO_PARAMETERS)


def _part(
    frame: tuple[Sequence[str | int], Sequence[str | int]],
    schema: Mapping[str, Any],
) -> str:
  text = json.dumps({**schema, 'x-guidance': _STYLE})
  if len(text) > _SCHEMA_CHARS:
    raise ValueError(
        f'schema of {len(text)} characters; must be at most {_SCHEMA_CHARS}'
    )
  before, after = (' '.join(map(_literal, side)) for side in frame)
  return f'{before} %json {text} {after}'


def _literal(piece: str | int) -> str:
  return f'<[{piece}]>' if isinstance(piece, int) else json.dumps(piece)
