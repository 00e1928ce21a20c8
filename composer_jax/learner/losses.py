"""Losses: one frozen dataclass each; its fields are its hyper-parameters.

Notation: mu is the behaviour log-prob of a sampled token, pi the trainer's,
l = clip(pi - mu, -20, 20), rho = exp(l), A the advantage, sg stop-gradient.
A loss returns the loss of every token; the step sums it over trained tokens
and divides by a constant Z, so nothing here averages over a batch or a row.
Entries whose mask is 0 may hold anything, NaN included. A call sees every
segment of a rollout: packing keeps them in one micro-batch, and the step
gathers it from all devices first.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp

from composer_jax import checks
from composer_jax.checks import Range
from composer_jax.learner import batch

_LOG_RATIO_BOUND = 20.0
_Bound = Annotated[float, Range(0, math.inf, above=True)]  # inf: none


def rollout_sums(rollouts: jax.Array, *terms: jax.Array) -> list[jax.Array]:
  """Sums over the tokens of each rollout, wherever they were packed.

  A stable sort and a segmented scan rather than a scatter-add: no bound on the
  rollout numbers, and no atomics, so the result is the same in every run.

  Args:
    rollouts: i32 [B T], the rollout each token belongs to.
    *terms: [B T] each, zero where a token does not count.

  Returns:
    For every term [B T]: at every token the sum over its rollout.
  """
  ids = rollouts.reshape(-1)
  order = jnp.argsort(ids, stable=True)
  sorted_ids = ids[order]
  starts = jnp.append(True, sorted_ids[1:] != sorted_ids[:-1])[:, None]
  values = jnp.stack([t.reshape(-1)[order] for t in terms], axis=1)

  def add(a, b):
    return a[0] | b[0], jnp.where(b[0], b[1], a[1] + b[1])

  _, running = jax.lax.associative_scan(add, (starts, values))
  last = jnp.searchsorted(sorted_ids, ids, side='right') - 1
  return [s.reshape(rollouts.shape) for s in running[last].T]


def _clean(stats: batch.TokenStats) -> batch.TokenStats:
  """Zeros what is not trained BEFORE any exp, in value and in gradient."""

  def keep(x):
    return None if x is None else jnp.where(stats.mask > 0, x, 0.0)

  return stats.replace(
      logps=keep(stats.logps),
      behaviour_logps=keep(stats.behaviour_logps),
      advantages=keep(stats.advantages),
      ref_logps=keep(stats.ref_logps),
  )


def _log_ratio(logps: jax.Array, other: jax.Array) -> jax.Array:
  return jnp.clip(logps - other, -_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)


def _metrics(
    stats: batch.TokenStats, ratio: jax.Array, dropped: jax.Array
) -> dict[str, batch.Mean | batch.Max]:
  """What every policy-gradient loss reports.

  Args:
    stats: cleaned stats.
    ratio: [B T], the importance ratio that the loss looks at.
    dropped: bool [B T], the token has no policy gradient whatever its A is.
  """
  up = stats.mask * (stats.advantages > 0)
  down = stats.mask * (stats.advantages < 0)
  return {
      'loss/dropped_positive': batch.Mean.of(dropped, up),
      'loss/dropped_negative': batch.Mean.of(dropped, down),
      'loss/ratio': batch.Mean.of(ratio, stats.mask),
      'loss/max_ratio': batch.Max.of(ratio, stats.mask),
  }


def _policy_gradient(stats: batch.TokenStats, weight: jax.Array) -> jax.Array:
  """-sg(weight) A log pi [B T]; its gradient is that of REINFORCE, weighted."""
  return -jax.lax.stop_gradient(weight) * stats.advantages * stats.logps


@dataclasses.dataclass(frozen=True)
class NextToken:
  """Negative log-likelihood of every trained token (mid-training, SFT)."""

  def __call__(
      self, stats: batch.TokenStats
  ) -> tuple[jax.Array, batch.Metrics]:
    nll = -_clean(stats).logps
    return nll, {'loss/nll': batch.Mean.of(nll, stats.mask)}


@dataclasses.dataclass(frozen=True)
class DppoTv:
  """The default: truncated importance weights inside a trust region.

  The region is on the binary total variation between pi and mu (DPPO, arXiv
  2602.04879): a token is dropped once its probability has already moved by
  more than `width` in the direction its advantage pushes. The drift term
  `drift * l^2` (Kimi K2.5, arXiv 2602.02276) acts on dropped tokens too: it is
  what pulls them back.

  Attributes:
    width: largest probability change in the direction of the advantage.
    max_ratio: truncation C of the importance weight.
    drift: tau of the regulariser towards the behaviour policy.
    sequence_drift: drops a whole rollout with A < 0 whose mean of mu - pi per
      trained token exceeds this, nats; None switches it off.
  """

  width: _Bound = 0.2
  max_ratio: _Bound = 5.0
  drift: checks.Weight = 1e-3
  sequence_drift: checks.Weight | None = None

  def __post_init__(self):
    checks.fields(self)

  def __call__(
      self, stats: batch.TokenStats
  ) -> tuple[jax.Array, batch.Metrics]:
    s = _clean(stats)
    log_ratio = _log_ratio(s.logps, s.behaviour_logps)
    fixed, ratio = jax.lax.stop_gradient((log_ratio, jnp.exp(log_ratio)))
    moved = jnp.exp(s.logps) - jnp.exp(s.behaviour_logps)
    outside = moved * jnp.sign(s.advantages) > self.width
    count, drifts = rollout_sums(s.rollouts, s.mask, fixed * s.mask)
    behind = -drifts / jnp.maximum(count, 1.0)
    negative = s.advantages < 0
    if self.sequence_drift is None:
      far = jnp.zeros_like(negative)
    else:
      far = negative & (behind > self.sequence_drift)
    dropped = outside | far
    weight = jnp.where(dropped, 0.0, jnp.minimum(ratio, self.max_ratio))
    loss = _policy_gradient(s, weight) + self.drift * jnp.square(log_ratio)
    down = s.mask * negative
    return loss, _metrics(s, ratio, dropped) | {
        'loss/capped': batch.Mean.of(ratio > self.max_ratio, s.mask),
        'loss/drift': batch.Mean.of(jnp.square(fixed), s.mask),
        'loss/dropped_rollout': batch.Mean.of(far, down),
        'loss/max_rollout_drift': batch.Max.of(behind, down),
    }


@dataclasses.dataclass(frozen=True)
class Composer2:
  """Plain policy gradient; the reference KL sits in the reward as k1.

  Public facts only (arXiv 2603.24477): no importance weights, no clip, a KL
  estimated by k1 = pi - ref. As a term of the loss k1 has no expected gradient
  at all. In the reward it does: with K = sum of k1 over the whole ROLLOUT and
  every token weighed by A - kl * sg(K), the expected gradient is that of
  -E[A] + kl * KL(pi || ref) over sequences, exactly. A token's own k1 would
  not do: it ignores where the token leads. The sum runs over the rollout and
  not over what follows a token, so it does not depend on the segment split.

  Attributes:
    kl: coefficient; the reference system's is not public.
  """

  kl: checks.Weight = 0.0

  def __post_init__(self):
    checks.fields(self)

  @property
  def needs_reference(self) -> bool:
    """Asks the step for the log-probs of the policy that RL started from."""
    return bool(self.kl)

  def __call__(
      self, stats: batch.TokenStats
  ) -> tuple[jax.Array, batch.Metrics]:
    s = _clean(stats)
    metrics = {}
    if self.kl:
      if s.ref_logps is None:
        raise ValueError(
            f'Composer2.kl={self.kl}: needs TokenStats.ref_logps; give the step'
            ' a reference model or set 0'
        )
      k1 = jax.lax.stop_gradient(_log_ratio(s.logps, s.ref_logps))
      (total,) = rollout_sums(s.rollouts, k1 * s.mask)
      s = s.replace(advantages=s.advantages - self.kl * total)
      metrics = {'loss/k1': batch.Mean.of(k1, s.mask)}
    ratio = jnp.exp(_log_ratio(s.logps, s.behaviour_logps))
    never = jnp.zeros_like(ratio, jnp.bool_)
    loss = _policy_gradient(s, jnp.ones_like(ratio))
    return loss, _metrics(s, ratio, never) | metrics


@dataclasses.dataclass(frozen=True)
class GrpoClip:
  """-min(rho A, clip(rho, 1 - low, 1 + high) A) per token.

  The PPO clip as in GRPO (arXiv 2402.03300) with the higher upper bound of
  DAPO (arXiv 2503.14476). Pair with `advantages.GroupStandard` for the
  original's division by the deviation.

  Attributes:
    low: the ratio is clipped at 1 - low.
    high: and at 1 + high.
  """

  low: checks.Share = 0.2
  high: _Bound = 0.28

  def __post_init__(self):
    checks.fields(self)

  def __call__(
      self, stats: batch.TokenStats
  ) -> tuple[jax.Array, batch.Metrics]:
    s = _clean(stats)
    ratio = jnp.exp(_log_ratio(s.logps, s.behaviour_logps))
    free = ratio * s.advantages
    clipped = jnp.clip(ratio, 1 - self.low, 1 + self.high) * s.advantages
    return -jnp.minimum(free, clipped), _metrics(s, ratio, clipped < free)


@dataclasses.dataclass(frozen=True)
class Cispo:
  """-sg(clip(rho, min_ratio, max_ratio)) A log pi: no token is ever dropped.

  MiniMax-M1 (arXiv 2506.13585), which leaves the lower side open and tunes the
  upper one without publishing it.

  Attributes:
    min_ratio: lower bound of the weight; 0 leaves it open.
    max_ratio: upper bound of the weight.
  """

  min_ratio: checks.Weight = 0.0
  max_ratio: _Bound = 5.0

  def __post_init__(self):
    checks.fields(self)

  def __call__(
      self, stats: batch.TokenStats
  ) -> tuple[jax.Array, batch.Metrics]:
    s = _clean(stats)
    ratio = jnp.exp(_log_ratio(s.logps, s.behaviour_logps))
    weight = jnp.clip(ratio, self.min_ratio, self.max_ratio)
    never = jnp.zeros_like(ratio, jnp.bool_)
    return _policy_gradient(s, weight), _metrics(s, ratio, never) | {
        'loss/capped': batch.Mean.of(weight != ratio, s.mask)
    }


@dataclasses.dataclass(frozen=True)
class Gspo:
  """-min(s A, clip(s, 1 - low, 1 + high) A), s the ratio of a whole rollout.

  s = exp(mean of l over the rollout's n trained tokens) (arXiv 2507.18071),
  over all its segments. The gradient is that of the paper's objective per
  ROLLOUT, so a token carries 1 / n, and L_norm = 1 gives the paper's mean over
  rollouts.

  Attributes:
    low: the ratio is clipped at 1 - low.
    high: and at 1 + high.
  """

  low: checks.Share = 3e-4
  high: _Bound = 4e-4

  def __post_init__(self):
    checks.fields(self)

  def __call__(
      self, stats: batch.TokenStats
  ) -> tuple[jax.Array, batch.Metrics]:
    s = _clean(stats)
    log_ratio = jax.lax.stop_gradient(_log_ratio(s.logps, s.behaviour_logps))
    count, drifts = rollout_sums(s.rollouts, s.mask, log_ratio * s.mask)
    n = jnp.maximum(count, 1.0)
    ratio = jnp.exp(drifts / n)
    above = (s.advantages > 0) & (ratio > 1 + self.high)
    below = (s.advantages < 0) & (ratio < 1 - self.low)
    dropped = above | below
    weight = jnp.where(dropped, 0.0, ratio / n)
    return _policy_gradient(s, weight), _metrics(s, ratio, dropped)


@dataclasses.dataclass(frozen=True)
class IcePop:
  """-sg(rho if low <= rho <= high else 0) A log pi.

  The calibration band on trainer against engine of Ring-1T (arXiv 2510.18855).
  With one update per batch its inner PPO ratio is 1, which leaves the band.

  Attributes:
    low: smallest ratio kept.
    high: largest ratio kept.
  """

  low: checks.Weight = 0.5
  high: _Bound = 5.0

  def __post_init__(self):
    checks.fields(self)

  def __call__(
      self, stats: batch.TokenStats
  ) -> tuple[jax.Array, batch.Metrics]:
    s = _clean(stats)
    ratio = jnp.exp(_log_ratio(s.logps, s.behaviour_logps))
    dropped = (ratio < self.low) | (ratio > self.high)
    weight = jnp.where(dropped, 0.0, ratio)
    return _policy_gradient(s, weight), _metrics(s, ratio, dropped)


@dataclasses.dataclass(frozen=True)
class M2po:
  """-rho A over the tokens that keep the second moment of l in bounds.

  Drops the tokens with the largest l^2 until the mean of l^2 over the rest is
  at most `second_moment` (arXiv 2510.01161); equal tokens go together. The
  moment is one of the tokens of one call: unlike the other losses, this one
  sees how an optimizer batch is cut into micro-batches.

  Attributes:
    second_moment: bound on the mean of l^2, nats squared.
  """

  second_moment: _Bound = 0.04

  def __post_init__(self):
    checks.fields(self)

  def __call__(
      self, stats: batch.TokenStats
  ) -> tuple[jax.Array, batch.Metrics]:
    s = _clean(stats)
    log_ratio = jax.lax.stop_gradient(_log_ratio(s.logps, s.behaviour_logps))
    square = jnp.where(s.mask > 0, jnp.square(log_ratio), jnp.inf)
    ascending = jnp.sort(square.reshape(-1))
    means = jnp.cumsum(ascending) / jnp.arange(1, ascending.size + 1)
    # Means over a sorted prefix never decrease, so the first that is too large
    # marks the smallest value that has to go.
    first = jnp.min(jnp.where(means > self.second_moment, ascending, jnp.inf))
    dropped = square >= first
    ratio = jnp.exp(log_ratio)
    weight = jnp.where(dropped, 0.0, ratio)
    return _policy_gradient(s, weight), _metrics(s, ratio, dropped) | {
        'loss/second_moment': batch.Mean.of(jnp.square(log_ratio), s.mask)
    }


@dataclasses.dataclass(frozen=True)
class Ipo:
  """INTELLECT policy optimization: a two-sided region in probability.

  -sg(rho if |exp pi - exp mu| <= width else 0) A log pi + drift * l^2, as
  published with prime-rl (docs/ipo, 2026). Unlike `DppoTv` it drops a token
  that moved too far in EITHER direction and does not truncate rho; the drift
  term acts on every trained token.

  Attributes:
    width: largest change of the token's probability.
    drift: coefficient of the regulariser towards the behaviour policy.
  """

  width: _Bound = 0.3
  drift: checks.Weight = 1e-3

  def __post_init__(self):
    checks.fields(self)

  def __call__(
      self, stats: batch.TokenStats
  ) -> tuple[jax.Array, batch.Metrics]:
    s = _clean(stats)
    log_ratio = _log_ratio(s.logps, s.behaviour_logps)
    ratio = jnp.exp(log_ratio)
    moved = jnp.exp(s.logps) - jnp.exp(s.behaviour_logps)
    dropped = jnp.abs(moved) > self.width
    loss = _policy_gradient(s, jnp.where(dropped, 0.0, ratio))
    return loss + self.drift * jnp.square(log_ratio), _metrics(
        s, ratio, dropped
    ) | {'loss/drift': batch.Mean.of(jnp.square(log_ratio), s.mask)}
