"""Tensors of published models: their names, and what they are of ours."""

from __future__ import annotations

from collections.abc import Container, Iterator
import dataclasses
import math
import re
from typing import Any

import numpy as np

from composer_jax import config
from composer_jax.model import families

# Computed from the config; some old files hold them.
_COMPUTED = '.rotary_emb.inv_freq'
_NUMBER = re.compile(r'model\.layers\.(\d+)\.')


@dataclasses.dataclass(frozen=True)
class Piece:
  """A tensor of a published model, and the part of ours that it is.

  Attributes:
    published: its name.
    name: of our tensor.
    index: of the part; the part's axes are those that are left.
    rows: the size that a matmul contracts: the part, as a matrix [rows X], is
      the transposed tensor. None: the tensor is the part, in its order.
    turned: how many columns at the end of the part's last axis rotate. The two
      of a pair are neighbors in the tensor, half of these apart in the part.
  """

  published: str
  name: str
  index: tuple[Any, ...] = ()
  rows: int | None = None
  turned: int = 0

  def part(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The part, of this shape, that a tensor is."""
    part = (tensor if self.rows is None else tensor.T).reshape(shape)
    if not self.turned:
      return part
    rest, pairs = np.split(part, [shape[-1] - self.turned], axis=-1)
    return np.concatenate([rest, pairs[..., ::2], pairs[..., 1::2]], axis=-1)

  def tensor(self, part: np.ndarray) -> np.ndarray:
    """The tensor that a part is; the inverse of `part`."""
    if self.turned:
      rest, halves = np.split(part, [part.shape[-1] - self.turned], axis=-1)
      pairs = np.stack(np.split(halves, 2, axis=-1), axis=-1)
      part = np.concatenate([rest, pairs.reshape(halves.shape)], axis=-1)
    if self.rows is not None:
      part = part.reshape(self.rows, -1).T
    return np.ascontiguousarray(part.reshape(self.shape(part.shape)))

  def shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
    """Of the tensor, from that of the part."""
    size = math.prod(part)
    if self.rows is not None:
      return size // self.rows, self.rows
    return part if self.name == 'embedding' else (size,)


def is_known(
    cfg: config.ModelConfig, published: str, every: Container[str]
) -> bool:
  """True for a tensor that a folder may have besides the model's own.

  Args:
    cfg: the model.
    published: name of the tensor.
    every: names of all tensors of the folder.
  """
  if published.endswith(_COMPUTED) or published == 'lm_head.weight':
    return True
  layer = _NUMBER.match(published)
  if not cfg.kv_latent or layer is None or int(layer[1]) < cfg.layers:
    return False
  # Layers after the last one may predict further tokens; those have this.
  return f'{layer[0]}eh_proj.weight' in every


def of(cfg: config.ModelConfig) -> Iterator[Piece]:
  """Every tensor of the published form of a model."""
  yield Piece('model.embed_tokens.weight', 'embedding')
  yield Piece('model.norm.weight', 'norm')
  if not cfg.tied:
    yield Piece('lm_head.weight', 'unembed', (), cfg.embed)
  family, first = families.family_of(cfg), cfg.dense_layers
  for layer in range(cfg.layers):
    stack, i, kind = 'layers', layer - first, cfg
    if i < 0:
      stack, i, kind = 'dense_layers', layer, cfg.dense()
    for piece in _layer(kind, family):
      yield dataclasses.replace(
          piece,
          published=f'model.layers.{layer}.{piece.published}',
          name=f'{stack}/{piece.name}',
          index=(i, *piece.index),
      )


def _layer(cfg: config.ModelConfig, family: str) -> Iterator[Piece]:
  yield Piece('input_layernorm.weight', 'attention/norm')
  yield from (_latent if cfg.kv_latent else _grouped)(cfg)
  heads = cfg.q_heads * (cfg.value_dim or cfg.head_dim)
  yield Piece('self_attn.o_proj.weight', 'attention/wo', (), heads)
  yield Piece('post_attention_layernorm.weight', 'moe/norm')
  yield from _after_attention(cfg, family)


def _latent(cfg: config.ModelConfig) -> Iterator[Piece]:
  d, turned = cfg.embed, cfg.rope_dim
  if cfg.q_latent:
    yield Piece('self_attn.q_a_proj.weight', 'attention/q_down', (), d)
    yield Piece('self_attn.q_a_layernorm.weight', 'attention/q_latent_norm')
    name, rows, up = 'q_b_proj', cfg.q_latent, 'q_up'
  else:
    name, rows, up = 'q_proj', d, 'wq'
  yield Piece(f'self_attn.{name}.weight', f'attention/{up}', (), rows, turned)
  yield Piece(
      'self_attn.kv_a_proj_with_mqa.weight', 'attention/kv_down', (), d, turned
  )
  yield Piece('self_attn.kv_a_layernorm.weight', 'attention/kv_latent_norm')
  yield Piece(
      'self_attn.kv_b_proj.weight', 'attention/kv_up', (), cfg.kv_latent
  )


def _grouped(cfg: config.ModelConfig) -> Iterator[Piece]:
  d = cfg.embed
  for x in 'qkv':
    yield Piece(f'self_attn.{x}_proj.weight', f'attention/w{x}', (), d)
    if cfg.qkv_bias:
      yield Piece(f'self_attn.{x}_proj.bias', f'attention/b{x}')
  if cfg.qk_norm:
    yield Piece('self_attn.q_norm.weight', 'attention/q_norm')
    yield Piece('self_attn.k_norm.weight', 'attention/k_norm')


def _after_attention(cfg: config.ModelConfig, family: str) -> Iterator[Piece]:
  d = cfg.embed
  mixtral = family == 'mixtral'
  mlp = 'block_sparse_moe' if mixtral else 'mlp'
  ffn = cfg.shared_experts * cfg.moe_ffn
  if not cfg.experts:
    yield from _ffn(mlp, 'moe/shared', (), d, ffn)
    return
  yield Piece(f'{mlp}.gate.weight', 'moe/router', (), d)
  if cfg.router == 'sigmoid':
    yield Piece(f'{mlp}.gate.e_score_correction_bias', 'moe/bias')
  for e in range(cfg.experts):
    yield from _ffn(
        f'{mlp}.experts.{e}', 'moe/w', (e,), d, cfg.moe_ffn, mixtral
    )
  if cfg.shared_experts:
    name = 'shared_expert' if cfg.shared_gate else 'shared_experts'
    yield from _ffn(f'mlp.{name}', 'moe/shared', (), d, ffn)
  if cfg.shared_gate:
    yield Piece('mlp.shared_expert_gate.weight', 'moe/shared_gate', (), d)


def _ffn(prefix, name, index, d, ffn, numbered=False) -> Iterator[Piece]:
  gate, up, down = (
      ('w1', 'w3', 'w2') if numbered else ('gate_proj', 'up_proj', 'down_proj')
  )
  every = slice(None)
  for i, part in enumerate((gate, up)):
    yield Piece(f'{prefix}.{part}.weight', f'{name}_in', (*index, every, i), d)
  yield Piece(f'{prefix}.{down}.weight', f'{name}_out', index, ffn)
