"""Frozen configuration of the phases before RL, and of what they read."""

from __future__ import annotations

import dataclasses
from typing import Any


def require(ok: bool, owner: Any, field: str, cure: str) -> None:
  """Raises a ValueError that names a field, its value and the cure."""
  if not ok:
    value = getattr(owner, field)
    raise ValueError(f'{type(owner).__name__}.{field}={value!r}: {cure}')


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
  path: str | None = None  # None: the running interpreter's standard library
  suffix: str = '.py'
  max_bytes: int = 6_000_000
  heldout_fraction: float = 0.02  # of files, chosen by hash of their name


@dataclasses.dataclass(frozen=True)
class ShardsConfig:
  """A source of documents that `experiments.tokenize` wrote."""

  name: str  # for `PhaseConfig.mix`
  path: str
  heldout_bytes: int = 1_000_000  # of text that it is measured on, at most

  def __post_init__(self):
    require(self.heldout_bytes >= 0, self, 'heldout_bytes', 'must be >= 0')


@dataclasses.dataclass(frozen=True)
class Balancing:
  """What keeps the router from neglecting experts; pads never count.

  Attributes:
    aux: weight of the load balancing loss (Switch, arXiv 2101.03961).
    z: weight of the router z-loss (ST-MoE, arXiv 2202.08906).
    bias_speed: what an update adds to or takes from the bias that an expert is
      chosen with (DeepSeek-V3, arXiv 2412.19437).
  """

  aux: float = 0.0
  z: float = 0.0
  bias_speed: float = 0.0

  def __post_init__(self):
    for field in ('aux', 'z', 'bias_speed'):
      require(getattr(self, field) >= 0, self, field, 'must be >= 0')


@dataclasses.dataclass(frozen=True)
class Mtp:
  """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

  Attributes:
    weight: of its loss, the mean over `ModelConfig.mtp_layers`.
    distill: what it learns. False: the tokens, and the main model with it, as
      published. True: the main head's distributions, and the main model learns
      nothing from it.
  """

  weight: float = 0.0
  distill: bool = False

  def __post_init__(self):
    require(self.weight >= 0, self, 'weight', 'must be >= 0')


@dataclasses.dataclass(frozen=True)
class PhaseConfig:
  """Next-token training on packed rows, before RL.

  Attributes:
    name: of its metrics and checkpoints.
    optimizer: object with `build()`; its state begins afresh with the phase.
    steps: updates.
    rows_per_step: of a batch.
    tokens_per_row: longest context.
    mix: (source, weight) pairs; weights are shares of the ROWS of a batch. The
      sources are 'code' (`Experiment.corpus`), 'demos' (format-only episodes of
      `Experiment.tasks`) and the names of `Experiment.shards`.
    balancing: of the router.
    mtp: loss of further tokens.
    eval_every_steps: between measurements on held-out documents; None measures
      before the first step and after the last one only.
  """

  name: str
  optimizer: Any
  steps: int
  rows_per_step: int
  tokens_per_row: int
  mix: tuple[tuple[str, float], ...] = (('code', 1.0),)
  balancing: Balancing = Balancing(aux=0.01)
  mtp: Mtp = Mtp()
  eval_every_steps: int | None = None

  def __post_init__(self):
    require(
        self.name.isidentifier() and self.name not in ('rl', 'eval'),
        self,
        'name',
        "must be an identifier, and neither 'rl' nor 'eval'",
    )
    require(self.steps > 0, self, 'steps', 'must be positive')
    require(
        len(dict(self.mix)) == len(self.mix) > 0
        and all(weight > 0 for _, weight in self.mix),
        self,
        'mix',
        'must name each source once, with a positive weight',
    )
    require(
        self.eval_every_steps is None or self.eval_every_steps > 0,
        self,
        'eval_every_steps',
        'must be positive or None',
    )
