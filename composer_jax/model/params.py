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
  norm: jax.Array = _param('layers embed', 'ones')
  wq: jax.Array = _param('layers embed q_heads head_dim')
  wk: jax.Array = _param('layers embed kv_heads head_dim')
  wv: jax.Array = _param('layers embed kv_heads head_dim')
  wo: jax.Array = _param('layers q_heads head_dim embed', 'residual')
  bq: jax.Array = _param('layers q_bias head_dim', 'zeros')
  bk: jax.Array = _param('layers kv_bias head_dim', 'zeros')
  bv: jax.Array = _param('layers kv_bias head_dim', 'zeros')
  q_norm: jax.Array = _param('layers qk_norm', 'ones')
  k_norm: jax.Array = _param('layers qk_norm', 'ones')


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
class Params:
  embedding: jax.Array = _param('vocab embed', 'embedding')
  layers: Layers
  norm: jax.Array = _param('embed', 'ones')
  unembed: jax.Array = _param('embed head')

  @property
  def head(self) -> jax.Array:
    """[D V], also where it is the embedding."""
    return self.embedding.T if self.unembed is None else self.unembed


# Axes that a matmul contracts; the product of their sizes is the fan-in.
_FAN_IN = {
    'attention/wo': ('q_heads', 'head_dim'),
    'moe/w_out': ('moe_ffn',),
    'moe/shared_out': ('shared_ffn',),
}

# Tensors that a model may lack, together: their axes have size 0 there, and
# the tree holds None.
_OPTIONAL = (
    {'layers/moe/router', 'layers/moe/w_in', 'layers/moe/w_out'},
    {'layers/moe/bias'},
    {'layers/moe/shared_in', 'layers/moe/shared_out'},
    {'layers/moe/shared_gate'},
    {'layers/attention/bq', 'layers/attention/bk', 'layers/attention/bv'},
    {'layers/attention/q_norm', 'layers/attention/k_norm'},
    {'unembed'},
)


def _sizes(cfg: config.ModelConfig) -> dict[str, int]:
  sizes = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
  # The router's output is its own axis: top-k must see it unsharded. `gates`
  # are the silu branch and its factor.
  return sizes | {
      'router': cfg.experts,
      'router_bias': cfg.experts if cfg.router == 'sigmoid' else 0,
      'gates': 2,
      'shared_ffn': cfg.shared_experts * cfg.moe_ffn,
      'shared_gate': int(cfg.shared_gate),
      'q_bias': cfg.q_heads * cfg.qkv_bias,
      'kv_bias': cfg.kv_heads * cfg.qkv_bias,
      'qk_norm': cfg.head_dim * cfg.qk_norm,
      'head': cfg.vocab * (not cfg.tied),
  }


def _shape(sizes: Mapping[str, int], dims: tuple[str, ...]):
  """Of a tensor; None if the model has no such tensor."""
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
  sizes = _sizes(cfg)

  def leaf(_, dims, __):
    shape = _shape(sizes, dims)
    return None if shape is None else jax.ShapeDtypeStruct(shape, dtype)

  return _declare(Params, leaf)


def pspecs(params: Params, rules: Mapping[str, str]) -> Params:
  """The tree with a PartitionSpec for every tensor.

  Args:
    params: of any leaves, such as `abstract` ones.
    rules: logical axis -> mesh axis; an axis not named is replicated.
  """
  there = names(params)

  def leaf(name, dims, _):
    spec = PartitionSpec(*(rules.get(d) for d in dims))
    return spec if name in there else None

  return _declare(Params, leaf)


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
  sizes = _sizes(cfg)

  def leaf(name, dims, _):
    if _shape(sizes, dims) is None:
      return
    for dim in dims:
      axis = rules.get(dim)
      if axis and sizes[dim] % mesh[axis]:
        raise ValueError(
            f'mesh.{axis}={mesh[axis]}: must divide {dim}={sizes[dim]}, an axis'
            f' of {name}'
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
  sizes = _sizes(cfg)

  def leaf(name, dims, kind):
    shape = _shape(sizes, dims)
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
      std = math.prod(sizes[d] for d in fan) ** -0.5
      if kind == 'residual':
        std /= math.sqrt(2 * cfg.layers)
    return std * jax.random.truncated_normal(
        _fold_in(key, name), -2.0, 2.0, shape, jnp.float32
    )

  return _declare(Params, leaf)


def publish_dtype(params: Params) -> Params:
  """bf16, round to nearest even: the values every role computes with."""
  return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def names(params: Params) -> dict[str, Any]:
  """Leaves by stable name, such as `layers/moe/w_in`."""
  return {
      jax.tree_util.keystr(path, simple=True, separator='/'): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }


def from_names(named: Mapping[str, Any]) -> Params:
  """Inverse of `names`.

  Raises:
    ValueError: a tensor is missing or unknown.
  """
  want = set(names(_declare(Params, lambda *_: 0)))
  for group in _OPTIONAL:
    want -= group if group.isdisjoint(named) else set()
  if want != set(named):
    raise ValueError(
        f'parameters: missing {sorted(want - set(named))}, unknown'
        f' {sorted(set(named) - want)}'
    )
  return _declare(Params, lambda name, _, __: named.get(name))


def count(cfg: config.ModelConfig) -> tuple[int, int]:
  """(total, active per token) number of parameters."""
  total = active = 0
  for name, leaf in names(abstract(cfg)).items():
    size = math.prod(leaf.shape)
    total += size
    expert = name in ('layers/moe/w_in', 'layers/moe/w_out')
    active += size * cfg.top_k // cfg.experts if expert else size
  return total, active
