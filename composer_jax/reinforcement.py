"""Frozen configuration of RL: engine, episodes, loop, evaluation, weights."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from composer_jax import checks
from composer_jax.checks import Range


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """The decode engine: how many sequences it holds, and how it schedules them.

  Attributes:
    slots: Sequences decoded together.
    context_tokens: Longest sequence, prompt included.
    steps_per_sync: Decode steps per host round trip.
    prefill_tokens: Most prompt tokens between two decode blocks.
    cache_tokens: Tokens that the cache of all slots holds; None: never short.
    swap: What new weights do to a running turn: it goes on with them ('async'),
      or ends on the old ones while new requests wait ('sync').
  """

  slots: Annotated[int, Range(1, 65_536)] = 256
  context_tokens: checks.Tokens = 128
  steps_per_sync: Annotated[int, Range(1, 1024)] = 2
  prefill_tokens: Annotated[int, Range(4, 65_536)] = 2048
  cache_tokens: checks.Count | None = None
  swap: Literal['async', 'sync'] = 'async'

  def __post_init__(self):
    checks.fields(self)
    checks.require(
        self,
        (
            self.cache_tokens is None
            or self.cache_tokens >= self.context_tokens,
            'cache_tokens',
            f'must hold one context of {self.context_tokens} tokens on every'
            ' lane',
        ),
    )


@dataclasses.dataclass(frozen=True)
class HarnessConfig:
  """Budgets of an episode.

  Attributes:
    max_turns: Turns that the policy samples at most.
    max_turn_tokens: Tokens of one turn.
    max_context_tokens: Tokens of one context window.
    tool_output_bytes: Bytes of what a tool shows; its middle is cut out.
    tool_seconds: Seconds for the tools of one turn.
    episode_seconds: Seconds from the first turn to the last; one that takes
      longer has failed. Its grading is not in it.
    summary_trigger_tokens: Length at which a context window ends with a summary
      by the policy, and another one begins with it. None: one window.
    summary_tokens: Tokens of a summary.
    train_summaries: False: a summary is context, in no loss.
  """

  max_turns: Annotated[int, Range(1, 100_000)] = 3
  max_turn_tokens: checks.Tokens = 16
  max_context_tokens: checks.Tokens = 128
  tool_output_bytes: Annotated[int, Range(1, 2**26)] = 200
  tool_seconds: checks.Seconds = 5.0
  episode_seconds: checks.Seconds = 3600.0
  summary_trigger_tokens: checks.Tokens | None = None
  summary_tokens: checks.Tokens = 16
  train_summaries: bool = True

  def __post_init__(self):
    checks.fields(self)
    checks.require(
        self,
        (
            self.max_turn_tokens < self.max_context_tokens,
            'max_turn_tokens',
            'must leave room for a prompt below'
            f' max_context_tokens={self.max_context_tokens}',
        ),
    )
    if self.summary_trigger_tokens is not None:
      room = self.max_turn_tokens + self.summary_tokens
      checks.require(
          self,
          (
              self.summary_trigger_tokens < self.max_context_tokens - room,
              'summary_trigger_tokens',
              f'must leave max_turn_tokens + summary_tokens={room} and a query'
              f' below max_context_tokens={self.max_context_tokens}',
          ),
      )


@dataclasses.dataclass(frozen=True)
class RlConfig:
  """The RL loop: its batches, its pace, how often it looks at itself.

  Attributes:
    steps: Optimizer steps.
    groups_per_step: Prompts of a batch.
    rollouts_per_group: Rollouts of a prompt; one alone has no baseline.
    candidates_per_prompt: Tasks a prompt draws one from, rather of a kind that
      is not yet always solved; 1: as they come.
    max_staleness_versions: S, versions that a batch may be behind when it is
      admitted; 0: synchronous, fully on-policy.
    rows_per_batch: Rows of one packed micro-batch, the shape a step is compiled
      for; a step accumulates over as many as its rollouts fill.
    tokens_per_row: Tokens of one of them.
    norm_tokens: L_norm: Z = rollouts in the batch x norm_tokens.
    withhold_staleness_versions: Older tokens leave the loss only.
    lease_seconds: Seconds without a sign of life from who plays a rollout,
      after which it is played again.
    workers: Rollouts in flight.
    checkpoint_every_steps: Steps between two checkpoints.
    eval_every_steps: Steps between two evaluations.
    stop_on_mismatch: Saves and ends the run if decoder and trainer differ in a
      token that was sampled with the very weights that are trained.
  """

  steps: checks.Count = 100
  groups_per_step: checks.Rows = 12
  rollouts_per_group: Annotated[int, Range(2, 2**20)] = 16
  candidates_per_prompt: Annotated[int, Range(1, 1024)] = 1
  max_staleness_versions: Annotated[int, Range(0, 8)] = 2
  rows_per_batch: checks.Rows = 32
  tokens_per_row: checks.Tokens = 256
  norm_tokens: checks.Count = 8
  withhold_staleness_versions: checks.Natural = 8
  lease_seconds: checks.Seconds = 60.0
  workers: Annotated[int, Range(1, 65_536)] = 256
  checkpoint_every_steps: checks.Count = 20
  eval_every_steps: checks.Count = 50
  stop_on_mismatch: bool = False

  def __post_init__(self):
    checks.fields(self)
    checks.require(
        self,
        (
            self.groups_per_step * self.rollouts_per_group <= 2**24,
            'groups_per_step',
            f'times rollouts_per_group={self.rollouts_per_group} must be at'
            ' most 16,777,216 rollouts a batch',
        ),
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Held-out evaluation.

  Attributes:
    tasks: Tasks of each split.
    seed: Index of the first; disjoint from training by construction.
    showcase: Episodes to look at, of the first tasks.
  """

  tasks: checks.Rows = 256
  seed: Annotated[int, Range(0, 2**31 - 1)] = 1_000_003
  showcase: Annotated[int, Range(0, 1024)] = 5

  def __post_init__(self):
    checks.fields(self)


@dataclasses.dataclass(frozen=True)
class WeightsConfig:
  """How versions are stored.

  Attributes:
    codec: Codec of deltas; D2 is faster and larger, F slower and smaller.
    tile_elements: Values of a tile, the unit of an object.
    base_every_versions: Versions between two whole ones.
    skip_every_versions: Versions that one longer delta takes together.
    keep_bases: Versions with a base that stay, the newest ones.
    raw_above_changed_fraction: Share of changed values above which a tile is
      stored whole.
  """

  codec: Literal['D2', 'E', 'F'] = 'E'
  tile_elements: Annotated[int, Range(64, 2**30)] = 262_144
  base_every_versions: checks.Count = 100
  skip_every_versions: checks.Count = 8
  keep_bases: checks.Count = 2
  raw_above_changed_fraction: checks.Share = 0.9

  def __post_init__(self):
    checks.fields(self)
