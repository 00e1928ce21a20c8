"""The trainer's forward: packed rows in, hidden states and routing out."""

from collections.abc import Callable
import math
from typing import NamedTuple

import jax
from jax import ad_checkpoint
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from composer_jax import config
from composer_jax import trace
from composer_jax.model import attention
from composer_jax.model import moe
from composer_jax.model import params as params_lib
from composer_jax.model import sharding
from composer_jax.typing import typed
from kernels_triton import attention as attention_kernel
from kernels_triton import logprob
from kernels_triton import router


class RouterStats(NamedTuple):
  """Sums over real tokens; they are added, never averaged."""

  probs: jax.Array  # f32 [L E], normalised scores; has a gradient
  load: jax.Array  # f32 [L E], tokens that were sent to an expert
  squares: jax.Array  # f32 [L], of the logsumexp of logits; has a gradient
  disagreeing: jax.Array  # f32 [], choices where live and used differ (x L)
  choices: jax.Array  # f32 [], choices that were replayed (x L)
  blank: jax.Array  # f32 [], real tokens without a recorded route (x L)


class Output(NamedTuple):
  hidden: jax.Array  # [B T D], before the final norm
  routing: jax.Array  # u8|u16 [B T L K]
  router_stats: RouterStats


def blank_routing(cfg: config.ModelConfig, *shape: int) -> jax.Array:
  """Routes [*shape L K] that leave every choice to the live router."""
  dtype = trace.route_dtype(cfg.experts)
  full = (*shape, cfg.moe_layers, cfg.top_k)
  return jnp.full(full, trace.blank_route(dtype), dtype)


def block(
    x: jax.Array,
    weights: params_lib.Layers,
    angles: jax.Array,
    recorded: jax.Array,
    attend: Callable[..., jax.Array],
    cfg: config.ModelConfig,
) -> tuple[jax.Array, moe.Routing]:
  """One layer on n rows; the one definition that both roles run.

  The names are what `inspect.ops` can record; they compile to nothing.

  Args:
    x: [n D].
    weights: of one layer.
    angles: f32 [n 2 H/2].
    recorded: [n K].
    attend: (q [n N H], k [n M H], v [n M H]) -> f32 [n N H].
    cfg: the model.

  Returns:
    (x [n D], routing).
  """
  name = ad_checkpoint.checkpoint_name
  x = name(x, 'layer input')
  q, k, v = attention.project(x, weights.attention, angles, cfg)
  q, k, v = name(q, 'query'), name(k, 'key'), name(v, 'value')
  attended = name(attend(q, k, v), 'attention')
  return moe.layer(x, attended, recorded, weights.attention, weights.moe, cfg)


def layer_inputs(routing: jax.Array) -> jax.Array:
  """Routes [B T L K] -> [L B*T K], the order of the scan over layers."""
  layers, k = routing.shape[-2:]
  tokens = math.prod(routing.shape[:-2])
  return routing.reshape(tokens, layers, k).transpose(1, 0, 2)


def _router_stats(
    routing: moe.Routing, recorded, real, cfg: config.ModelConfig
) -> RouterStats:
  """Sums of one layer over real tokens; real f32 [n]."""
  if not cfg.experts:
    none, zero = jnp.zeros(0), jnp.zeros(())
    return RouterStats(none, none, zero, zero, zero, zero)
  if cfg.router == router.SIGMOID:
    probs = jax.nn.sigmoid(routing.logits)
    probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
  else:
    probs = jax.nn.softmax(routing.logits, axis=-1)
  ids = jnp.arange(cfg.experts)[None, None, :]
  hits = jnp.sum(routing.experts[:, :, None] == ids, axis=1)
  blank = trace.blank_route(trace.route_dtype(cfg.experts))
  is_blank = (recorded[:, 0] == blank).astype(jnp.float32)
  replayed = real * (1.0 - is_blank)
  missing = jnp.all(
      routing.experts[:, :, None] != routing.live[:, None, :], axis=2
  )
  return RouterStats(
      probs=jnp.sum(probs * real[:, None], axis=0),
      load=jnp.sum(hits * real[:, None], axis=0),
      squares=jnp.sum(jnp.square(jax.nn.logsumexp(routing.logits, -1)) * real),
      disagreeing=jnp.sum(missing * replayed[:, None]),
      choices=jnp.sum(replayed) * cfg.top_k,
      blank=jnp.sum(real * is_blank),
  )


