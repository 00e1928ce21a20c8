"""The loss of multi-token prediction."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from composer_jax import config
from composer_jax.learner import batch as batch_lib
from composer_jax.model import mtp as model
from composer_jax.model import params as params_lib
from composer_jax.model import transformer


def loss(
    params: params_lib.Params,
    hidden: jax.Array,
    batch: batch_lib.Batch,
    mtp: config.Mtp,
    cfg: config.ModelConfig,
) -> tuple[jax.Array, jax.Array]:
  """Nats that the modules pay for trained tokens of this device's rows.

  Args:
    params: masters with `mtp`, unless its weight is 0.
    hidden: [B T D], final states of the model.
    batch: [B T].
    mtp: the objective; with weight 0 nothing is computed.
    cfg: the model.

  Returns:
    (sum over tokens, mean over modules; tokens, likewise), f32 [].
  """
  total = count = jnp.zeros(())
  if not mtp.weight:
    return total, count
  if mtp.distill:
    fixed = lax.stop_gradient(params.replace(mtp=None))
    params, hidden = fixed.replace(mtp=params.mtp), lax.stop_gradient(hidden)
  found = model.states(
      params, hidden, batch.tokens, batch.segments, batch.positions, cfg=cfg
  )
  for k, state in enumerate(found, 1):
    target, out_norm = k + 1, params.mtp.out_norm[k - 1]
    # The token predicted is of the same segment and not around the row's end.
    mask = model.ahead(batch.sampled, target)
    mask &= model.ahead(batch.segments, target) == batch.segments
    mask &= model.ahead(batch.positions, target) == batch.positions + target
    if mtp.distill:
      own = model.ahead(hidden, k)
      nats = model.divergence(params, own, out_norm, state, cfg=cfg)
    else:
      shared = params.replace(norm=out_norm)
      wanted = model.ahead(batch.tokens, target)
      logps, _ = transformer.token_logps(shared, state, wanted, cfg=cfg)
      nats = -logps
    total += jnp.sum(jnp.where(mask, nats, 0.0)) / cfg.mtp_layers
    count += jnp.sum(mask) / cfg.mtp_layers
  return total, count
