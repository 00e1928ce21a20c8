"""Softmax router: top-k choice, replayed choice, gates. Runs in a row block."""

import jax
from jax import lax
import jax.numpy as jnp


def select(logits: jax.Array, top_k: int) -> jax.Array:
  """Ids of the k largest logits; a tie goes to the lowest id.

  Args:
    logits: f32 [R E].
    top_k: k.

  Returns:
    i32 [R K], best first.
  """
  ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
  left = lax.stop_gradient(logits)
  chosen = []
  for _ in range(top_k):
    peak = jnp.max(left, axis=-1, keepdims=True)
    best = jnp.min(jnp.where(left == peak, ids, ids.size), axis=-1)
    chosen.append(best)
    left = jnp.where(ids == best[:, None], -jnp.inf, left)
  return jnp.stack(chosen, axis=-1).astype(jnp.int32)


def replayed(live: jax.Array, recorded: jax.Array, blank: int) -> jax.Array:
  """Recorded ids where a row was recorded, the live choice where blank.

  Args:
    live: i32 [R K].
    recorded: unsigned [R K]; a row is blank iff its first id is `blank`.
    blank: `trace.blank_route`.

  Returns:
    i32 [R K].
  """
  is_blank = recorded[:, :1] == blank
  return jnp.where(is_blank, live, recorded.astype(jnp.int32))


def gates(logits: jax.Array, experts: jax.Array) -> jax.Array:
  """Softmax over the chosen experts only (renormalised top-k).

  Always recomputed from live logits, so a replayed choice still gives the
  router its gradient.

  Args:
    logits: f32 [R E].
    experts: i32 [R K].

  Returns:
    f32 [R K], rows summing to 1.
  """
  ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
  peak = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  weights = jnp.exp(logits - peak)
  picked = [
      jnp.sum(jnp.where(ids == experts[:, i, None], weights, 0.0), axis=-1)
      for i in range(experts.shape[-1])
  ]
  total = picked[0]
  for p in picked[1:]:  # fixed order: a reduce may associate differently
    total = total + p
  return jnp.stack(picked, axis=-1) / total[:, None]
