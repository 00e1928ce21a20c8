"""Drawing tokens: Gumbel-max keyed by the request, never by the batch.

The noise of a token is a function of (request seed, position of the token)
alone. Its slot, the size of the batch and the order of arrival do not enter,
so a request is answered with the same tokens whatever runs beside it. Cuts,
penalties (`shape`) and constraints (`mask`) are for people who are served, never
for training: such a sample has another distribution than the log-prob recorded
for it, and would bias every importance ratio.
"""

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from composer_jax.typing import typed
from kernels_triton import rows

_MANTISSA_BITS = 23  # of a float32


def _random_bits(seed: jax.Array, position: jax.Array, size: int) -> jax.Array:
  key = jax.random.key(seed, impl='threefry2x32')
  return jax.random.bits(jax.random.fold_in(key, position), (size,))


def _scores(_, logps, bits, temperatures):
  """Tempered log-probs plus noise, [R V]; plain log-probs at temperature 0."""
  # Uniform in [tiny, 1): the high bits become the mantissa of [1, 2).
  high = (bits >> (32 - _MANTISSA_BITS)) | jnp.uint32(0x3F800000)
  uniform = lax.bitcast_convert_type(high, jnp.float32) - 1.0
  uniform = jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)
  gumbel = -jnp.log(-jnp.log(uniform))
  hot = temperatures[:, None] > 0
  tempered = logps / jnp.where(hot, temperatures[:, None], 1.0)
  return jnp.where(hot, tempered + gumbel, logps)


@typed
def shape(
    logps: Float32[Array, 'n V'],
    counts: Int32[Array, 'n V'],
    prompted: Bool[Array, 'n V'],
    temperatures: Float32[Array, ' n'],
    shaping: Float32[Array, 'n 6'],
) -> Float32[Array, 'n V']:
  """Log-probs to draw from instead, not normalized, -inf where cut.

  Args:
    logps: log-softmax of the model.
    counts: how often a token was sampled for the request.
    prompted: whether it is in the prompt.
    temperatures: as in `sample`, which is to have them too.
    shaping: fields of `slots.Shaping`.
  """
  top_p, top_k, min_p, frequency, presence, repetition = (
      shaping[:, i, None] for i in range(6)
  )
  repeated = prompted | (counts > 0)
  # Log-probs are logits that are nowhere above 0.
  out = jnp.where(repeated, logps * repetition, logps)
  out = out - frequency * counts - presence * (counts > 0)
  heat = jnp.where(temperatures > 0, temperatures, 1.0)[:, None]
  probs = jax.nn.softmax(out / heat, axis=-1)
  order = -jnp.sort(-probs, axis=-1)
  below = jnp.cumsum(order, axis=-1) - order  # mass of what is likelier
  rank = jnp.arange(probs.shape[1], dtype=jnp.float32)[None, :]
  kept = (below < top_p) & ((rank < top_k) | (top_k <= 0))
  least = jnp.min(jnp.where(kept, order, jnp.inf), axis=-1, keepdims=True)
  least = jnp.maximum(least, min_p * order[:, :1])
  return jnp.where(probs >= least, out, -jnp.inf)


@typed
def mask(
    logps: Float32[Array, 'n V'], allowed: Int32[Array, 'n words']
) -> Float32[Array, 'n V']:
  """-inf for tokens that may not be drawn.

  Args:
    logps: log-softmax of the model.
    allowed: token i is bit i % 32 of word i // 32.
  """
  ids = jnp.arange(logps.shape[1], dtype=jnp.int32)
  bits = (allowed[:, ids >> 5] >> (ids & 31)[None, :]) & 1
  return jnp.where(bits > 0, logps, -jnp.inf)


@typed
def sample(
    logps: Float32[Array, 'n V'],
    seeds: UInt32[Array, ' n'],
    positions: Int32[Array, ' n'],
    temperatures: Float32[Array, ' n'],
    implementation: str | None = None,
) -> tuple[Int32[Array, ' n'], Float32[Array, ' n']]:
  """Draws one token per row.

  Args:
    logps: log-softmax of the model.
    seeds: seeds of the requests.
    positions: index in its sequence of the token to draw.
    temperatures: 0 takes the likeliest token, the lowest id on a tie.
    implementation: choice of the model's kernels; see `kernels_triton.launch`.

  Returns:
    (tokens, log-probs of the tokens under `logps`, which is temperature 1).
  """
  size = logps.shape[1]
  # Integers are exact in any shape; only floats need blocks of one shape.
  bits = jax.vmap(_random_bits, in_axes=(0, 0, None))(seeds, positions, size)
  scores = rows.run_rows(
      _scores, None, logps, bits, temperatures, implementation=implementation
  )
  # Two plain reductions vectorise better than an argmax.
  peak = jnp.max(scores, axis=-1, keepdims=True)
  peak = lax.optimization_barrier(peak)
  ids = jnp.arange(size, dtype=jnp.int32)[None, :]
  tokens = jnp.min(jnp.where(scores == peak, ids, size), axis=-1)
  return tokens, jnp.take_along_axis(logps, tokens[:, None], axis=1)[:, 0]
