"""The calls of a rollout as a graph of exact tokens.

A call that goes on from an earlier one begins with every token the earlier one
saw or sampled. Each call keeps the rows that are its own, so neither memory nor
disk grows with the square of a conversation. Pure functions; numpy only.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import hashlib
import json
from typing import Any

import numpy as np

from composer_jax import trace
from composer_jax.serving import depth

_FIELDS = ('tokens', 'sampled', 'logps', 'versions')


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
  """One answered call.

  Attributes:
    number: unique in its rollout; a parent's is lower.
    parent: the call whose window this one's begins with.
    start: index in the window of the first of `rows`: the parent's last token,
      whose route is known only now that it has been an input.
    rows: the window from `start` on.
    prompt_tokens: index in the window of the first token it sampled.
    key: `message_keys` of the conversation with its reply; None if a client
      that sends the reply back does not mean these tokens.
    digests: digests of the weight versions in `rows`.
  """

  number: int
  parent: Call | None
  start: int
  rows: trace.TokenTrace
  prompt_tokens: int
  key: bytes | None
  digests: Mapping[int, str]

  def __len__(self) -> int:
    return self.start + len(self.rows)


def message_keys(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> list[bytes]:
  """Identities of the first 1, 2, ... messages of a conversation.

  They depend on the tools on offer and, per message, on role, text, tool calls
  (name and parsed arguments) and tool_call_id: what clients keep of a reply.
  """
  key, keys = digest(b'', list(tools)), []
  for message in messages:
    calls = [call['function'] for call in message.get('tool_calls') or ()]
    content = [
        message['role'],
        message.get('content') or '',
        [(call['name'], parsed(call['arguments'])) for call in calls],
        message.get('tool_call_id'),
    ]
    key = digest(key, content)
    keys.append(key)
  return keys


def digest(before: bytes, value: Any) -> bytes:
  """Identity of a JSON value after what came before."""
  text = json.dumps(value, sort_keys=True)
  return hashlib.sha256(before + text.encode()).digest()


def parsed(arguments: Any) -> Any:
  """The value of JSON text; the text, if it is none or nests too deeply."""
  try:
    value = json.loads(arguments)
  except (TypeError, ValueError, RecursionError):
    return arguments
  return arguments if depth.too_deep(value) else value


def child(
    parent: Call | None,
    number: int,
    window: trace.TokenTrace,
    prompt_tokens: int,
    key: bytes | None,
    digests: Mapping[int, str],
) -> Call:
  """The call that sampled window[prompt_tokens:] on top of its parent's."""
  start = len(parent) - 1 if parent else 0
  rows = _cut(window, start, len(window))
  used = {int(v) for v in rows.versions}
  digests = {step: digests[step] for step in sorted(used)}
  return Call(number, parent, start, rows, prompt_tokens, key, digests)


class Ends:
  """Finds the call that a prompt goes on from, however many there are."""

  def __init__(self):
    self._calls: dict[bytes, Call] = {}
    self._lengths: collections.Counter[int] = collections.Counter()

  def add(self, call: Call) -> None:
    """Takes a call; of two with the same window the newer one is found."""
    key = _hash(call).digest()
    if key not in self._calls:
      self._lengths[len(call)] += 1
    self._calls[key] = call

  def drop(self, call: Call) -> None:
    """Forgets a call."""
    key = _hash(call).digest()
    if self._calls.get(key) is call:
      del self._calls[key]
      self._lengths -= collections.Counter([len(call)])

  def find(self, tokens: np.ndarray) -> Call | None:
    """The call with the longest window that i32 [T] `tokens` begin with."""
    best, at, state = None, 0, hashlib.sha256()
    for end in sorted(n for n in self._lengths if n <= len(tokens)):
      state.update(tokens[at:end].tobytes())
      best, at = self._calls.get(state.digest(), best), end
    return best


def _hash(call: Call):
  return hashlib.sha256(window(call).tokens.tobytes())


def path(call: Call) -> list[Call]:
  """The call's ancestors from the root on, then itself."""
  out: list[Call] = []
  at: Call | None = call
  while at is not None:
    out.append(at)
    at = at.parent
  return out[::-1]


def window(call: Call) -> trace.TokenTrace:
  """All that the call saw and sampled."""
  nodes = path(call)
  ends = [node.start for node in nodes[1:]] + [len(call)]
  pieces = [
      _cut(node.rows, 0, end - node.start)
      for node, end in zip(nodes, ends, strict=True)
  ]
  return _join(pieces)


def extend(parent: Call | None, tokens: Sequence[int]) -> trace.TokenTrace:
  """The parent's window, then context tokens of which nothing is known yet."""
  return trace.extend(window(parent) if parent else trace.empty(), tokens)


def segments(calls: Sequence[Call]) -> tuple[trace.TokenTrace, ...]:
  """What to train on: one window per path from a root to a leaf.

  A token that several paths share is `sampled` in the first one only, so every
  token that the policy drew is trained exactly once.

  Args:
    calls: all of a rollout, in order of number.
  """
  inner = {call.parent for call in calls}
  claimed: set[Call] = set()
  return tuple(_claim(call, claimed) for call in calls if call not in inner)


def _claim(leaf: Call, claimed: set[Call]) -> trace.TokenTrace:
  whole = window(leaf)
  sampled = np.zeros(len(whole), np.bool_)
  for node in path(leaf):
    if node not in claimed:
      claimed.add(node)
      own = slice(node.prompt_tokens, len(node))
      sampled[own] = whole.sampled[own]  # not what was drawn otherwise
  logps = np.where(sampled, whole.logps, np.float32(0))
  return dataclasses.replace(whole, sampled=sampled, logps=logps)


def truncate(whole: trace.TokenTrace, length: int) -> trace.TokenTrace:
  """The first tokens of a window, as if sampling had ended there."""
  out = _cut(whole, 0, length)
  if out.routing is None:
    return out
  experts = out.routing.experts.copy()
  experts[-1] = trace.blank_route(experts.dtype)  # never an input
  return dataclasses.replace(out, routing=trace.RoutingTrace(experts))


def _cut(whole: trace.TokenTrace, start: int, stop: int) -> trace.TokenTrace:
  routing = whole.routing
  return trace.TokenTrace(
      *(getattr(whole, field)[start:stop] for field in _FIELDS),
      routing=routing and trace.RoutingTrace(routing.experts[start:stop]),
  )


def _join(pieces: Sequence[trace.TokenTrace]) -> trace.TokenTrace:
  if len(pieces) == 1:
    return pieces[0]
  routings = [piece.routing for piece in pieces]
  routing = None
  if all(routings):
    experts = np.concatenate([r.experts for r in _present(routings)])
    routing = trace.RoutingTrace(experts)
  return trace.TokenTrace(
      *(
          np.concatenate([getattr(piece, field) for piece in pieces])
          for field in _FIELDS
      ),
      routing=routing,
  )


def _present(
    routings: Sequence[trace.RoutingTrace | None],
) -> Iterator[trace.RoutingTrace]:
  return (r for r in routings if r is not None)
