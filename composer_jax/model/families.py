"""Published model families: their config files and the names of their tensors.

A family differs from another in what its config says and in a few names; the
layers are the same functions for all. Read for: Llama, Mixtral, Qwen2 (and 1.5),
Qwen2-MoE, Qwen3 and Qwen3-MoE, as in transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any

from composer_jax import config

# Family -> what its members have beyond grouped-query attention.
_MOE = {'mixtral', 'qwen2_moe', 'qwen3_moe'}
_BIAS = {'qwen2', 'qwen2_moe'}
_QK_NORM = {'qwen3', 'qwen3_moe'}
FAMILIES = ('llama', 'mixtral', *sorted(_BIAS), *sorted(_QK_NORM))
# Fields that only one value of is understood, and that value.
_FIXED = {
    'hidden_act': 'silu',
    'attention_bias': False,
    'mlp_bias': False,
    'use_sliding_window': False,
    'mlp_only_layers': [],
    'decoder_sparse_step': 1,
}


@dataclasses.dataclass(frozen=True)
class Piece:
  """A tensor of a published model, and the part of ours that it is.

  Attributes:
    published: its name.
    name: of our tensor.
    index: of the part; the part's axes are those that are left.
    rows: the size that a matmul contracts: the part, as a matrix [rows X], is
      the transposed tensor. None: the tensor is the part, in its order.
  """

  published: str
  name: str
  index: tuple[Any, ...] = ()
  rows: int | None = None


def _get(fields: Mapping[str, Any], name: str, *default: Any) -> Any:
  value = fields.get(name)
  if value is None and not default:
    raise ValueError(f'config.json: has no {name}')
  return default[0] if value is None else value


def to_config(fields: Mapping[str, Any]) -> config.ModelConfig:
  """The model that a config.json describes.

  Raises:
    ValueError: an unknown family, or a field that is not understood.
  """
  family = _get(fields, 'model_type')
  if family not in FAMILIES:
    raise ValueError(
        f'config.json: model_type={family!r}; must be one of'
        f' {", ".join(FAMILIES)}'
    )
  for name, want in _FIXED.items():
    if _get(fields, name, want) != want:
      raise ValueError(
          f'config.json: {name}={fields[name]!r} is not supported, only {want!r}'
      )
  if family == 'mixtral' and fields.get('sliding_window'):
    raise ValueError(
        f'config.json: sliding_window={fields["sliding_window"]!r} is not'
        ' supported, only null'
    )
  rope = fields.get('rope_parameters') or fields.get('rope_scaling') or {}
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind != 'default':
    raise ValueError(
        f'config.json: rope_type={kind!r} is not supported, only "default"'
    )
  heads, width = _get(fields, 'num_attention_heads'), _get(
      fields, 'hidden_size'
  )
  ffn = _get(fields, 'intermediate_size')
  moe: dict[str, Any] = dict(experts=0, top_k=0, moe_ffn=ffn, shared_experts=1)
  if family in _MOE:
    experts = fields.get('num_local_experts') or _get(fields, 'num_experts')
    one = ffn if family == 'mixtral' else _get(fields, 'moe_intermediate_size')
    shared = 0
    if family == 'qwen2_moe':
      all_shared = _get(fields, 'shared_expert_intermediate_size')
      shared, rest = divmod(all_shared, one)
      if rest:
        raise ValueError(
            f'config.json: shared_expert_intermediate_size={all_shared}: must'
            f' be a multiple of moe_intermediate_size={one}'
        )
    moe = dict(
        experts=experts,
        top_k=_get(fields, 'num_experts_per_tok'),
        moe_ffn=one,
        shared_experts=shared,
        shared_gate=shared > 0,
        renormalize=family == 'mixtral'
        or _get(fields, 'norm_topk_prob', False),
    )
  return config.ModelConfig(
      vocab=_get(fields, 'vocab_size'),
      layers=_get(fields, 'num_hidden_layers'),
      embed=width,
      q_heads=heads,
      kv_heads=_get(fields, 'num_key_value_heads', heads),
      head_dim=_get(fields, 'head_dim', width // heads),
      qkv_bias=family in _BIAS,
      qk_norm=family in _QK_NORM,
      tied=_get(fields, 'tie_word_embeddings', False),
      rope_theta=float(
          rope.get('rope_theta') or _get(fields, 'rope_theta', 10_000.0)
      ),
      norm_eps=_get(fields, 'rms_norm_eps', 1e-6),
      **moe,
  )


def family_of(cfg: config.ModelConfig) -> str:
  """The family that can express a model.

  Raises:
    ValueError: there is none.
  """
  moe = cfg.experts > 0
  found = next(
      (
          f
          for f in FAMILIES
          if (f in _MOE) == moe
          and (f in _BIAS) == cfg.qkv_bias
          and (f in _QK_NORM) == cfg.qk_norm
          and (f == 'qwen2_moe') == cfg.shared_gate
      ),
      None,
  )
  plain = cfg.router == 'softmax' and cfg.routed_scale == 1
  plain &= not moe or cfg.shared_gate or not cfg.shared_experts
  plain &= found != 'mixtral' or cfg.renormalize
  if found is None or not plain:
    raise ValueError(
        'model: no published family has this mix of router, shared experts,'
        ' biases and norms'
    )
  return found


def to_fields(cfg: config.ModelConfig, context_tokens: int) -> dict[str, Any]:
  """config.json of a model; the inverse of `to_config`."""
  family = family_of(cfg)
  name = {'llama': 'Llama', 'mixtral': 'Mixtral'}.get(family)
  name = name or family.replace('qwen', 'Qwen').replace('_moe', 'Moe')
  ffn = cfg.moe_ffn * (cfg.shared_experts if cfg.experts == 0 else 1)
  fields = {
      'architectures': [f'{name}ForCausalLM'],
      'model_type': family,
      'dtype': 'bfloat16',
      'hidden_act': 'silu',
      'vocab_size': cfg.vocab,
      'hidden_size': cfg.embed,
      'intermediate_size': ffn,
      'num_hidden_layers': cfg.layers,
      'num_attention_heads': cfg.q_heads,
      'num_key_value_heads': cfg.kv_heads,
      'head_dim': cfg.head_dim,
      'max_position_embeddings': context_tokens,
      'rms_norm_eps': cfg.norm_eps,
      'rope_theta': cfg.rope_theta,
      'rope_parameters': {
          'rope_type': 'default',
          'rope_theta': cfg.rope_theta,
      },
      'tie_word_embeddings': cfg.tied,
  }
  if cfg.experts:
    count = 'num_local_experts' if family == 'mixtral' else 'num_experts'
    fields |= {count: cfg.experts, 'num_experts_per_tok': cfg.top_k}
  if family in ('qwen2_moe', 'qwen3_moe'):
    fields |= {
        'moe_intermediate_size': cfg.moe_ffn,
        'norm_topk_prob': cfg.renormalize,
    }
  if family == 'qwen2_moe':
    shared = cfg.shared_experts * cfg.moe_ffn
    fields['shared_expert_intermediate_size'] = shared
  return fields


def pieces(cfg: config.ModelConfig) -> Iterator[Piece]:
  """Every tensor of the published form of a model."""
  yield Piece('model.embed_tokens.weight', 'embedding')
  yield Piece('model.norm.weight', 'norm')
  if not cfg.tied:
    yield Piece('lm_head.weight', 'unembed', (), cfg.embed)
  for layer in range(cfg.layers):
    for piece in _layer(cfg, family_of(cfg)):
      yield dataclasses.replace(
          piece,
          published=f'model.layers.{layer}.{piece.published}',
          name=f'layers/{piece.name}',
          index=(layer, *piece.index),
      )


def _layer(cfg: config.ModelConfig, family: str) -> Iterator[Piece]:
  d = cfg.embed
  yield Piece('input_layernorm.weight', 'attention/norm')
  for x in 'qkv':
    yield Piece(f'self_attn.{x}_proj.weight', f'attention/w{x}', (), d)
    if cfg.qkv_bias:
      yield Piece(f'self_attn.{x}_proj.bias', f'attention/b{x}')
  if cfg.qk_norm:
    yield Piece('self_attn.q_norm.weight', 'attention/q_norm')
    yield Piece('self_attn.k_norm.weight', 'attention/k_norm')
  heads = cfg.q_heads * cfg.head_dim
  yield Piece('self_attn.o_proj.weight', 'attention/wo', (), heads)
  yield Piece('post_attention_layernorm.weight', 'moe/norm')
  mixtral = family == 'mixtral'
  mlp = 'block_sparse_moe' if mixtral else 'mlp'
  ffn = cfg.shared_experts * cfg.moe_ffn
  if not cfg.experts:
    yield from _ffn(mlp, 'moe/shared', (), d, ffn)
    return
  yield Piece(f'{mlp}.gate.weight', 'moe/router', (), d)
  for e in range(cfg.experts):
    yield from _ffn(
        f'{mlp}.experts.{e}', 'moe/w', (e,), d, cfg.moe_ffn, mixtral
    )
  if cfg.shared_experts:
    yield from _ffn('mlp.shared_expert', 'moe/shared', (), d, ffn)
    yield Piece('mlp.shared_expert_gate.weight', 'moe/shared_gate', (), d)


def _ffn(prefix, name, index, d, ffn, numbered=False) -> Iterator[Piece]:
  gate, up, down = (
      ('w1', 'w3', 'w2') if numbered else ('gate_proj', 'up_proj', 'down_proj')
  )
  every = slice(None)
  for i, part in enumerate((gate, up)):
    yield Piece(f'{prefix}.{part}.weight', f'{name}_in', (*index, every, i), d)
  yield Piece(f'{prefix}.{down}.weight', f'{name}_out', index, ffn)
