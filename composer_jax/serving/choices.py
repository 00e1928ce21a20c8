"""What a client is shown of sampled ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from composer_jax import trace
from composer_jax.serving import graph
from composer_jax.serving import openai_replies
from composer_jax.serving import openai_requests
from composer_jax.serving import session


def choice(
    ask: openai_requests.Ask,
    chat: session.ChatFormat,
    window: trace.TokenTrace,
    at: int,
    name: str,
    *,
    whole: bool = True,
) -> tuple[dict[str, Any], trace.TokenTrace, bytes | None]:
  """One choice of a reply.

  Args:
    ask: the request.
    chat: reads the ids.
    window: window of the choice.
    at: where sampling began.
    name: name of the choice; ids of tool calls begin with it.
    whole: False if sampling could not go on to the end.

  Returns:
    (its JSON, the window up to the token that completed a stop string, key of
    the conversation that it ends, see `graph.Call`).
  """
  ids = window.tokens[at:].tolist()
  cut = _stopped(ask.stop, chat, ids)
  if cut:
    ids, window = ids[:cut], graph.truncate(window, at + cut)
  ended = bool(cut) or (whole and ids[-1] in chat.stop_ids)
  pieces = [chat.bytes_of(i) for i in ids] if ask.logprobs else []
  shown = before(chat.text(ids), ask.stop)
  out = {
      'finish_reason': 'stop' if ended else 'length',
      'logprobs': openai_replies.logprobs(
          ask, pieces, window.logps[at:].tolist(), shown
      ),
      **openai_replies.extras(ask, window, at),
  }
  if ask.messages is None:
    return out | {'text': shown}, window, None
  said = chat.parse(ids, ask.tools)
  content = said.content
  message: dict[str, Any] = {
      'role': 'assistant',
      'content': content and before(content, ask.stop),
  }
  if said.reasoning is not None:
    message['reasoning_content'] = said.reasoning
  if said.tool_calls:
    out['finish_reason'] = 'tool_calls' if ended else 'length'
    message['tool_calls'] = [
        {
            'id': call.id or f'call-{name}-{i}',
            'type': 'function',
            'function': {
                'name': call.name,
                # A lone surrogate is no text, but its escape is JSON.
                'arguments': call.arguments.encode(
                    errors='backslashreplace'
                ).decode(),
            },
        }
        for i, call in enumerate(said.tool_calls)
        if ask.parallel or not i
    ]
  # A client that sends a text cut short means that text, not these ids.
  hidden = not ask.parallel and len(said.tool_calls) > 1
  key = None
  if not cut and not hidden:
    key = graph.message_keys([*ask.messages, message], ask.setting)[-1]
  return out | {'message': message}, window, key


def _stopped(
    stop: Sequence[str], chat: session.ChatFormat, ids: Sequence[int]
) -> int:
  """How many ids it takes to complete a stop string; 0 if none is there."""

  def found(count: int) -> bool:
    text = chat.text(ids[:count])
    return any(s in text for s in stop)

  if not found(len(ids)):
    return 0
  low, high = 0, len(ids)
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (low, middle) if found(middle) else (middle, high)
  return high


def before(text: str, stop: Sequence[str]) -> str:
  """The text in front of the first stop string."""
  return text[: min((text.find(s) for s in stop if s in text), default=None)]


def certain(
    ask: openai_requests.Ask, chat: session.ChatFormat, ids: Sequence[int]
) -> dict[str, str]:
  """What a client may see of unfinished ids, by name; it only ever grows.

  No part of a character, of a tool call or of a stop string is in it.
  """
  if ask.messages is None:
    return {'text': _unstopped(ask, chat.text(ids).rstrip('\ufffd'))}
  return {
      'reasoning_content': chat.thought(ids),
      'content': _unstopped(ask, chat.visible(ids)),
  }


def _unstopped(ask: openai_requests.Ask, text: str) -> str:
  text = before(text, ask.stop)
  sizes = [
      n for s in ask.stop for n in range(1, len(s)) if text.endswith(s[:n])
  ]
  return text[: len(text) - max(sizes, default=0)]
