"""The peer: a transformers Mixtral of exactly our shapes, on torch.

Only what an informed user of transformers would write: its default threads,
attention and optimizer kernels. The experts' implementation is the one choice
that differs by task, so every one that is competitive is offered.
"""

from __future__ import annotations

from collections.abc import Mapping
import importlib.util

import numpy as np

from composer_jax import config

# What both sides run: 1.9M parameters, 8 experts, 2 active.
MODEL = config.ModelConfig(
    vocab=512,
    layers=4,
    embed=128,
    q_heads=4,
    kv_heads=2,
    head_dim=32,
    experts=8,
    top_k=2,
    moe_ffn=128,
)
_EXPERTS = ('grouped_mm', 'eager')


def installed() -> bool:
  """True if the extra `peers` is there."""
  names = ('torch', 'transformers')
  return all(importlib.util.find_spec(n) is not None for n in names)


def models(cfg: config.ModelConfig, context_tokens: int) -> Mapping:
  """Candidate models by name, with fresh weights; empty if not installed."""
  if not installed():
    return {}
  import transformers

  shape = transformers.MixtralConfig(
      vocab_size=cfg.vocab,
      hidden_size=cfg.embed,
      intermediate_size=cfg.moe_ffn,
      num_hidden_layers=cfg.layers,
      num_attention_heads=cfg.q_heads,
      num_key_value_heads=cfg.kv_heads,
      head_dim=cfg.head_dim,
      num_local_experts=cfg.experts,
      num_experts_per_tok=cfg.top_k,
      rms_norm_eps=cfg.norm_eps,
      rope_parameters={'rope_type': 'default', 'rope_theta': cfg.rope_theta},
      max_position_embeddings=context_tokens,
      sliding_window=None,
      tie_word_embeddings=False,
      bos_token_id=None,
      eos_token_id=None,
  )
  make = transformers.AutoModelForCausalLM.from_config
  return {
      f'transformers/{e}': make(shape, experts_implementation=e)
      for e in _EXPERTS
  }


class Trainer:
  """Forward, backward, clipping and AdamW on rows of plain tokens."""

  def __init__(self, model, learning_rate: float):
    import torch

    self._torch, self._model = torch, model.train()
    self._optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0
    )

  def step(self, tokens: np.ndarray) -> float:
    """One update on tokens i32 [B T]; returns the loss in nats per token."""
    ids = self._torch.from_numpy(tokens).long()
    loss = self._model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    self._torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
    self._optimizer.step()
    self._optimizer.zero_grad()
    return loss.item()


def generate(model, prompts: np.ndarray, new_tokens: int) -> np.ndarray:
  """Samples at temperature 1 with a KV cache; i32 [B T] -> [B T + new]."""
  import torch

  ids = torch.from_numpy(prompts).long()
  out = model.eval().generate(
      ids,
      attention_mask=torch.ones_like(ids),
      max_new_tokens=new_tokens,
      do_sample=True,
      top_k=0,
      pad_token_id=0,
  )
  return out.numpy().astype(np.int32)
