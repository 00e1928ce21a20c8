"""Context windows as an episode makes them: begun, extended, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import struct

import numpy as np

from composer_jax import trace


@dataclasses.dataclass(frozen=True)
class State:
  """What a window that follows a summary is told besides it.

  Attributes:
    files: path -> text, as they are now.
    turns_left: in the episode.
    summaries: so far.
  """

  files: Mapping[str, str]
  turns_left: int
  summaries: int


def turn_seed(seed: int, turn: int) -> int:
  """Seed (32 bits) of a turn: the same whatever else is in flight."""
  content = struct.pack('<QQ', seed & (2**64 - 1), turn)
  digest = hashlib.blake2b(content, digest_size=4).digest()
  return int.from_bytes(digest, 'little')


def extend(window: trace.TokenTrace, ids: Sequence[int]) -> trace.TokenTrace:
  """Appends context tokens: not sampled, version and routes not known yet."""
  tokens = np.asarray(ids, np.int32)
  routing = window.routing
  if routing is not None:
    _, layers, k = routing.experts.shape
    dtype = routing.experts.dtype
    rows = np.full((len(tokens), layers, k), trace.blank_route(dtype), dtype)
    routing = trace.RoutingTrace(np.concatenate([routing.experts, rows]))

  def join(old, value):
    return np.concatenate([old, np.full(len(tokens), value, old.dtype)])

  return trace.TokenTrace(
      tokens=np.concatenate([window.tokens, tokens]),
      sampled=join(window.sampled, False),
      logps=join(window.logps, 0),
      versions=join(window.versions, -1),
      routing=routing,
  )


def empty() -> trace.TokenTrace:
  return trace.TokenTrace(
      tokens=np.zeros(0, np.int32),
      sampled=np.zeros(0, np.bool_),
      logps=np.zeros(0, np.float32),
      versions=np.zeros(0, np.int32),
  )


def check(before: trace.TokenTrace, after: trace.TokenTrace) -> None:
  """A policy that changes its context would train on what was not there."""
  n = len(before)
  if not (
      len(after) > n
      and np.array_equal(after.tokens[:n], before.tokens)
      and np.array_equal(after.sampled[:n], before.sampled)
      and np.array_equal(after.logps[:n], before.logps)
      and after.sampled[n:].all()
  ):
    raise ValueError(
        f'policy: window of {len(after)} tokens does not continue its context'
        f' of {n}; it must return context + sampled tokens'
    )
  if before.routing is not None:
    rows = before.routing.experts
    known = rows != trace.blank_route(rows.dtype)
    if after.routing is None or not np.array_equal(
        after.routing.experts[:n][known], rows[known]
    ):
      raise ValueError('policy: recorded routing was changed; it is immutable')
