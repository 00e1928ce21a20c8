"""Rotary positions beyond those of pre-training: how frequencies change."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

from composer_jax import checks
from composer_jax.checks import Range

_Turns = Annotated[float, Range(0, 1e6, above=True)]
_Growth = Annotated[float, Range(1, 1e6)]


def frequencies(theta: float, dims: int) -> list[float]:
  """Radians per position of each pair (Su et al., arXiv 2104.09864)."""
  return [theta ** (-2 * i / dims) for i in range(dims // 2)]


@dataclasses.dataclass(frozen=True)
class Yarn:
  """YaRN (Peng et al., arXiv 2309.00071).

  Attributes:
    factor: by which the window grows.
    original_tokens: longest window of pre-training.
    beta_fast: turns in that window, above which a pair stays as it is.
    beta_slow: turns in that window, below which it slows down by the factor.
    truncate: to whole pairs, the range between the two.
    mscale: weight of the growth in `amplitude`; 0: see there.
    mscale_all_dim: the same in its divisor, and in `score_scale`.
    attention_factor: the amplitude itself, or None.
  """

  factor: _Growth
  original_tokens: checks.Tokens
  beta_fast: _Turns = 32.0
  beta_slow: _Turns = 1.0
  truncate: bool = True
  mscale: checks.Weight = 0.0
  mscale_all_dim: checks.Weight = 0.0
  attention_factor: checks.Weight | None = None

  def __post_init__(self):
    checks.fields(self)
    checks.require(
        self,
        (
            self.beta_slow <= self.beta_fast,
            'beta_slow',
            f'must be at most beta_fast={self.beta_fast}',
        ),
    )

  def _growth(self, weight: float) -> float:
    return 0.1 * weight * math.log(self.factor) + 1.0

  @property
  def amplitude(self) -> float:
    """Of cosines and sines."""
    if self.attention_factor is not None:
      return self.attention_factor
    if self.mscale and self.mscale_all_dim:
      return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
    return self._growth(1.0)

  @property
  def score_scale(self) -> float:
    """Of the scores of latent attention, beside the amplitude."""
    return self._growth(self.mscale_all_dim) ** 2

  def frequencies(self, theta: float, dims: int) -> list[float]:
    """As `frequencies`, for the longer window."""

    def pair(turns: float) -> float:
      """Number of the pair that turns so often in the original window."""
      wave = self.original_tokens / (turns * 2 * math.pi)
      return dims * math.log(wave) / (2 * math.log(theta))

    low, high = pair(self.beta_fast), pair(self.beta_slow)
    if self.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = max(high - low, 1e-3)
    out = []
    for i, f in enumerate(frequencies(theta, dims)):
      slow = min(max((i - low) / width, 0.0), 1.0)
      out.append(f / self.factor * slow + f * (1 - slow))
    return out


@dataclasses.dataclass(frozen=True)
class Llama3:
  """Llama 3.1's rule (arXiv 2407.21783).

  Attributes:
    factor: by which the window grows.
    original_tokens: longest window of pre-training.
    low_freq_factor: turns in that window, below which a pair slows down by the
      factor.
    high_freq_factor: turns in that window, above which it stays as it is.
  """

  factor: _Growth
  original_tokens: checks.Tokens
  low_freq_factor: _Turns = 1.0
  high_freq_factor: _Turns = 4.0
  amplitude = score_scale = 1.0

  def __post_init__(self):
    checks.fields(self)
    high = self.high_freq_factor
    checks.require(
        self,
        (
            self.low_freq_factor < high,
            'low_freq_factor',
            f'must be below high_freq_factor={high}',
        ),
    )

  def frequencies(self, theta: float, dims: int) -> list[float]:
    """As `frequencies`, for the longer window."""
    low, high = self.low_freq_factor, self.high_freq_factor
    out = []
    for f in frequencies(theta, dims):
      turns = self.original_tokens * f / (2 * math.pi)
      kept = min(max((turns - low) / (high - low), 0.0), 1.0)
      out.append((1 - kept) * f / self.factor + kept * f)
    return out
