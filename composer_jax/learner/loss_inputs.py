"""What a loss sees of a batch, and how far trainer and rollouts are apart."""

from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp

from composer_jax.learner import batch as batch_lib

Batch = batch_lib.Batch
TokenStats = batch_lib.TokenStats


def masked(batch: Batch, logps, entropy, ref_logps) -> TokenStats:
  """What the loss sees; entries that are not trained are exactly zero."""
  mask = batch.sampled & (batch.segments > 0) & (batch.positions > 0)
  keep = lambda x: jnp.where(mask, x, 0.0)
  return TokenStats(
      logps=keep(logps),
      behaviour_logps=keep(batch.behaviour_logps),
      advantages=keep(batch.advantages),
      entropy=lax.stop_gradient(keep(entropy)),
      mask=mask.astype(jnp.float32),
      staleness=batch.staleness,
      rollouts=batch.rollouts,
      ref_logps=None if ref_logps is None else keep(ref_logps),
  )


def _same_version(batch: Batch) -> jax.Array:
  """bool [B T]: token and everything before it came from current weights."""
  stale = (batch.staleness != 0).astype(jnp.int32)
  seen = jnp.cumsum(stale, axis=1)
  start = jnp.arange(stale.shape[1])[None, :] - batch.positions
  before = jnp.take_along_axis(seen - stale, start, axis=1)
  return seen == before


def mismatch(batch: Batch, stats: TokenStats) -> batch_lib.Metrics:
  """k3 estimate of KL(behaviour || trainer), fresh and stale apart."""
  log_ratio = stats.logps - stats.behaviour_logps
  k3 = jnp.exp(log_ratio) - 1.0 - log_ratio
  same = stats.mask * _same_version(batch)
  mean, peak = batch_lib.Mean.of, batch_lib.Max.of
  return {
      'mismatch/kl_same_version': mean(k3, same),
      'mismatch/kl_stale': mean(k3, stats.mask - same),
      'mismatch/max_same_version': peak(
          jnp.where(same > 0, jnp.abs(log_ratio), 0.0), stats.mask
      ),
      'mismatch/same_version_share': mean(same, stats.mask),
      'mismatch/beyond_ln2': mean(
          (jnp.abs(log_ratio) > jnp.log(2.0)).astype(jnp.float32), stats.mask
      ),
      'mismatch/max_log_ratio': peak(jnp.abs(log_ratio), stats.mask),
      'staleness/token_mean': mean(
          batch.staleness.astype(jnp.float32), stats.mask
      ),
      'entropy': mean(stats.entropy, stats.mask),
  }


def per_token(
    loss: batch_lib.Loss, stats: TokenStats
) -> tuple[jax.Array, batch_lib.Metrics]:
  """What a loss returns, (its value for every token, metrics).

  Raises:
    ValueError: it returns something else than one value per token.
  """
  values, metrics = loss(stats)
  if values.shape != stats.mask.shape:
    raise ValueError(
        f'loss {type(loss).__name__} returned shape {values.shape}: want'
        f' one value per token, {stats.mask.shape}'
    )
  return values, metrics


def needs_reference(loss: batch_lib.Loss) -> bool:
  """True for a loss that declares that it reads `TokenStats.ref_logps`."""
  return getattr(loss, 'needs_reference', False)


def check_loss(loss: batch_lib.Loss) -> None:
  """Traces a loss on shapes alone, so that a mistake shows before a run does.

  Raises:
    ValueError: as `per_token`.
  """
  real = jax.ShapeDtypeStruct((2, 8), jnp.float32)
  whole = jax.ShapeDtypeStruct((2, 8), jnp.int32)
  stats = TokenStats(
      logps=real,
      behaviour_logps=real,
      advantages=real,
      entropy=real,
      mask=real,
      staleness=whole,
      rollouts=whole,
      ref_logps=real if needs_reference(loss) else None,
  )
  jax.eval_shape(functools.partial(per_token, loss), stats)
