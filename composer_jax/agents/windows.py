"""What context windows of an episode must be, and are told."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

import numpy as np

from composer_jax import trace


@dataclasses.dataclass(frozen=True)
class State:
  """What a window that follows a summary is told besides it.

  Attributes:
    files: path -> text, as they are now.
    turns_left: turns left in the episode.
    summaries: summaries so far.
  """

  files: Mapping[str, str]
  turns_left: int
  summaries: int


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
