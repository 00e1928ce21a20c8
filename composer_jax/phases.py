"""Frozen configuration of the phases before RL, and of what they read."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from composer_jax import checks
from composer_jax.checks import Range


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
  """Files of code: the source 'code' of a phase.

  Attributes:
    path: Directory; None: the running interpreter's standard library.
    suffix: Of the files.
    max_bytes: Bytes that are read at most.
    heldout_fraction: Share of the files, chosen by hash of their name, that is
      never trained on.
  """

  path: str | None = None
  suffix: str = '.py'
  max_bytes: Annotated[int, Range(1, 2**40)] = 6_000_000
  heldout_fraction: checks.Share = 0.02

  def __post_init__(self):
    checks.fields(self)


@dataclasses.dataclass(frozen=True)
class ShardsConfig:
  """A source of documents that `experiments.tokenize` wrote."""

  name: str  # for `PhaseConfig.mix`
  path: str
  # Of text that it is measured on, at most.
  heldout_bytes: Annotated[int, Range(0, 2**40)] = 1_000_000

  def __post_init__(self):
    checks.fields(self)


@dataclasses.dataclass(frozen=True)
class Balancing:
  """What keeps the router from neglecting experts; pads never count.

  Attributes:
    aux: weight of the load balancing loss (Switch, arXiv 2101.03961).
    z: weight of the router z-loss (ST-MoE, arXiv 2202.08906).
    bias_speed: what an update adds to or takes from the bias that an expert is
      chosen with (DeepSeek-V3, arXiv 2412.19437).
  """

  aux: checks.Weight = 0.0
  z: checks.Weight = 0.0
  bias_speed: checks.Share = 0.0

  def __post_init__(self):
    checks.fields(self)


@dataclasses.dataclass(frozen=True)
class Mtp:
  """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

  Attributes:
    weight: of its loss, the mean over `ModelConfig.mtp_layers`.
    distill: what it learns. False: the tokens, and the main model with it, as
      published. True: the main head's distributions, and the main model learns
      nothing from it.
  """

  weight: checks.Weight = 0.0
  distill: bool = False

  def __post_init__(self):
    checks.fields(self)


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
  steps: checks.Count
  rows_per_step: checks.Rows
  tokens_per_row: checks.Tokens
  mix: tuple[tuple[str, float], ...] = (('code', 1.0),)
  balancing: Balancing = Balancing(aux=0.01)
  mtp: Mtp = Mtp()
  eval_every_steps: checks.Count | None = None

  def __post_init__(self):
    checks.fields(self)
    checks.require(
        self,
        (
            self.name.isidentifier() and self.name not in ('rl', 'eval'),
            'name',
            "must be an identifier, and neither 'rl' nor 'eval'",
        ),
        (
            len(dict(self.mix)) == len(self.mix) > 0
            and all(0 < weight <= 1e6 for _, weight in self.mix),
            'mix',
            'must name each source once, with a weight above 0 (at most 1e6)',
        ),
    )
