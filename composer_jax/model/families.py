"""Published model families: their config files.

A family differs from another in what its config says and in a few names; the
layers are the same functions for all. Read for: Llama, Mixtral, Qwen2 (and 1.5),
Qwen2-MoE, Qwen3, Qwen3-MoE and DeepSeek-V3, as in transformers 5, and Kimi-K2,
which is written as the DeepSeek-V3 that it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_jax import config
from composer_jax.model import hf_rope

# Family -> what its members have beyond grouped-query attention.
_LATENT = {'deepseek_v3', 'kimi_k2'}
_MOE = {'mixtral', 'qwen2_moe', 'qwen3_moe', *_LATENT}
_BIAS = {'qwen2', 'qwen2_moe'}
_QK_NORM = {'qwen3', 'qwen3_moe'}
FAMILIES = (
    'llama',
    'mixtral',
    *sorted(_BIAS),
    *sorted(_QK_NORM),
    *sorted(_LATENT),
)
# Fields that only one value of is understood, and that value.
_FIXED = {
    'hidden_act': 'silu',
    'attention_bias': False,
    'mlp_bias': False,
    'use_sliding_window': False,
    'mlp_only_layers': [],
    'decoder_sparse_step': 1,
    'moe_layer_freq': 1,
    'scoring_func': 'sigmoid',
    'topk_method': 'noaux_tc',
    'rope_interleave': True,
    'partial_rotary_factor': 1.0,
}


def to_config(fields: Mapping[str, Any]) -> config.ModelConfig:
  """The model that a config.json describes.

  Raises:
    ValueError: an unknown family, or a field that is not understood.
  """
  family = hf_rope.get(fields, 'model_type')
  if family not in FAMILIES:
    raise ValueError(
        f'config.json: model_type={family!r}; must be one of'
        f' {", ".join(FAMILIES)}'
    )
  if quantized := fields.get('quantization_config'):
    kind = quantized.get('quant_method')
    raise ValueError(
        f'config.json: quantization_config is {kind!r}: only weights that are'
        ' not quantized are read; convert the folder to bfloat16'
    )
  for name, want in _FIXED.items():
    if hf_rope.get(fields, name, want) != want:
      raise ValueError(
          f'config.json: {name}={fields[name]!r} is not supported, only {want!r}'
      )
  if family == 'mixtral' and fields.get('sliding_window'):
    raise ValueError(
        f'config.json: sliding_window={fields["sliding_window"]!r} is not'
        ' supported, only null'
    )
  _check_types(fields)
  angles = hf_rope.angles_of(fields)
  return config.ModelConfig(
      vocab=hf_rope.get(fields, 'vocab_size'),
      layers=hf_rope.get(fields, 'num_hidden_layers'),
      embed=hf_rope.get(fields, 'hidden_size'),
      q_heads=hf_rope.get(fields, 'num_attention_heads'),
      qkv_bias=family in _BIAS,
      qk_norm=family in _QK_NORM,
      tied=hf_rope.get(fields, 'tie_word_embeddings', False),
      rope_theta=float(
          hf_rope.get(
              angles, 'rope_theta', hf_rope.get(fields, 'rope_theta', 10_000.0)
          )
      ),
      rope_scaling=hf_rope.scaling_of(fields, angles),
      norm_eps=hf_rope.get(fields, 'rms_norm_eps', 1e-6),
      **(_latent if family in _LATENT else _grouped)(fields),
      **_ffn(fields, family),
  )


_COUNTS = (
    *('vocab_size', 'num_hidden_layers', 'hidden_size', 'intermediate_size'),
    *('num_attention_heads', 'num_key_value_heads', 'head_dim'),
    *('max_position_embeddings', 'num_experts', 'num_local_experts'),
    *('num_experts_per_tok', 'moe_intermediate_size', 'n_routed_experts'),
    *('kv_lora_rank', 'q_lora_rank', 'qk_nope_head_dim', 'qk_rope_head_dim'),
    *('v_head_dim', 'n_group', 'topk_group'),
    'shared_expert_intermediate_size',
)
_NUMBERS = ('rope_theta', 'rms_norm_eps', 'routed_scaling_factor')


def _check_types(fields: Mapping[str, Any]) -> None:
  """Refuses values of another type, which would fail later and namelessly."""
  for name in _COUNTS:
    value = fields.get(name)
    if value is not None and (type(value) is not int or value < 1):
      raise ValueError(
          f'config.json: {name}={value!r}: want an integer above 0'
      )
  hf_rope.check_numbers(fields, _NUMBERS)
  kinds = fields.get('layer_types') or []
  if not isinstance(kinds, list) or set(kinds) - {'full_attention'}:
    raise ValueError(
        "config.json: layer_types: only 'full_attention' is supported"
    )
  for name, value in fields.items():
    odd = name.startswith(('rope_', 'rotary_')) and name not in hf_rope.PLACES
    if odd and value is not None:
      raise ValueError(f'config.json: {name}={value!r} is not supported')


def _grouped(fields: Mapping[str, Any]) -> dict[str, int]:
  heads = hf_rope.get(fields, 'num_attention_heads')
  return dict(
      kv_heads=hf_rope.get(fields, 'num_key_value_heads', heads),
      head_dim=hf_rope.get(
          fields, 'head_dim', hf_rope.get(fields, 'hidden_size') // heads
      ),
  )


def _latent(fields: Mapping[str, Any]) -> dict[str, int]:
  return dict(
      kv_heads=1,
      head_dim=hf_rope.get(fields, 'qk_nope_head_dim'),
      kv_latent=hf_rope.get(fields, 'kv_lora_rank'),
      q_latent=hf_rope.get(fields, 'q_lora_rank', 0),
      rope_dim=hf_rope.get(fields, 'qk_rope_head_dim'),
      value_dim=hf_rope.get(fields, 'v_head_dim'),
  )


def _ffn(fields: Mapping[str, Any], family: str) -> dict[str, Any]:
  """What follows attention: one FFN, or experts."""
  ffn = hf_rope.get(fields, 'intermediate_size')
  if family not in _MOE:
    return dict(experts=0, top_k=0, moe_ffn=ffn, shared_experts=1)
  one = (
      ffn
      if family == 'mixtral'
      else hf_rope.get(fields, 'moe_intermediate_size')
  )
  out: dict[str, Any] = dict(
      top_k=hf_rope.get(fields, 'num_experts_per_tok'), moe_ffn=one
  )
  if family in _LATENT:
    dense = hf_rope.get(fields, 'first_k_dense_replace', 0)
    return out | dict(
        experts=hf_rope.get(fields, 'n_routed_experts'),
        shared_experts=hf_rope.get(fields, 'n_shared_experts', 0),
        dense_layers=dense,
        dense_ffn=ffn if dense else 0,
        router='sigmoid',
        renormalize=hf_rope.get(fields, 'norm_topk_prob', True),
        routed_scale=float(hf_rope.get(fields, 'routed_scaling_factor', 1.0)),
        expert_groups=hf_rope.get(fields, 'n_group', 1),
        top_groups=hf_rope.get(fields, 'topk_group', 1),
    )
  shared = 0
  if family == 'qwen2_moe':
    all_shared = hf_rope.get(fields, 'shared_expert_intermediate_size')
    shared, rest = divmod(all_shared, one)
    if rest:
      raise ValueError(
          f'config.json: shared_expert_intermediate_size={all_shared}: must'
          f' be a multiple of moe_intermediate_size={one}'
      )
  return out | dict(
      experts=fields.get('num_local_experts')
      or hf_rope.get(fields, 'num_experts'),
      shared_experts=shared,
      shared_gate=shared > 0,
      renormalize=family == 'mixtral'
      or hf_rope.get(fields, 'norm_topk_prob', False),
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
          and (f in _LATENT) == (cfg.kv_latent > 0)
      ),
      None,
  )
  plain = cfg.router == 'softmax' and cfg.routed_scale == 1
  plain &= not moe or cfg.shared_gate or not cfg.shared_experts
  plain &= found != 'mixtral' or cfg.renormalize
  plain &= not cfg.dense_layers
  if found in _LATENT:
    plain = cfg.router == 'sigmoid'
  if found is None or not plain:
    raise ValueError(
        'model: no published family has this mix of router, shared experts,'
        ' biases and norms'
    )
  return found


def to_fields(cfg: config.ModelConfig, context_tokens: int) -> dict[str, Any]:
  """config.json of a model; the inverse of `to_config`."""
  family = family_of(cfg)
  names = {
      'llama': 'Llama',
      'mixtral': 'Mixtral',
      'deepseek_v3': 'DeepseekV3',
  }
  name = names.get(family)
  name = name or family.replace('qwen', 'Qwen').replace('_moe', 'Moe')
  ffn = cfg.moe_ffn * (cfg.shared_experts if cfg.experts == 0 else 1)
  angles = hf_rope.to_fields(cfg)
  fields = {
      'architectures': [f'{name}ForCausalLM'],
      'model_type': family,
      'dtype': 'bfloat16',
      'hidden_act': 'silu',
      'vocab_size': cfg.vocab,
      'hidden_size': cfg.embed,
      'intermediate_size': cfg.dense_ffn or ffn,
      'num_hidden_layers': cfg.layers,
      'num_attention_heads': cfg.q_heads,
      'max_position_embeddings': context_tokens,
      'rms_norm_eps': cfg.norm_eps,
      'rope_theta': cfg.rope_theta,
      'rope_parameters': angles,
      'tie_word_embeddings': cfg.tied,
  }
  if cfg.rope_scaling is not None:  # where engines before transformers 5 look
    fields['rope_scaling'] = angles
  if family == 'deepseek_v3':
    return fields | _latent_fields(cfg)
  fields |= {'num_key_value_heads': cfg.kv_heads, 'head_dim': cfg.head_dim}
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


def _latent_fields(cfg: config.ModelConfig) -> dict[str, Any]:
  return {
      'num_key_value_heads': cfg.q_heads,
      'qk_nope_head_dim': cfg.head_dim,
      'qk_rope_head_dim': cfg.rope_dim,
      'v_head_dim': cfg.value_dim,
      'kv_lora_rank': cfg.kv_latent,
      'q_lora_rank': cfg.q_latent or None,
      'first_k_dense_replace': cfg.dense_layers,
      'n_routed_experts': cfg.experts,
      'num_experts_per_tok': cfg.top_k,
      'moe_intermediate_size': cfg.moe_ffn,
      'n_shared_experts': cfg.shared_experts,
      'norm_topk_prob': cfg.renormalize,
      'routed_scaling_factor': cfg.routed_scale,
      'n_group': cfg.expert_groups,
      'topk_group': cfg.top_groups,
      'num_nextn_predict_layers': 0,
      **{n: _FIXED[n] for n in ('scoring_func', 'topk_method')},
      **{n: _FIXED[n] for n in ('moe_layer_freq', 'rope_interleave')},
  }
