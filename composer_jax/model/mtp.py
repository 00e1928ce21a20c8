"""Multi-token prediction: a layer for every token after the next one.

Module k sees, at a token, the state of module k - 1 (of the model, for k = 1)
and the embedding of the token k ahead, and predicts the one behind that
(DeepSeek-V3, arXiv 2412.19437, section 2.2). Embedding and head are the model's.
Only training runs it; nothing in decode knows of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
from jax import lax
import jax.numpy as jnp

from composer_jax import config
from composer_jax.model import attention
from composer_jax.model import params as params_lib
from composer_jax.model import sharding
from composer_jax.model import transformer
from kernels_triton import contract


def ahead(x: jax.Array, k: int) -> jax.Array:
  """x [B T ...] of the token k places on; the end of a row wraps around."""
  return jnp.roll(x, -k, axis=1)


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  x = x.astype(jnp.float32)
  x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
  return x * jnp.expand_dims(weight, range(x.ndim - 1))


def states(
    params: params_lib.Params,
    hidden: jax.Array,
    tokens: jax.Array,
    segments: jax.Array,
    positions: jax.Array,
    *,
    cfg: config.ModelConfig,
) -> Iterator[jax.Array]:
  """Yields the state [B T D] of every module.

  What lies k tokens ahead may be of the next segment. Such a token has nothing
  left to predict, and none of its own segment attends to it before.

  Args:
    params: with `mtp`; in a `shard_map`, the device's parts.
    hidden: [B T D], of the model, before its final norm.
    tokens: i32 [B T].
    segments: i32 [B T].
    positions: i32 [B T].
    cfg: the model.
  """
  specs = params_lib.pspecs(params, sharding.RULES)
  embedding = sharding.whole(params.embedding, specs.embedding)
  table = jnp.asarray(attention.rope_table(cfg, tokens.shape[1]))
  angles = table[positions.reshape(-1)]
  attend = transformer.attend_within(segments, positions, cfg)
  blank = transformer.blank_routing(cfg, tokens.size)
  for k in range(1, cfg.mtp_layers + 1):
    part = jax.tree.map(lambda x, k=k: x[k - 1], params.mtp)
    part = sharding.whole(part, specs.mtp, skip=1)
    seen = _norm(embedding[ahead(tokens, k)], part.token_norm, cfg.norm_eps)
    hidden = _norm(hidden, part.norm, cfg.norm_eps)
    x = hidden @ part.project[0] + seen @ part.project[1]
    x = x.reshape(-1, cfg.embed).astype(cfg.dtype)
    x, _ = transformer.block(x, part.layers, angles, blank[:, 0], attend, cfg)
    hidden = x.reshape(hidden.shape)
    yield hidden


def divergence(
    params: params_lib.Params,
    hidden: jax.Array,
    out_norm: jax.Array,
    state: jax.Array,
    *,
    cfg: config.ModelConfig,
) -> jax.Array:
  """KL of a module's distributions from the model's own, a block at a time.

  Args:
    params: the model's; `norm` is of `hidden`.
    hidden: [B T D], of the model, where it predicts the same tokens.
    out_norm: [D], of `state`.
    state: [B T D], of the module.
    cfg: the model.

  Returns:
    f32 [B T], nats.
  """
  specs = params_lib.pspecs(params, sharding.RULES)
  whole = lambda x, spec: sharding.whole(x, spec).astype(jnp.float32)
  norm = whole(params.norm, specs.norm)
  out_norm = whole(out_norm, specs.norm)
  if params.unembed is None:
    head = whole(params.embedding, specs.embedding).T
  else:
    head = whole(params.unembed, specs.unembed)

  @jax.checkpoint
  def block(rows):
    own, drafted = rows
    want = jax.nn.log_softmax(_norm(own, norm, cfg.norm_eps) @ head)
    have = jax.nn.log_softmax(_norm(drafted, out_norm, cfg.norm_eps) @ head)
    return jnp.sum(jnp.exp(want) * (want - have), axis=-1)

  cut = lambda x: x.reshape(-1, contract.KEY_BLOCK, cfg.embed)
  return lax.map(block, (cut(hidden), cut(state))).reshape(state.shape[:2])
