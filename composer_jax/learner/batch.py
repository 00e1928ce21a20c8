"""Device types of the learner: the batch, what a loss sees, typed metrics.

Fields of pytree dataclasses are typed plainly (`jax.Array`): shapes stand in
the comments and are checked on functions (see `composer_jax.typing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from flax import struct
import jax
import jax.numpy as jnp


@struct.dataclass
class Batch:
  """Packed rows. A segment starts at a multiple of the attention key block.

  Pads have segment id 0; real segments count from 1 WITHIN a row. `rollouts`
  numbers the rollouts of the whole batch from 1, so that sequence-level losses
  reduce over a rollout's segments wherever they were packed.
  """

  tokens: jax.Array  # i32 [B T]
  segments: jax.Array  # i32 [B T], 0 = pad: the one source of padding truth
  positions: jax.Array  # i32 [B T], from 0 within the segment
  rollouts: jax.Array  # i32 [B T], 0 = pad
  sampled: jax.Array  # bool [B T], token t is trained (as a target)
  behaviour_logps: jax.Array  # f32 [B T], log-prob of token t when sampled
  advantages: jax.Array  # f32 [B T]
  staleness: jax.Array  # i32 [B T], trainer version - version of token t
  routing: jax.Array | None = None  # u8|u16 [B T L K]


@struct.dataclass
class TokenStats:
  """All that a loss may see; entry t is about token t as a TARGET.

  `mask` is 1.0 where the token is trained, 0.0 elsewhere; every other field
  is finite (zero) where the mask is 0.
  """

  logps: jax.Array  # f32 [B T], trainer's log-prob: the only one with gradient
  behaviour_logps: jax.Array  # f32 [B T]
  advantages: jax.Array  # f32 [B T]
  entropy: jax.Array  # f32 [B T], nats
  mask: jax.Array  # f32 [B T]
  staleness: jax.Array  # i32 [B T], versions
  rollouts: jax.Array  # i32 [B T], number in the batch, 0 = pad
  ref_logps: jax.Array | None = None  # f32 [B T]


@struct.dataclass
class Mean:
  """A ratio of sums: merging adds both, so micro-batches weigh by tokens."""

  total: jax.Array
  count: jax.Array

  @classmethod
  def of(cls, x: jax.Array, mask: jax.Array) -> Mean:
    """Mean of x [B T] where mask [B T] is nonzero."""
    mask = mask.astype(jnp.float32)
    return cls(jnp.sum(jnp.where(mask > 0, x, 0.0) * mask), jnp.sum(mask))

  def merge(self, other: Mean) -> Mean:
    return Mean(self.total + other.total, self.count + other.count)

  def value(self) -> jax.Array:
    return self.total / jnp.maximum(self.count, 1.0)


@struct.dataclass
class Max:
  """A maximum; merging takes the larger. Never averaged."""

  peak: jax.Array

  @classmethod
  def of(cls, x: jax.Array, mask: jax.Array) -> Max:
    """Maximum of x [B T] where mask [B T] is nonzero; -inf if nowhere."""
    return cls(jnp.max(jnp.where(mask > 0, x, -jnp.inf)))

  def merge(self, other: Max) -> Max:
    return Max(jnp.maximum(self.peak, other.peak))

  def value(self) -> jax.Array:
    return self.peak


Metrics = Mapping[str, Mean | Max]


class Loss(Protocol):
  """A frozen dataclass with `__call__`: its fields are its hyper-parameters.

  It hashes by value, so it is also the static argument of the jitted step.
  """

  def __call__(self, stats: TokenStats) -> tuple[jax.Array, Metrics]:
    """Returns the loss of every token [B T] f32 (unmasked) and metrics."""
    ...


def merge(a: Metrics, b: Metrics) -> Metrics:
  """Merges two metric dicts with the same keys, by type."""
  return {k: a[k].merge(b[k]) for k in a}


@struct.dataclass
class TrainState:
  """f32 masters and everything else that a step changes."""

  step: jax.Array  # i32 []
  params: object  # model.params.Params, f32
  opt_state: object
