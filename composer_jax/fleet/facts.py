"""What a dispatcher knows of a rollout without its tokens.

A payload may have megabytes (routes of every token), and a run keeps thousands
of rollouts waiting. Admission, curriculum, ledger and figures need only what
is here; the payload is opened by whoever trains on it, and must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import itertools
import json
from typing import Any

import numpy as np

from composer_jax import trace

Runs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Window:
  """One context window.

  Attributes:
    spans: (weight version, tokens in a row with it), in order.
    sampled: (weight version, tokens sampled with it), ascending.
    shortest_turn: tokens of the shortest run of sampled tokens; 0 if none.
  """

  spans: Runs
  sampled: Runs
  shortest_turn: int

  def __len__(self) -> int:
    return sum(n for _, n in self.spans)


@dataclasses.dataclass(frozen=True)
class Facts:
  """A rollout without its tokens.

  Attributes:
    task_id: see `trace.Trajectory`, as the others.
    group_id: `run/prompt`.
    windows: its segments.
    reward: None if no grade could be given.
    reward_parts: named components.
    stop: why it ended.
    weights: version step -> root digest.
    meta: free text facts.
  """

  task_id: str
  group_id: str
  windows: tuple[Window, ...]
  reward: float | None
  reward_parts: Mapping[str, float]
  stop: trace.StopReason
  weights: Mapping[int, str]
  meta: Mapping[str, str]

  @property
  def valid(self) -> bool:
    """True if the rollout may enter its group's statistics."""
    return self.stop is not trace.StopReason.INFRA_ERROR and (
        self.reward is not None
    )

  @property
  def sampled_versions(self) -> np.ndarray:
    """Weight version of every sampled token, int32 [tokens], by window."""
    pairs = [pair for w in self.windows for pair in w.sampled]
    versions, counts = np.array(pairs, np.int32).reshape(-1, 2).T
    return np.repeat(versions, counts)


def spans(versions: np.ndarray) -> Runs:
  """Run-length code of a version per token, int32 [T]."""
  return tuple(
      (version, len(list(run)))
      for version, run in itertools.groupby(versions.tolist())
  )


def _window(s: trace.TokenTrace) -> Window:
  edges = np.flatnonzero(np.diff(s.sampled, prepend=False, append=False))
  turns = edges[1::2] - edges[::2]
  versions, counts = np.unique(s.versions[s.sampled], return_counts=True)
  return Window(
      spans=spans(s.versions),
      sampled=tuple(zip(versions.tolist(), counts.tolist(), strict=True)),
      shortest_turn=int(turns.min()) if turns.size else 0,
  )


def of(trajectory: trace.Trajectory) -> Facts:
  """Facts of a rollout: what its payload has to agree with."""
  shared = {
      f.name: getattr(trajectory, f.name)
      for f in dataclasses.fields(Facts)
      if f.name != 'windows'
  }
  return Facts(windows=tuple(map(_window, trajectory.segments)), **shared)


def to_json(facts: Facts) -> str:
  """Compact text, for messages."""
  return json.dumps(
      vars(facts),
      default=lambda window: list(vars(window).values()),
      separators=(',', ':'),
      sort_keys=True,
  )


def _pairs(rows: Any) -> Runs:
  return tuple((int(a), int(b)) for a, b in rows)


def from_json(text: str) -> Facts:
  """Inverse of `to_json`.

  Raises:
    ValueError: it is not the text of facts.
  """
  try:
    data = json.loads(text)
    data['windows'] = tuple(
        Window(_pairs(s), _pairs(n), int(turn))
        for s, n, turn in data['windows']
    )
    data['stop'] = trace.StopReason(data['stop'])
    data['weights'] = {int(k): str(v) for k, v in data['weights'].items()}
    return Facts(**data)
  except (KeyError, TypeError, AttributeError) as e:
    raise ValueError(f'facts of a rollout: {text[:80]!r}: {e}') from e
