"""Optimizers as configuration: hashable by value, built once per run."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from composer_jax import checks
from composer_jax.checks import Range


def _ramp(count: jax.Array, steps: int) -> jax.Array:
  """Linear warmup whose first update already moves: by 1 / steps, not 0."""
  return jnp.minimum(1.0, (count + 1) / max(steps, 1))


@dataclasses.dataclass(frozen=True)
class Constant:
  """The peak after a linear warmup.

  Attributes:
    warmup_steps: updates of the ramp.
  """

  warmup_steps: checks.Natural = 0

  def __post_init__(self):
    checks.fields(self)

  def __call__(self, count: jax.Array) -> jax.Array:
    """Fraction of the peak for the update after `count` others."""
    return _ramp(count, self.warmup_steps)


@dataclasses.dataclass(frozen=True)
class Cosine:
  """A cosine from the peak down to a fraction of it, after the warmup.

  Attributes:
    decay_steps: updates of the cosine.
    warmup_steps: updates of the ramp before it.
    final_fraction: fraction of the peak where it ends and stays.
  """

  decay_steps: checks.Count
  warmup_steps: checks.Natural = 0
  final_fraction: checks.Share = 0.1

  def __post_init__(self):
    checks.fields(self)

  def __call__(self, count: jax.Array) -> jax.Array:
    """Fraction of the peak for the update after `count` others."""
    done = (count - self.warmup_steps) / self.decay_steps
    wave = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(done, 0.0, 1.0)))
    rest = self.final_fraction + (1 - self.final_fraction) * wave
    return _ramp(count, self.warmup_steps) * rest


@dataclasses.dataclass(frozen=True)
class Wsd:
  """Warmup, stable, decay (MiniCPM, arXiv 2404.06395).

  The decay is exponential, as there. A run may stop or branch off anywhere in
  the stable part, which does not know how long the whole will be.

  Attributes:
    stable_steps: updates at the peak.
    decay_steps: updates from the peak to `final_fraction` of it.
    warmup_steps: updates of the ramp before them.
    final_fraction: fraction of the peak where the decay ends and stays.
  """

  stable_steps: checks.Natural
  decay_steps: checks.Count
  warmup_steps: checks.Natural = 0
  final_fraction: checks.Share = 0.1

  def __post_init__(self):
    checks.fields(self)
    checks.require(
        self,
        (
            self.final_fraction,
            'final_fraction',
            'must be above 0; an exponential never gets there',
        ),
    )

  def __call__(self, count: jax.Array) -> jax.Array:
    """Fraction of the peak for the update after `count` others."""
    begin = self.warmup_steps + self.stable_steps
    done = jnp.clip((count - begin) / self.decay_steps, 0.0, 1.0)
    return _ramp(count, self.warmup_steps) * self.final_fraction**done


def _matrix(path: tuple, x: jax.Array) -> bool:
  """True for weight matrices: norms and biases are not decayed.

  Layers are stacked on a leading axis, so a vector of theirs has two axes.
  """
  stacked = 'layers' in jax.tree_util.keystr(path, simple=True)
  return x.ndim >= (3 if stacked else 2)


def _matrices(params: optax.Params) -> optax.Params:
  return jax.tree_util.tree_map_with_path(_matrix, params)


# (reduction, output) axes of the stacked matrices that Muon orthogonalises;
# layers, experts and the two halves of w_in are matrices of their own.
_MUON_AXES = {
    'wq': ((1,), (2, 3)),
    'wk': ((1,), (2, 3)),
    'wv': ((1,), (2, 3)),
    'wo': ((1, 2), (3,)),
    'q_down': ((1,), (2,)),
    'q_up': ((1,), (2, 3)),
    'kv_down': ((1,), (2,)),
    'kv_up': ((1,), (2, 3)),
    'w_in': ((2,), (4,)),
    'w_out': ((2,), (3,)),
    'shared_in': ((1,), (3,)),
    'shared_out': ((1,), (2,)),
}


def _muon_axes(params: optax.Params) -> optax.Params:
  """`_MUON_AXES` by the last part of a leaf's name; None is left to Adam."""

  def axes(path, _):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    found = _MUON_AXES.get(name.rpartition('/')[2])
    return found and contrib.MuonDimensionNumbers(*found)

  return jax.tree_util.tree_map_with_path(axes, params)


_Rate = Annotated[float, Range(0, 10, above=True)]
_Decay = Annotated[float, Range(0, 1 - 1e-9)]  # of a moving average
_Norm = Annotated[float, Range(0, math.inf, above=True)]


@dataclasses.dataclass(frozen=True)
class AdamW:
  """AdamW after clipping the gradient by its global norm.

  Attributes:
    learning_rate: peak.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled, on matrices only.
    clip_norm: largest global norm of the gradient; inf does not clip.
    schedule: object that maps the number of updates to a fraction of the peak.
  """

  learning_rate: _Rate = 3e-4
  b1: _Decay = 0.9
  b2: _Decay = 0.95
  eps: Annotated[float, Range(0, 1, above=True)] = 1e-8
  weight_decay: Annotated[float, Range(0, 10)] = 0.0
  clip_norm: _Norm = 1.0
  schedule: Constant | Cosine | Wsd = Constant()

  def __post_init__(self):
    checks.fields(self)

  def rate(self, count: jax.Array) -> jax.Array:
    """Learning rate of the update after `count` others."""
    return self.learning_rate * self.schedule(count)

  def build(self) -> optax.GradientTransformation:
    """Call once per run: a rebuilt transformation is a new static argument."""
    return optax.chain(
        optax.clip_by_global_norm(self.clip_norm),
        optax.adamw(
            self.rate,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=_matrices,
        ),
    )


@dataclasses.dataclass(frozen=True)
class Muon:
  """Muon for the layers' matrices (each expert on its own), AdamW elsewhere.

  Updates are scaled to the RMS of AdamW's (Moonlight, arXiv 2502.16982), so
  one learning rate serves both.

  Attributes:
    learning_rate: peak.
    momentum: decay of the matrices' momentum.
    weight_decay: decoupled, on the matrices Muon updates.
    clip_norm: largest global norm of the gradient; inf does not clip.
    schedule: object that maps the number of updates to a fraction of the peak.
  """

  learning_rate: _Rate = 3e-4
  momentum: _Decay = 0.95
  weight_decay: Annotated[float, Range(0, 10)] = 0.0
  clip_norm: _Norm = 1.0
  schedule: Constant | Cosine | Wsd = Constant()

  def __post_init__(self):
    checks.fields(self)

  def rate(self, count: jax.Array) -> jax.Array:
    """Learning rate of the update after `count` others."""
    return self.learning_rate * self.schedule(count)

  def build(self) -> optax.GradientTransformation:
    """Call once per run: a rebuilt transformation is a new static argument."""
    return optax.chain(
        optax.clip_by_global_norm(self.clip_norm),
        contrib.muon(
            self.rate,
            beta=self.momentum,
            weight_decay=self.weight_decay,
            adam_b2=0.95,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=_muon_axes,
        ),
    )
