"""What several rewards are worth together: whatever was verified comes first.

The one place where scores meet. A verdict (`RewardResult.passed`) decides
between success and failure; judges and penalties rank within the two, and all
of them together move a score by `INFLUENCE` at most. So the worst success,
1 - 0.3, is above the best failure, 0.3 + 0.3.
"""

from __future__ import annotations

from collections.abc import Sequence
import math

from composer_jax.rewards import verify

INFLUENCE = 0.3  # of all that is not verified; below 1/3, or ranks could meet


def combine(
    results: Sequence[verify.RewardResult],
) -> verify.RewardResult:
  """The reward of a rollout.

  Args:
    results: one for each reward, in any order.

  Returns:
    1 for a success and at most 0.3 for a failure, plus the sum of what only
    ranks, clipped to +-`INFLUENCE`; that sum alone where nothing verifies.
    Invalid if any of them is, or if a score is not finite. A part with the
    name of a verdict's is the verdict's.
  """
  verdicts = [r for r in results if r.passed is not None]
  ranks = [r for r in results if r.passed is None]
  parts = {k: v for r in (*ranks, *verdicts) for k, v in r.parts.items()}
  flags = tuple(sorted({flag for r in results for flag in r.flags}))
  reasons = [r.reason for r in results if not r.valid]
  extra = sum(r.score for r in ranks)
  if verdicts:
    extra = min(max(extra, -INFLUENCE), INFLUENCE)
  score = min((r.score for r in verdicts), default=0.0)
  finite = all(math.isfinite(r.score) for r in results)
  if not reasons and not (finite and math.isfinite(extra)):
    reasons = ['a score is not finite']
  if reasons:
    return verify.RewardResult(0.0, False, parts, flags, reasons[0])
  passed = all(r.passed for r in verdicts) if verdicts else None
  if passed is not None:
    score = 1.0 if passed else min(score, INFLUENCE)
  reason = ', '.join(r.reason for r in verdicts if r.reason)
  return verify.RewardResult(score + extra, True, parts, flags, reason, passed)
