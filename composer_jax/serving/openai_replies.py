"""Replies of the OpenAI API as JSON objects: whole ones, and their events."""

from __future__ import annotations

import base64
import codecs
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
    ask: Ask, pieces: Sequence[bytes], logps: Sequence[float], text: str
) -> dict[str, Any] | None:
  """Log-probs of the sampled tokens, in the form of the request's API.

  Args:
    ask: the request.
    pieces: bytes of the tokens, which may be parts of characters.
    logps: their log-probs.
    text: what the client is shown; tokens behind its end are empty there.
  """
  if not ask.logprobs:
    return None
  if ask.messages is None:
    ends = [min(end, len(text)) for end in _ends(pieces)]
    starts = [0, *ends[:-1]]
    return {
        'tokens': [text[a:b] for a, b in zip(starts, ends, strict=True)],
        'token_logprobs': list(logps),
        'top_logprobs': None,
        'text_offset': starts,
    }
  content = [
      {
          'token': piece.decode(errors='replace'),
          'logprob': logp,
          'bytes': list(piece),
          'top_logprobs': [],
      }
      for piece, logp in zip(pieces, logps, strict=True)
  ]
  return {'content': content, 'refusal': None}


def _ends(pieces: Sequence[bytes]) -> Iterator[int]:
  """Characters that are complete after each piece; all, after the last."""
  decoder, end = codecs.getincrementaldecoder('utf-8')('replace'), 0
  for i, piece in enumerate(pieces, 1):
    end += len(decoder.decode(piece, final=i == len(pieces)))
    yield end


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
    ask: Ask, reply: Mapping[str, Any], sent: Sequence[Mapping[str, str]]
) -> Iterator[dict[str, Any]]:
  """The events of a whole reply, without what was sent already.

  Args:
    ask: the request.
    reply: the whole reply.
    sent: text that was sent of each choice, by name (see `choices.certain`).
  """
  for choice, known in zip(reply['choices'], sent, strict=True):
    index = choice['index']
    own = ('index', 'message', 'text')
    end = {k: v for k, v in choice.items() if k not in own}
    if ask.messages is None:
      text = choice['text'][len(known.get('text', '')) :]
      yield chunk(reply, index, {'text': text}, **end)
      continue
    message = choice['message']
    for name in ('reasoning_content', 'content'):  # as they were sampled
      if text := (message.get(name) or '')[len(known.get(name, '')) :]:
        yield chunk(reply, index, {name: text})
    for i, call in enumerate(message.get('tool_calls') or ()):
      yield chunk(reply, index, {'tool_calls': [{'index': i, **call}]})
    yield chunk(reply, index, {}, **end)
  if ask.include_usage:
    head = {k: reply[k] for k in ('id', 'created', 'model')}
    kind = {'object': reply['object'].removesuffix('.chunk')}
    if ask.messages is not None:
      kind['object'] += '.chunk'
    yield {**head, **kind, 'choices': [], 'usage': reply['usage']}
