"""One declaration per tensor: shape, logical axes and initialiser.

Abstract shapes, initial values, partition specs and tensor names (checkpoints,
deltas) all derive from the fields below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import hashlib
import math
import typing
from typing import Any

from flax import struct
import jax
from jax.sharding import PartitionSpec
import jax.numpy as jnp

from composer_jax import config


def _param(dims: str, init: str = 'normal') -> Any:
  return dataclasses.field(metadata={'dims': dims, 'init': init})


@struct.dataclass
class Attention:
  """Grouped-query (wk, wv and what follows) or latent (the rest)."""

  norm: jax.Array = _param('layers embed', 'ones')
  wq: jax.Array = _param('layers embed q_heads q_dim')
  wk: jax.Array = _param('layers embed kv_heads head_dim')
  wv: jax.Array = _param('layers embed kv_heads head_dim')
  wo: jax.Array = _param('layers q_heads value_dim embed', 'residual')
  bq: jax.Array = _param('layers q_bias head_dim', 'zeros')
  bk: jax.Array = _param('layers kv_bias head_dim', 'zeros')
  bv: jax.Array = _param('layers kv_bias head_dim', 'zeros')
  q_norm: jax.Array = _param('layers qk_norm', 'ones')
  k_norm: jax.Array = _param('layers qk_norm', 'ones')
  q_down: jax.Array = _param('layers embed q_latent')
  q_latent_norm: jax.Array = _param('layers q_latent', 'ones')
  q_up: jax.Array = _param('layers q_latent q_heads qk_dim')
  kv_down: jax.Array = _param('layers embed latent_rope')
  kv_latent_norm: jax.Array = _param('layers kv_latent', 'ones')
  # Of keys, then of values.
  kv_up: jax.Array = _param('layers kv_latent q_heads kv_dim')


@struct.dataclass
class Moe:
  norm: jax.Array = _param('layers embed', 'ones')
  router: jax.Array = _param('layers embed router')
  w_in: jax.Array = _param('layers experts embed gates moe_ffn')
  w_out: jax.Array = _param('layers experts moe_ffn embed', 'residual')
  bias: jax.Array = _param('layers router_bias', 'zeros')
  shared_in: jax.Array = _param('layers embed gates shared_ffn')
  shared_out: jax.Array = _param('layers shared_ffn embed', 'residual')
  shared_gate: jax.Array = _param('layers embed shared_gate')


@struct.dataclass
class Layers:
  attention: Attention
  moe: Moe


@struct.dataclass
class MtpParams:
  """One layer for every further token that is predicted; see `model.mtp`."""

  norm: jax.Array = _param('layers embed', 'ones')
  token_norm: jax.Array = _param('layers embed', 'ones')
  project: jax.Array = _param('layers halves embed width')
  layers: Layers
  out_norm: jax.Array = _param('layers embed', 'ones')


@struct.dataclass
class Params:
  embedding: jax.Array = _param('vocab embed', 'embedding')
  dense_layers: Layers  # before the others; what is said of `layers` holds
  layers: Layers
  norm: jax.Array = _param('embed', 'ones')
  unembed: jax.Array = _param('embed head')
  mtp: MtpParams  # trained before RL only, and never published

  @property
  def head(self) -> jax.Array:
    """[D V], also where it is the embedding."""
    return self.embedding.T if self.unembed is None else self.unembed


# Axes that a matmul contracts; the product of their sizes is the fan-in.
_FAN_IN = {
    'attention/wo': ('q_heads', 'value_dim'),
    'attention/q_up': ('q_latent',),
    'attention/kv_up': ('kv_latent',),
    'moe/w_out': ('moe_ffn',),
    'moe/shared_out': ('shared_ffn',),
    'mtp/project': ('halves', 'embed'),
}

# Tensors that a model may lack, together: their axes have size 0 there, and
# the tree holds None. Of `dense_layers` and `mtp` it may lack them all.
_OPTIONAL = (
    {'moe/router', 'moe/w_in', 'moe/w_out'},
    {'moe/bias'},
    {'moe/shared_in', 'moe/shared_out'},
    {'moe/shared_gate'},
    {'attention/wq'},
    {'attention/wk', 'attention/wv'},
    {'attention/bq', 'attention/bk', 'attention/bv'},
    {'attention/q_norm', 'attention/k_norm'},
    {'attention/q_down', 'attention/q_latent_norm', 'attention/q_up'},
    {'attention/kv_down', 'attention/kv_latent_norm', 'attention/kv_up'},
)

_DENSE, _MTP = 'dense_layers/', 'mtp/'
# Published in f32, and not rounded: it is added to scores that are compared.
EXACT = 'layers/moe/bias'


def _sizes(cfg: config.ModelConfig, name: str) -> dict[str, int]:
  """Of the axes of a tensor."""
  if name.startswith(_DENSE) and cfg.dense_layers:
    cfg = cfg.dense()
  sizes = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
  latent = cfg.kv_latent > 0
  # The router's output is its own axis: top-k must see it unsharded. `gates`
  # are the silu branch and its factor.
  return sizes | {
      'layers': cfg.mtp_layers if name.startswith(_MTP) else cfg.moe_layers,
      'halves': 2,
      'width': cfg.embed,
      'router': cfg.experts,
      'router_bias': cfg.experts if cfg.router == 'sigmoid' else 0,
      'gates': 2,
      'shared_ffn': cfg.shared_experts * cfg.moe_ffn,
      'shared_gate': int(cfg.shared_gate),
      'kv_heads': cfg.kv_heads * (not latent),
      'q_dim': (cfg.head_dim + cfg.rope_dim) * (not cfg.q_latent),
      'qk_dim': cfg.head_dim + cfg.rope_dim,
      'kv_dim': cfg.head_dim + cfg.value_dim,
      'value_dim': cfg.value_dim if latent else cfg.head_dim,
      'latent_rope': cfg.kv_latent + cfg.rope_dim,
      'q_bias': cfg.q_heads * cfg.qkv_bias,
      'kv_bias': cfg.kv_heads * cfg.qkv_bias,
      'qk_norm': cfg.head_dim * cfg.qk_norm,
      'head': cfg.vocab * (not cfg.tied),
  }


def _shape(cfg: config.ModelConfig, name: str, dims: tuple[str, ...]):
  """Of a tensor; None if the model has no such tensor."""
  if name.startswith(_DENSE) and not cfg.dense_layers:
    return None
  sizes = _sizes(cfg, name)
  shape = tuple(sizes[d] for d in dims)
  return shape if all(shape) else None


def _declare(cls, leaf: Callable[[str, tuple[str, ...], str], Any], path=''):
  hints = typing.get_type_hints(cls)
  values = {}
  for field in dataclasses.fields(cls):
    name = f'{path}/{field.name}' if path else field.name
    if 'dims' in field.metadata:
      dims = tuple(field.metadata['dims'].split())
      values[field.name] = leaf(name, dims, field.metadata['init'])
    else:
      values[field.name] = _declare(hints[field.name], leaf, name)
  return cls(**values)


def abstract(cfg: config.ModelConfig, dtype=jnp.float32) -> Params:
  """The tree with a `jax.ShapeDtypeStruct` for every tensor."""

  def leaf(name, dims, _):
    shape = _shape(cfg, name, dims)
    return None if shape is None else jax.ShapeDtypeStruct(shape, dtype)

  return _declare(Params, leaf)


def pspecs(params: Params, rules: Mapping[str, str]) -> Params:
  """The tree with a PartitionSpec for every tensor.

  Args:
    params: of any leaves, such as `abstract` ones.
    rules: logical axis -> mesh axis; an axis not named is replicated.
  """
  declared = names(_declare(Params, lambda _, dims, __: ' '.join(dims)))

  def leaf(path, _):
    dims = declared[_name(path)].split()
    return PartitionSpec(*_axes(dims, rules))

  return jax.tree_util.tree_map_with_path(leaf, params)


def _axes(dims, rules):
  """Mesh axis of each logical axis; the first one that wants it has it."""
  axes = []
  for dim in dims:
    axis = rules.get(dim)
    axes.append(None if axis in axes else axis)
  return axes


def check_split(
    cfg: config.ModelConfig, rules: Mapping[str, str], mesh: Mapping[str, int]
) -> None:
  """Refuses a mesh that cannot split every tensor into equal parts.

  Args:
    cfg: the model.
    rules: see `pspecs`.
    mesh: mesh axis -> its size.

  Raises:
    ValueError: names both axes and their sizes.
  """

  def leaf(name, dims, _):
    shape = _shape(cfg, name, dims) or ()
    for dim, size, axis in zip(dims, shape, _axes(dims, rules), strict=False):
      if axis and size % mesh[axis]:
        raise ValueError(
            f'mesh.{axis}={mesh[axis]}: must divide {dim}={size}, an axis of'
            f' {name}'
        )

  _declare(Params, leaf)


def _fold_in(key: jax.Array, name: str) -> jax.Array:
  return jax.random.fold_in(
      key, int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
  )


def init(cfg: config.ModelConfig, key: jax.Array) -> Params:
  """Initial f32 masters.

  Every tensor's key is folded with its name, so it does not depend on which
  other tensors exist. Projections that write to the residual stream are scaled
  down by sqrt(2 L) (Radford et al. 2019, GPT-2).
  """

  def leaf(name, dims, kind):
    shape = _shape(cfg, name, dims)
    if shape is None:
      return None
    if kind in ('ones', 'zeros'):
      return jnp.full(shape, float(kind == 'ones'), jnp.float32)
    if kind == 'embedding':
      std = 0.02
    else:
      fan = next(
          (v for k, v in _FAN_IN.items() if name.endswith(k)), ('embed',)
      )
      sizes = _sizes(cfg, name)
      std = math.prod(sizes[d] for d in fan) ** -0.5
      if kind == 'residual':
        std /= math.sqrt(2 * cfg.layers)
    return std * jax.random.truncated_normal(
        _fold_in(key, name), -2.0, 2.0, shape, jnp.float32
    )

  return _declare(Params, leaf)


def without_mtp(params: Params) -> Params:
  """What a policy runs."""
  return params.replace(mtp=None)


def rounded(
    params: Params, to_bf16: Callable[[jax.Array], jax.Array]
) -> Params:
  """The tensors after `to_bf16`, but for those that are published in f32."""

  def leaf(path, x):
    return x if _name(path) == EXACT else to_bf16(x)

  return jax.tree_util.tree_map_with_path(leaf, params)


def publish_dtype(params: Params) -> Params:
  """bf16, round to nearest even: the values every role computes with."""
  return rounded(params, lambda x: x.astype(jnp.bfloat16))


def _name(path: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='/')


def names(params: Params) -> dict[str, Any]:
  """Leaves by stable name, such as `layers/moe/w_in`."""
  return {
      _name(path): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }


def from_names(named: Mapping[str, Any]) -> Params:
  """Inverse of `names`.

  Raises:
    ValueError: a tensor is missing or unknown.
  """
  want = set(names(_declare(Params, lambda *_: 0)))
  for prefix in (_DENSE, _MTP):
    if not any(name.startswith(prefix) for name in named):
      want = {name for name in want if not name.startswith(prefix)}
  stacked = [
      {stack + name for name in group}
      for stack in (_DENSE, 'layers/', f'{_MTP}layers/')
      for group in _OPTIONAL
  ]
  for group in (*stacked, {'unembed'}):
    want -= group if group.isdisjoint(named) else set()
  if want != set(named):
    raise ValueError(
        f'parameters: missing {sorted(want - set(named))}, unknown'
        f' {sorted(set(named) - want)}'
    )
  return _declare(Params, lambda name, _, __: named.get(name))


def count(cfg: config.ModelConfig) -> tuple[int, int]:
  """(total, active per token) number of parameters that a policy runs."""
  total = active = 0
  for name, leaf in names(without_mtp(abstract(cfg))).items():
    size = math.prod(leaf.shape)
    total += size
    expert = name in ('layers/moe/w_in', 'layers/moe/w_out')
    active += size * cfg.top_k // cfg.experts if expert else size
  return total, active