def attend_within(
    segments: jax.Array, positions: jax.Array, cfg: config.ModelConfig
) -> Callable[..., jax.Array]:
  """Attention of packed rows [B T], for `block` on their B*T tokens."""
  b, t = segments.shape

  def attend(q, k, v):
    q, k, v = (a.reshape(b, t, *a.shape[1:]) for a in (q, k, v))
    out = attention_kernel.segment_attention(
        q, k, v, segments, positions, implementation=cfg.kernels
    )
    return out.reshape(b * t, *out.shape[2:])

  return attend


@typed
def forward(
    params: params_lib.Params,
    tokens: Int[Array, 'B T'],
    segments: Int[Array, 'B T'],
    positions: Int[Array, 'B T'],
    *,
    cfg: config.ModelConfig,
    routing: Array | None = None,
) -> Output:
  """Runs the model on packed rows.

  Args:
    params: any float type; arithmetic is f32, activations are cfg.dtype. In a
      `shard_map`, the device's parts (see `sharding.RULES`).
    tokens: ids.
    segments: 0 = pad; a token sees its own segment only. A segment starts at
      a multiple of the attention key block (`learner.packing` sees to it).
    positions: within the segment.
    cfg: the model.
    routing: u8|u16 [B T L K] to replay; blank rows (and None) route live.

  Returns:
    hidden [B T D], the routing used, and router statistics.
  """
  b, t = tokens.shape
  if routing is None:
    routing = blank_routing(cfg, b, t)
  specs = params_lib.pspecs(params, sharding.RULES)
  embedding = sharding.whole(params.embedding, specs.embedding)
  x = embedding[tokens.reshape(-1)].astype(cfg.dtype)
  table = jnp.asarray(attention.rope_table(cfg, t))
  angles = table[positions.reshape(-1)]
  real = (segments.reshape(-1) > 0).astype(jnp.float32)
  attend = attend_within(segments, positions, cfg)

  def run(x, layers, specs, recorded, cfg):
    def body(x, xs):
      weights, recorded = xs
      weights = sharding.whole(weights, specs, skip=1)
      x, routed = block(x, weights, angles, recorded, attend, cfg)
      return x, (routed.experts, _router_stats(routed, recorded, real, cfg))

    # A layer that is gathered would be kept whole for the backward pass.
    if cfg.remat or sharding.size(sharding.FSDP) > 1:
      body = jax.checkpoint(body, prevent_cse=False)
    return lax.scan(body, x, (layers, layer_inputs(recorded)))

  if cfg.dense_layers:
    dense = cfg.dense()
    blank = blank_routing(dense, b, t)
    x, _ = run(x, params.dense_layers, specs.dense_layers, blank, dense)
  x, (experts, stats) = run(x, params.layers, specs.layers, routing, cfg)
  used = experts.transpose(1, 0, 2).reshape(routing.shape)
  stats = RouterStats(*stats[:3], *(jnp.sum(s) for s in stats[3:]))
  return Output(
      x.reshape(b, t, -1), used.astype(trace.route_dtype(cfg.experts)), stats
  )


@typed
def token_logps(
    params: params_lib.Params,
    hidden: Float[Array, 'B T D'],
    targets: Int[Array, 'B T'],
    *,
    cfg: config.ModelConfig,
) -> tuple[Float[Array, 'B T'], Float[Array, 'B T']]:
  """Log-prob of targets[b, t] given hidden[b, t], and the entropy there.

  Args:
    params: the model's.
    hidden: from `forward`.
    targets: ids; the caller shifts them.
    cfg: the model.

  Returns:
    (log-probs, entropy in nats); [B T V] is never held.
  """
  shape = targets.shape
  top = params.replace(dense_layers=None, layers=None, mtp=None)
  top = sharding.whole(top, params_lib.pspecs(top, sharding.RULES))
  logps, entropy = logprob.target_log_probs(
      (top.norm, top.head),
      hidden.reshape(-1, hidden.shape[-1]),
      targets.reshape(-1),
      cfg.norm_eps,
      implementation=cfg.kernels,
  )
  return logps.reshape(shape), entropy.reshape(shape)
