"""A price for long episodes, among those that succeed.

C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), log(1 + k x) / k at q = 1: it
grows more slowly the longer an episode is, so that a hard task may be long
while an easy one has a reason to be short.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

from composer_jax import checks
from composer_jax import task as task_lib
from composer_jax.agents import harness
from composer_jax.checks import Range
from composer_jax.rewards import hierarchy
from composer_jax.rewards import signals
from composer_jax.rewards import verify


def cost(x: float, k: float, q: float) -> float:
  """C(x); x itself at k = 0 or q = 0."""
  if k * x == 0:
    return x
  growth = math.log1p(k * x)
  if q == 1:
    return growth / k
  return math.expm1((1 - q) * growth) / (k * (1 - q))


@dataclasses.dataclass(frozen=True)
class LengthPenalty:
  """Takes something from long successes.

  Attributes:
    influence: what an episode of length `full_at` or more loses, at most 0.3.
    full_at: the length at which `influence` is lost, in weighted tokens.
    k: curvature per unit of length.
    q: 0 is linear; the larger, the sooner it flattens.
    sampled: weight of a token that the policy sampled.
    shown: weight of a token of an observation.
    call: weight of a tool call.
    turn: weight of a turn.
  """

  influence: Annotated[float, Range(0, hierarchy.INFLUENCE, above=True)] = 0.1
  full_at: Annotated[float, Range(0, 1e12, above=True)] = 4096.0
  k: checks.Weight = 1e-2
  q: checks.Weight = 0.5
  sampled: checks.Weight = 1.0
  shown: checks.Weight = 0.1
  call: checks.Weight = 0.0
  turn: checks.Weight = 0.0

  def __post_init__(self):
    checks.fields(self)

  def length(self, episode: harness.Episode) -> float:
    """x of an episode. The prompt of a window is nobody's doing."""
    drawn = shown = 0
    for segment in episode.segments:
      places = segment.sampled.nonzero()[0]
      if places.size:
        drawn += places.size
        shown += int((~segment.sampled[places[0] :]).sum())
    turns = int(episode.meta.get('turns', 0))
    return (
        self.sampled * drawn
        + self.shown * shown
        + self.call * signals.calls(episode)
        + self.turn * turns
    )

  async def __call__(
      self, task: task_lib.Task, episode: harness.Episode
  ) -> verify.RewardResult:
    """Ranks a success; says nothing about anything else."""
    del task
    x = self.length(episode)
    if episode.grade is None or not episode.grade.solved:
      return verify.RewardResult(0.0, True, {'length': x})
    share = cost(x, self.k, self.q) / cost(self.full_at, self.k, self.q)
    return verify.RewardResult(
        -self.influence * min(share, 1.0), True, {'length': x}
    )
