"""The rollout side's forward: prefill, then one token at a time from a cache.

Same layer function, same blocks and same constants as the trainer's forward,
hence the same bits (`tests/bitwise_test.py`).
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Int

from composer_jax import config
from composer_jax import trace
from composer_jax.model import attention
from composer_jax.model import params as params_lib
from composer_jax.model import transformer
from composer_jax.typing import typed
from kernels_triton import attention as attention_kernel
from kernels_triton import logprob


class Cache(NamedTuple):
  """Keys and values per layer, so that an update touches one layer's array."""

  k: tuple[jax.Array, ...]  # L x [slots M S H]
  v: tuple[jax.Array, ...]


class Prefill(NamedTuple):
  k: jax.Array  # [L P M T H]
  v: jax.Array  # [L P M T H]
  logps: jax.Array  # f32 [P V], of the token after the last real one
  routing: jax.Array  # u8|u16 [P T L K]


def init_cache(cfg: config.ModelConfig, slots: int, length: int) -> Cache:
  """An empty cache for `slots` sequences of at most `length` tokens."""
  shape = (slots, cfg.kv_heads, length, cfg.head_dim)
  zeros = lambda: tuple(jnp.zeros(shape, cfg.dtype) for _ in range(cfg.layers))
  return Cache(zeros(), zeros())


def _head(params, hidden, cfg):
  return logprob.log_probs(
      (params.norm, params.unembed),
      hidden,
      eps=cfg.norm_eps,
      implementation=cfg.kernels,
  )


@typed
def prefill(
    params: params_lib.Params,
    tokens: Int[Array, 'P T'],
    lengths: Int[Array, ' P'],
    *,
    cfg: config.ModelConfig,
    routing: Array | None = None,
) -> Prefill:
  """Computes keys, values and routing of whole prompts.

  Args:
    params: the model's.
    tokens: prompts, padded at the end; T a multiple of the key block.
    lengths: real tokens of each row, at least 1.
    cfg: the model.
    routing: u8|u16 [P T L K] recorded earlier (it is obeyed), or None.

  Returns:
    The cache rows, next-token log-probs and the routing of every token.
  """
  p, t = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (p, t))
  segments = (positions < lengths[:, None]).astype(jnp.int32)
  if routing is None:
    routing = transformer.blank_routing(cfg, p, t)
  x = params.embedding[tokens.reshape(-1)].astype(cfg.dtype)
  angles = jnp.asarray(attention.rope_table(cfg, t))[positions.reshape(-1)]

  def body(x, xs):
    weights, recorded = xs
    kv = []

    def attend(q, k, v):
      q, k, v = (a.reshape(p, t, *a.shape[1:]) for a in (q, k, v))
      kv.extend((k, v))
      out = attention_kernel.segment_attention(
          q, k, v, segments, positions, implementation=cfg.kernels
      )
      return out.reshape(p * t, *out.shape[2:])

    x, routed = transformer.block(x, weights, angles, recorded, attend, cfg)
    k, v = (attention_kernel.heads_first(a) for a in kv)
    return x, (k, v, routed.experts)

  x, (k, v, experts) = lax.scan(
      body, x, (params.layers, transformer.layer_inputs(routing))
  )
  last = x.reshape(p, t, -1)[jnp.arange(p), lengths - 1]
  used = experts.transpose(1, 0, 2).reshape(p, t, cfg.layers, cfg.top_k)
  used = used.astype(trace.route_dtype(cfg.experts))
  return Prefill(k, v, _head(params, last, cfg), used)


@typed
def insert(
    cache: Cache,
    k: Array,
    v: Array,
    rows: Int[Array, ' n'],
    slots: Int[Array, ' n'],
) -> Cache:
  """Copies prefilled rows to slots: one row may fill a whole group's slots.

  Args:
    cache: to update (donate it).
    k: [L P M T H] of a `Prefill`, T at most the cache's length.
    v: [L P M T H].
    rows: which prefilled row, per target.
    slots: which slot, per target; a slot past the end is skipped.

  Returns:
    The updated cache.
  """

  def put(old, new):
    return tuple(
        o.at[slots, :, : n.shape[2]].set(n[rows], mode='drop')
        for o, n in zip(old, new, strict=True)
    )

  return Cache(put(cache.k, k), put(cache.v, v))


@typed
def step(
    params: params_lib.Params,
    cache: Cache,
    tokens: Int[Array, ' n'],
    positions: Int[Array, ' n'],
    *,
    cfg: config.ModelConfig,
) -> tuple[Array, Cache, Array]:
  """Feeds one token to each of the first n slots.

  Args:
    params: the model's.
    cache: [slots >= n ...]; donate it.
    tokens: ids to feed.
    positions: where they stand, below the cache's length.
    cfg: the model.

  Returns:
    (log-probs of the next token f32 [n V], cache, routing u8|u16 [n L K]).
  """
  n = tokens.shape[0]
  length = cache.k[0].shape[2]
  x = params.embedding[tokens].astype(cfg.dtype)
  angles = jnp.asarray(attention.rope_table(cfg, length))[positions]
  blank = transformer.blank_routing(cfg, n)[:, 0]
  ids = jnp.arange(n)
  new_k, new_v, chosen = [], [], []
  for layer in range(cfg.layers):
    weights = jax.tree.map(lambda w, i=layer: w[i], params.layers)

    def attend(q, k, v, i=layer):
      keys = cache.k[i].at[ids, :, positions].set(k, unique_indices=True)
      values = cache.v[i].at[ids, :, positions].set(v, unique_indices=True)
      new_k.append(keys)
      new_v.append(values)
      return attention_kernel.decode_attention(
          q, keys[:n], values[:n], positions, implementation=cfg.kernels
      )

    x, routed = transformer.block(x, weights, angles, blank, attend, cfg)
    chosen.append(routed.experts)
  routing = jnp.stack(chosen, axis=1).astype(trace.route_dtype(cfg.experts))
  cache = Cache(tuple(new_k), tuple(new_v))
  return _head(params, x, cfg), cache, routing
