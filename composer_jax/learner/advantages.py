"""Advantages of rollouts, from the rewards of their group. Host side, float64.

A group is one prompt, sampled G times. Its statistics count rollouts, never
segments or tokens, and only valid ones: a rollout lost to infrastructure is
not a rollout that earned 0.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Protocol

import numpy as np

from composer_jax import checks
from composer_jax import trace


class Advantage(Protocol):
  """Credit of the members of a group."""

  def __call__(self, rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Advantages f64 [G] from rewards f64 [G]; 0 where valid [G] is False."""
    ...


@dataclasses.dataclass(frozen=True)
class GroupMean:
  """A = r - mean(r): no division by the deviation, no length in sight.

  Attributes:
    leave_one_out: take the mean over the OTHER valid members, which makes the
      baseline independent of the rollout (the same up to G / (G - 1)).
  """

  leave_one_out: bool = False

  def __call__(self, rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    n = np.count_nonzero(valid)
    centred = np.where(valid, rewards - np.mean(rewards[valid]), 0.0)
    return centred * (n / (n - 1)) if self.leave_one_out else centred


@dataclasses.dataclass(frozen=True)
class GroupStandard:
  """A = (r - mean(r)) / (std(r) + epsilon), as in the original GRPO paper.

  Weighs a prompt up when it is nearly always solved or nearly always failed.
  """

  epsilon: checks.Share = 1e-6

  def __post_init__(self):
    checks.fields(self)

  def __call__(self, rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    members = rewards[valid]
    centred = np.where(valid, rewards - np.mean(members), 0.0)
    return centred / (np.std(members) + self.epsilon)


def group_advantages(
    group: Sequence[trace.Trajectory], advantage: Advantage
) -> np.ndarray | None:
  """Advantages of the members of one group.

  Args:
    group: the rollouts of one prompt; invalid ones included.
    advantage: `GroupMean`, `GroupStandard`, or any other.

  Returns:
    f64 [G], 0 for invalid members (which must not be packed); None if the valid
    ones have a `trace.fault`: the group is consumed without training on it.

  Raises:
    ValueError: members of different groups, or a reward that is not finite.
  """
  names = {t.group_id for t in group}
  if len(names) > 1:
    raise ValueError(f'group_id={sorted(names)}: one group has one prompt')
  valid = np.array([t.valid for t in group], np.bool_)
  rewards = np.array([t.reward if t.valid else 0.0 for t in group], np.float64)
  if not np.isfinite(rewards).all():
    raise ValueError(
        f'reward={rewards.tolist()} in group {sorted(names)}: must be finite;'
        ' a grade that failed is reward=None'
    )
  if trace.fault([t for t in group if t.valid]):
    return None
  return advantage(rewards, valid)
