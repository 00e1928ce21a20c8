"""Optimizers as configuration: hashable by value, built once per run."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from optax import contrib


def _schedule(
    peak: float, warmup_steps: int, decay_steps: int | None, final: float
) -> optax.Schedule:
  """Linear warmup, then constant or a cosine down to `final * peak`.

  The first update already moves: it uses peak / warmup_steps, not 0.
  """

  def at(count):
    rate = peak * jnp.minimum(1.0, (count + 1) / max(warmup_steps, 1))
    if decay_steps is None:
      return rate
    done = jnp.clip((count - warmup_steps) / decay_steps, 0.0, 1.0)
    return rate * (final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * done)))

  return at


def _matrix(path: tuple, x: jax.Array) -> bool:
  """True for weight matrices: norms and biases are not decayed.

  Layers are stacked on a leading axis, so a vector of theirs has two axes.
  """
  stacked = 'layers' in jax.tree_util.keystr(path[:1], simple=True)
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


def _check(owner: AdamW | Muon) -> None:
  for field, ok in (
      ('learning_rate', owner.learning_rate > 0),
      ('clip_norm', owner.clip_norm > 0),
      ('warmup_steps', owner.warmup_steps >= 0),
      ('decay_steps', owner.decay_steps is None or owner.decay_steps > 0),
  ):
    if not ok:
      raise ValueError(
          f'{type(owner).__name__}.{field}={getattr(owner, field)}: must be'
          ' positive'
      )


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
    warmup_steps: of a linear ramp.
    decay_steps: of the cosine after it; None stays at the peak.
    final_fraction: of the peak, where the cosine ends.
  """

  learning_rate: float = 3e-4
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0
  clip_norm: float = 1.0
  warmup_steps: int = 0
  decay_steps: int | None = None
  final_fraction: float = 0.1

  def __post_init__(self):
    _check(self)

  def schedule(self) -> optax.Schedule:
    return _schedule(
        self.learning_rate,
        self.warmup_steps,
        self.decay_steps,
        self.final_fraction,
    )

  def build(self) -> optax.GradientTransformation:
    """Call once per run: a rebuilt transformation is a new static argument."""
    return optax.chain(
        optax.clip_by_global_norm(self.clip_norm),
        optax.adamw(
            self.schedule(),
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
    momentum: of the matrices.
    weight_decay: decoupled, on the matrices Muon updates.
    clip_norm: largest global norm of the gradient; inf does not clip.
    warmup_steps: of a linear ramp.
    decay_steps: of the cosine after it; None stays at the peak.
    final_fraction: of the peak, where the cosine ends.
  """

  learning_rate: float = 3e-4
  momentum: float = 0.95
  weight_decay: float = 0.0
  clip_norm: float = 1.0
  warmup_steps: int = 0
  decay_steps: int | None = None
  final_fraction: float = 0.1

  def __post_init__(self):
    _check(self)

  def schedule(self) -> optax.Schedule:
    return _schedule(
        self.learning_rate,
        self.warmup_steps,
        self.decay_steps,
        self.final_fraction,
    )

  def build(self) -> optax.GradientTransformation:
    """Call once per run: a rebuilt transformation is a new static argument."""
    return optax.chain(
        optax.clip_by_global_norm(self.clip_norm),
        contrib.muon(
            self.schedule(),
            beta=self.momentum,
            weight_decay=self.weight_decay,
            adam_b2=0.95,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=_muon_axes,
        ),
    )
