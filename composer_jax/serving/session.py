"""An open rollout: its answered calls, and those that are on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
import dataclasses
import re
from typing import Any, Protocol

import numpy as np

from composer_jax import trace
from composer_jax.serving import api_errors
from composer_jax.serving import capture
from composer_jax.serving import depth
from composer_jax.serving import graph
from composer_jax.serving import openai_requests

# A key that people are served under is never closed: only the newest calls of
# it are remembered, older conversations go on from their text.
_SERVED_CALLS = 1024


class ChatFormat(Protocol):
  """Translates between conversations and token ids; see `chat.template`."""

  stop_ids: frozenset[int]
  vocab_size: int

  def with_options(self, options: Mapping[str, Any]) -> ChatFormat:
    ...

  def prompt(self, messages: Sequence[Any], tools: Sequence[Any]) -> list[int]:
    ...

  def tail(
      self,
      messages: Sequence[Any],
      tools: Sequence[Any],
      known: int,
      ended: bool,
  ) -> list[int]:
    ...

  def parse(self, ids: Sequence[int], tools: Sequence[Any] = ()) -> Any:
    ...

  def bytes_of(self, token: int) -> bytes:
    ...

  def vocabulary(self) -> list[bytes | None]:
    ...

  def frame(
      self, reply: Any, inside: re.Pattern[str], tools: Sequence[Any]
  ) -> tuple[list[str | int], list[str | int]]:
    ...

  def thought(self, ids: Sequence[int]) -> str:
    ...

  def visible(self, ids: Sequence[int]) -> str:
    ...

  def text(self, ids: Sequence[int]) -> str:
    ...

  def encode(self, text: str) -> list[int]:
    ...


@dataclasses.dataclass(eq=False)
class Work:
  """A call on its way; retries of it wait for the same one.

  Attributes:
    ask: what is wanted.
    request: its bytes.
    body: their digest.
    identity: equal in retries.
    started: set once the call is on disk, has an answer already, or failed.
    changed: set when more has been sampled, and at the end.
    sampled: ids of every choice so far, if they are streamed.
    waiters: requests that want the reply; without any it is cancelled.
    task: its result is the reply's JSON.
    head: what every event of its stream repeats; known once it has started.
  """

  ask: openai_requests.Ask
  request: bytes
  body: bytes
  identity: bytes
  started: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
  changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
  waiters: int = 0
  task: asyncio.Task[dict[str, Any]] = dataclasses.field(init=False)
  head: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    self.sampled: list[list[int]] = [[] for _ in range(self.ask.n)]


class Session:
  """What is known of a rollout.

  Attributes:
    id: id of the rollout.
    mode: 'train' or 'serve'.
    seed: seed of its calls.
    closed: admits no call.
    finish: what the client said at the end, as JSON.
    finished: set when it has.
    calls: answered ones, parents before children.
    pending: numbers of calls that are admitted, but neither answered nor
      cancelled; those that nobody works on are lost.
    next: number of the next call.
    works: calls being worked on, by what a retry of them repeats.
    tasks: tasks of all that is being worked on.
    turn: held from a look at the calls so far to the next call's number, so
      that numbers, and with them seeds, are given in the order of arrival.
  """

  def __init__(
      self,
      stored: capture.Rollout,
      calls: list[graph.Call],
      pending: set[int],
      following: int,
  ):
    self.id, self.mode, self.seed, self.closed, self.finish = stored
    self.finished = asyncio.Event()
    if self.finish is not None:
      self.finished.set()
    if self.mode == 'serve':
      calls = calls[-_SERVED_CALLS:]
    self.calls = calls
    self.pending = pending
    self.next = following
    self.works: dict[bytes, Work] = {}
    self.tasks: set[asyncio.Task] = set()
    self.turn = asyncio.Lock()
    self._keys: dict[bytes, graph.Call] = {}
    self._ends = graph.Ends()
    for call in calls:
      self._index(call)

  def add(self, call: graph.Call) -> None:
    """Takes an answered call."""
    self.calls.append(call)
    self.pending.discard(call.number)
    self._index(call)
    if self.mode == 'serve' and len(self.calls) > _SERVED_CALLS:
      oldest = self.calls.pop(0)
      self._ends.drop(oldest)
      if self._keys.get(oldest.key) is oldest:
        del self._keys[oldest.key]

  def _index(self, call: graph.Call) -> None:
    self._ends.add(call)
    if call.key:
      self._keys[call.key] = call

  async def context(
      self, ask: openai_requests.Ask, chat: ChatFormat, limit: int
  ) -> tuple[graph.Call | None, trace.TokenTrace]:
    """The prompt of a request, with the exact ids of replies that it repeats.

    Args:
      ask: the request.
      chat: renders what is not known as ids.
      limit: tokens of the longest window.

    Returns:
      (the call that it goes on from, the context).

    Raises:
      ApiError: the template refuses the conversation, or it is too long.
    """
    said, known = self._known(ask)
    ids = await encoded(ask, chat, said, known)
    if not 0 < len(ids) < limit:
      raise api_errors.ApiError(
          400,
          f'prompt: {len(ids)} tokens; must be in [1, {limit - 1}], as the'
          f' context holds {limit}',
          param='prompt' if ask.messages is None else 'messages',
          code='context_length_exceeded' if ids else None,
      )
    parent = self._ends.find(np.asarray(ids, np.int32))
    return parent, graph.extend(parent, ids[len(parent) if parent else 0 :])

  def _known(self, ask: openai_requests.Ask) -> tuple[list[int], int]:
    """The ids of the messages that end in a known reply, and their number."""
    keys = graph.message_keys(ask.messages or (), ask.setting)
    for known in range(len(keys), 0, -1):
      if call := self._keys.get(keys[known - 1]):
        return graph.window(call).tokens.tolist(), known
    return [], 0


def chat_of(chat: ChatFormat, ask: openai_requests.Ask) -> ChatFormat:
  """The chat format of a request, with the variables of its template.

  Raises:
    ApiError: they are not for a request to set.
  """
  try:
    return chat.with_options(ask.template_kwargs)
  except ValueError as e:
    name = 'chat_template_kwargs'
    raise api_errors.ApiError(400, f'{name}: {e}', param=name) from e


async def encoded(
    ask: openai_requests.Ask,
    chat: ChatFormat,
    said: Sequence[int] = (),
    known: int = 0,
) -> Sequence[int]:
  """The ids of a prompt; on a thread, as others must not wait for long ones.

  Args:
    ask: the request.
    chat: encodes.
    said: ids of the first `known` messages, the last of which is a reply.
    known: messages whose ids are known.

  Raises:
    ApiError: the template refuses the conversation.
  """

  def ids() -> Sequence[int]:
    if ask.messages is None:
      text = ask.prompt
      return chat.encode(text) if isinstance(text, str) else text
    if not known:
      return chat.prompt(ask.messages, ask.tools)
    ended = said[-1] in chat.stop_ids
    return [*said, *chat.tail(ask.messages, ask.tools, known, ended)]

  try:
    return await asyncio.to_thread(ids)
  except RecursionError as e:  # arguments that are JSON in a text
    raise api_errors.ApiError(400, f'messages: {depth.ERROR}') from e
  except ValueError as e:
    raise api_errors.ApiError(400, str(e)) from e
