"""What the router is asked for besides the loss: that experts share the load."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax.learner import batch as batch_lib
from composer_jax.model import transformer


def loss(
    sums: transformer.RouterStats,
    here: jax.Array,
    tokens: jax.Array,
    cfg: config.ModelConfig,
    balancing: config.Balancing,
) -> tuple[jax.Array, batch_lib.Metrics]:
  """Load balancing loss and z-loss, each a mean over layers.

  The first is a product of means over one micro-batch, all devices together,
  so it depends on how a step is cut, but on nothing else; a micro-batch weighs
  by its tokens. The second is a mean over the tokens of the step.

  Args:
    sums: sums over the micro-batch.
    here: f32 [], real tokens of the micro-batch.
    tokens: f32 [], real tokens of the step.
    cfg: the model.
    balancing: weights.

  Returns:
    (loss of the step that this micro-batch adds f32 [], metrics).
  """
  slots = jnp.maximum(here * max(cfg.top_k, 1), 1.0)
  per_layer = cfg.experts * jnp.sum(sums.probs * sums.load / slots, axis=1)
  aux, squares = jnp.mean(per_layer), jnp.mean(sums.squares)
  mean = batch_lib.Mean
  metrics = {
      'routing/balance': mean(aux, here),
      'routing/z': mean(squares, here),
      'routing/load': mean(sums.load, here),
  }
  tokens = jnp.maximum(tokens, 1.0)
  return (balancing.aux * aux + balancing.z * squares) / tokens, metrics


@functools.partial(jax.jit, donate_argnums=0)
def rebias(
    state: batch_lib.TrainState, load: jax.Array, speed: float
) -> batch_lib.TrainState:
  """Moves every expert's bias by one step towards an equal load.

  Args:
    state: what the update made; it leaves the biases alone: they have neither a
      gradient nor weight decay.
    load: f32 [L E], tokens of the whole step that each expert got.
    speed: length of a step.
  """
  mean = jnp.mean(load, axis=1, keepdims=True)
  layers = state.params.layers
  bias = layers.moe.bias + speed * jnp.sign(mean - load)
  layers = layers.replace(moe=layers.moe.replace(bias=bias))
  return state.replace(params=state.params.replace(layers=layers))


def max_load(load: np.ndarray) -> float:
  """Tokens of the busiest expert of any layer over those of an average one."""
  if not load.size:
    return 0.0
  return float((load / np.maximum(load.mean(1, keepdims=True), 1e-9)).max())
