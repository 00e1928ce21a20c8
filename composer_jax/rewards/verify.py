"""The reward that cannot be argued with: hidden cases passed."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Annotated

from composer_jax import checks
from composer_jax import task as task_lib
from composer_jax import trace
from composer_jax.agents import harness
from composer_jax.checks import Range


@dataclasses.dataclass(frozen=True)
class RewardResult:
  """A reward and where it came from.

  Attributes:
    score: what the policy is trained on; meaningless unless `valid`.
    valid: False if nobody could judge: the rollout leaves its group.
    passed: the verified verdict; None for a reward that only ranks.
    parts: named components, kept so that re-weighting is offline.
    flags: suspicions; metrics only.
    reason: one line for people.
  """

  score: float
  valid: bool
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  flags: tuple[str, ...] = ()
  reason: str = ''
  passed: bool | None = None


@dataclasses.dataclass(frozen=True)
class Verify:
  """1 if every hidden case passes, else `fraction_weight` x share passed.

  Attributes:
    fraction_weight: credit for a part of the cases. At most 0.3: above, a
      submission for the easy cases pays better than trying.
  """

  fraction_weight: Annotated[float, Range(0, 0.3)] = 0.0

  def __post_init__(self):
    checks.fields(self)

  async def __call__(
      self, task: task_lib.Task, episode: harness.Episode
  ) -> RewardResult:
    """Scores a graded episode; an ungraded one is invalid, not zero."""
    del task  # the grade knows all about it
    grade = episode.grade
    if episode.stop is trace.StopReason.INFRA_ERROR:
      return RewardResult(0.0, False, reason='infrastructure failed')
    if grade is None:
      return RewardResult(0.0, False, reason='never graded')
    if not grade.valid:
      return RewardResult(0.0, False, reason=grade.reason)
    score = 1.0 if grade.solved else self.fraction_weight * grade.fraction
    return RewardResult(
        score,
        True,
        parts={'passed': float(grade.solved), 'fraction': grade.fraction},
        flags=('hack_suspected',) if grade.suspicious else (),
        reason=grade.failure or grade.reason,
        passed=grade.solved,
    )
