"""The rollout side's forward: tokens in, keys and values into pages.

Prompts and sampled tokens take one path; a chunk of a prompt is many tokens of
one sequence, a decode step one token of many. Same layer function, same blocks
and same constants as the trainer's forward, hence the same bits, however a
prompt is cut and wherever its pages lie (`tests/bitwise_test.py`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from composer_jax import config
from composer_jax import trace
from composer_jax.model import attention
from composer_jax.model import params as params_lib
from composer_jax.model import transformer
from composer_jax.typing import typed
from kernels_triton import attention as attention_kernel
from kernels_triton import contract
from kernels_triton import logprob


class Pages(NamedTuple):
  """Keys and values per layer, so that an update touches one layer's array.

  In latent attention a value is the first columns of its key, and v is empty.
  """

  k: tuple[jax.Array, ...]  # L x [P M KEY_BLOCK H]
  v: tuple[jax.Array, ...]


def init_pages(cfg: config.ModelConfig, count: int) -> Pages:
  """`count` empty pages of KEY_BLOCK tokens each."""
  width = cfg.kv_latent + cfg.rope_dim if cfg.kv_latent else cfg.head_dim
  shape = (count, cfg.kv_heads, contract.KEY_BLOCK, width)
  zeros = lambda: tuple(jnp.zeros(shape, cfg.dtype) for _ in range(cfg.layers))
  return Pages(zeros(), () if cfg.kv_latent else zeros())


def _layer(
    params: params_lib.Params,
    layer: int,
    recorded: jax.Array,
    cfg: config.ModelConfig,
) -> tuple[params_lib.Layers, config.ModelConfig, jax.Array]:
  """Weights of a layer, the model that it is of, and its routes [n K]."""
  stack, i, of = params.layers, layer - cfg.dense_layers, cfg
  if i < 0:
    stack, i, of = params.dense_layers, layer, cfg.dense()
    recorded = transformer.blank_routing(of, recorded.shape[0])
  return jax.tree.map(lambda w: w[i], stack), of, recorded[:, i]


def _forward(
    params: params_lib.Params,
    pages: Pages,
    tokens: jax.Array,
    positions: jax.Array,
    table: jax.Array,
    recorded: jax.Array,
    attend: Callable[..., jax.Array],
    cfg: config.ModelConfig,
) -> tuple[jax.Array, Pages, jax.Array]:
  """Feeds n tokens, each with its sequence's row of the page table.

  Args:
    params: the model's.
    pages: to write to.
    tokens: i32 [n].
    positions: i32 [n], below 0 for padding, which writes nothing.
    table: i32 [n S/KEY_BLOCK].
    recorded: u8|u16 [n L K].
    attend: (q [n N H], keys, values of the layer's pages) -> f32 [n N H].
    cfg: the model.

  Returns:
    (hidden [n D], pages, routing u8|u16 [n L K]).
  """
  size = contract.KEY_BLOCK
  x = params.embedding[tokens].astype(cfg.dtype)
  at = jnp.maximum(positions, 0)
  angles = jnp.asarray(attention.rope_table(cfg, table.shape[1] * size))[at]
  page = jnp.take_along_axis(table, at[:, None] // size, axis=1)[:, 0]
  page = jnp.where(positions < 0, pages.k[0].shape[0], page)
  new_k, new_v, chosen = [], [], []
  for layer in range(cfg.layers):
    weights, of, routes = _layer(params, layer, recorded, cfg)

    def paged(q, k, v, i=layer):
      put = lambda old, new: old.at[page, :, at % size].set(new, mode='drop')
      new_k.append(put(pages.k[i], k))
      if cfg.kv_latent:
        return attend(q, new_k[i], new_k[i])
      new_v.append(put(pages.v[i], v))
      return attend(q, new_k[i], new_v[i])

    x, routed = transformer.block(x, weights, angles, routes, paged, of)
    if layer >= cfg.dense_layers:
      chosen.append(routed.experts)
  routing = jnp.stack(chosen, axis=1).astype(trace.route_dtype(cfg.experts))
  return x, Pages(tuple(new_k), tuple(new_v)), routing


@typed
def prefill(
    params: params_lib.Params,
    pages: Pages,
    tokens: Int[Array, 'B Q'],
    positions: Int[Array, 'B Q'],
    table: Int[Array, 'B W'],
    *,
    cfg: config.ModelConfig,
    routing: Array | None = None,
) -> tuple[Pages, Array]:
  """Feeds tiles of Q = QUERY_ROWS consecutive tokens of any sequences.

  Every token sees what its pages hold up to its own position, so all the
  earlier tokens of its sequence are in this call or were in a previous one.

  Args:
    params: the model's.
    pages: to write to; donate them.
    tokens: ids.
    positions: in the sequence; below 0 for padding, which writes nothing.
    table: pages of each tile's sequence; an entry past the pool is skipped.
    cfg: the model.
    routing: u8|u16 [B Q L K] recorded earlier (it is obeyed), or None.

  Returns:
    (pages, routing of every token u8|u16 [B Q L K]).
  """
  b, q_rows = tokens.shape
  if routing is None:
    routing = transformer.blank_routing(cfg, b, q_rows)

  def attend(q, k_pages, v_pages):
    q = q.reshape(b, q_rows, *q.shape[1:])
    out = attention_kernel.paged_attention(
        q,
        k_pages,
        v_pages,
        table,
        positions,
        width=cfg.kv_latent or None,
        implementation=cfg.kernels,
    )
    return out.reshape(b * q_rows, *out.shape[2:])

  _, pages, used = _forward(
      params,
      pages,
      tokens.reshape(-1),
      positions.reshape(-1),
      jnp.repeat(table, q_rows, axis=0),
      routing.reshape(b * q_rows, *routing.shape[2:]),
      attend,
      cfg,
  )
  return pages, used.reshape(routing.shape)


@typed
def step(
    params: params_lib.Params,
    pages: Pages,
    tokens: Int[Array, ' n'],
    positions: Int[Array, ' n'],
    table: Int[Array, 'n W'],
    *,
    cfg: config.ModelConfig,
    routing: Array | None = None,
) -> tuple[Array, Pages, Array]:
  """Feeds one token to each of n sequences.

  Args:
    params: the model's.
    pages: to write to; donate them.
    tokens: ids to feed.
    positions: where they stand; below 0 for a row that is not used.
    table: pages of each sequence; an entry past the pool is skipped.
    cfg: the model.
    routing: u8|u16 [n L K] recorded earlier (it is obeyed), or None.

  Returns:
    (log-probs of the next token f32 [n V], pages, routing u8|u16 [n L K]).
  """
  if routing is None:
    routing = transformer.blank_routing(cfg, tokens.shape[0])

  def attend(q, k_pages, v_pages):
    return attention_kernel.paged_decode_attention(
        q,
        k_pages,
        v_pages,
        table,
        positions,
        width=cfg.kv_latent or None,
        implementation=cfg.kernels,
    )

  x, pages, used = _forward(
      params, pages, tokens, positions, table, routing, attend, cfg
  )
  logps = logprob.log_probs(
      (params.norm, params.head),
      x,
      eps=cfg.norm_eps,
      implementation=cfg.kernels,
  )
  return logps, pages, used
