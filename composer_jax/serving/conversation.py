"""A conversation with the engine, for a person at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import queue
from typing import Any

import numpy as np

from composer_jax import trace
from composer_jax.chat import template
from composer_jax.chat import tool_calls
from composer_jax.rollout import engine as engine_lib
from composer_jax.serving import graph

_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How replies are drawn.

  Attributes:
    temperature: 0 for the most likely token.
    seed: u32 seed of the first reply.
    max_tokens: longest reply.
  """

  temperature: float = 1.0
  seed: int = 0
  max_tokens: int = 512


def sample(
    engine: engine_lib.Engine,
    context: trace.TokenTrace,
    stop: frozenset[int],
    sampling: Sampling,
    shown: Callable[[list[int]], None],
) -> trace.TokenTrace:
  """Samples one reply; leaving by an exception gives its slot back.

  Args:
    engine: engine that answers.
    context: window to go on from.
    stop: ids that end the reply.
    sampling: how the reply is drawn.
    shown: called with all ids so far, whenever there are more.

  Returns:
    The whole window.

  Raises:
    ValueError: the context does not fit.
  """
  blocks: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
  future = engine.submit(
      engine_lib.Request(
          context,
          sampling.max_tokens,
          stop,
          sampling.seed,
          sampling.temperature,
          on_tokens=blocks.put,
      )
  )
  future.add_done_callback(lambda _: blocks.put(None))
  ids: list[int] = []
  try:
    while (block := _next(blocks)) is not None:
      ids += block.tolist()
      shown(ids)
    return future.result()
  finally:
    future.cancel()


def _next(blocks: queue.SimpleQueue) -> np.ndarray | None:
  while True:  # a wait without a limit would not hear of Ctrl-C
    try:
      return blocks.get(timeout=_POLL_SECONDS)
    except queue.Empty:
      pass


class Conversation:
  """Messages, and the exact ids of all that was said.

  Attributes:
    messages: messages so far.
    window: what the last reply has left behind.
  """

  def __init__(self, engine: engine_lib.Engine, form: template.ChatFormat):
    self._engine, self._form = engine, form
    self.messages: list[Mapping[str, Any]] = []
    self.window: trace.TokenTrace | None = None
    self._last: graph.Call | None = None

  def say(
      self, text: str, sampling: Sampling, shown: Callable[[str], None]
  ) -> tuple[tool_calls.Reply, int]:
    """Sends a message and waits for the reply.

    Nothing changes if it does not come.

    Args:
      text: text of the message.
      sampling: how the reply is drawn.
      shown: called with more of its content.

    Returns:
      (reply, number of its tokens).

    Raises:
      ValueError: the conversation does not fit into the window any more.
    """
    messages = [*self.messages, {'role': 'user', 'content': text}]
    context = graph.extend(self._last, self._ids(messages))
    length = 0

    def more(ids: Sequence[int]) -> None:
      nonlocal length
      seen = self._form.visible(ids)
      if len(seen) > length:
        shown(seen[length:])
        length = len(seen)

    stop = self._form.stop_ids
    window = sample(self._engine, context, stop, sampling, more)
    ids = window.tokens[len(context) :].tolist()
    reply = self._form.parse(ids)
    if rest := (reply.content or '')[length:]:
      shown(rest)
    said = {'role': 'assistant', 'content': reply.content or ''}
    self._last = graph.child(
        self._last,
        len(self.messages),
        window,
        len(context),
        None,
        self._engine.digests,
    )
    self.messages, self.window = [*messages, said], window
    return reply, len(ids)

  def _ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """What to append to the window of the last reply."""
    if self._last is None:
      return self._form.prompt(messages)
    ended = int(self._last.rows.tokens[-1]) in self._form.stop_ids
    return self._form.tail(messages, (), len(messages) - 1, ended)

  def system(self, text: str) -> None:
    """Begins anew, with instructions if there is a text."""
    self.messages = [{'role': 'system', 'content': text}] if text else []
    self.window = self._last = None
