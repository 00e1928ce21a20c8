"""Replies of the OpenAI API as JSON objects: whole ones, and their events."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_jax import trace
from composer_jax.serving import openai_requests

Ask = openai_requests.Ask


def usage(prompt_tokens: int, sampled: int) -> dict[str, int]:
  """How many tokens a reply cost."""
  return {
      'prompt_tokens': prompt_tokens,
      'completion_tokens': sampled,
      'total_tokens': prompt_tokens + sampled,
  }


def extras(
    ask: Ask, window: trace.TokenTrace, prompt_tokens: int
) -> dict[str, Any]:
  """What a choice holds beyond the API, as far as it was asked for."""
  out: dict[str, Any] = {}
  if ask.return_token_ids:
    out['prompt_token_ids'] = window.tokens[:prompt_tokens].tolist()
    out['token_ids'] = window.tokens[prompt_tokens:].tolist()
  if ask.return_routed_experts and window.routing is not None:
    rows = window.routing.experts[ask.routed_experts_start_len :]
    out['routed_experts'] = {
        'data': base64.b64encode(rows.tobytes()).decode(),
        'dtype': str(rows.dtype),
        'shape': list(rows.shape),
    }
  out['weights_version'] = int(window.versions[-1])
  return out


def logprobs(
    ask: Ask, texts: Sequence[str], logps: Sequence[float]
) -> dict[str, Any] | None:
  """Log-probs of the sampled tokens, in the form of the request's API."""
  if not ask.logprobs:
    return None
  if ask.messages is None:
    ends = [0]
    for text in texts:
      ends.append(ends[-1] + len(text))
    return {
        'tokens': list(texts),
        'token_logprobs': list(logps),
        'top_logprobs': None,
        'text_offset': ends[:-1],
    }
  content = [
      {
          'token': text,
          'logprob': logp,
          'bytes': list(text.encode()),
          'top_logprobs': [],
      }
      for text, logp in zip(texts, logps, strict=True)
  ]
  return {'content': content, 'refusal': None}


def chunk(
    reply: Mapping[str, Any], index: int, delta: Mapping[str, Any], **end: Any
) -> dict[str, Any]:
  """One event of a stream.

  Args:
    reply: head of every event: id, object, created and model.
    index: number of the choice.
    delta: part of a chat's message, or the `text` of a completion.
    **end: what a choice's last event holds.
  """
  head = {k: reply[k] for k in ('id', 'object', 'created', 'model')}
  choice: dict[str, Any] = {'index': index, 'finish_reason': None}
  if head['object'] == 'chat.completion':
    head['object'] = 'chat.completion.chunk'
    choice |= {'delta': delta}
  else:
    choice |= {'text': '', **delta}
  return {**head, 'choices': [choice | end]}


def rest(
    ask: Ask, reply: Mapping[str, Any], sent: Sequence[str]
) -> Iterator[dict[str, Any]]:
  """The events of a whole reply, without the text that was sent already."""
  for choice, known in zip(reply['choices'], sent, strict=True):
    index = choice['index']
    own = ('index', 'message', 'text')
    end = {k: v for k, v in choice.items() if k not in own}
    if ask.messages is None:
      text = choice['text'][len(known) :]
      yield chunk(reply, index, {'text': text}, **end)
      continue
    message = choice['message']
    if text := (message['content'] or '')[len(known) :]:
      yield chunk(reply, index, {'content': text})
    if thought := message.get('reasoning_content'):
      yield chunk(reply, index, {'reasoning_content': thought})
    for i, call in enumerate(message.get('tool_calls') or ()):
      yield chunk(reply, index, {'tool_calls': [{'index': i, **call}]})
    yield chunk(reply, index, {}, **end)
  if ask.include_usage:
    head = {k: reply[k] for k in ('id', 'created', 'model')}
    kind = {'object': reply['object'].removesuffix('.chunk')}
    if ask.messages is not None:
      kind['object'] += '.chunk'
    yield {**head, **kind, 'choices': [], 'usage': reply['usage']}
