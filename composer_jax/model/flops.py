"""Floating-point operations of a model, by formula: what a run ought to cost.

A parameter is one multiply-add for every token that uses it, and a query does
two dot products with every position that it sees (Chowdhery et al., arXiv
2204.02311, appendix B). Routers and norms are as small as they look.
"""

from __future__ import annotations

from composer_jax import config
from composer_jax.model import params as params_lib


def forward(cfg: config.ModelConfig, context_tokens: float) -> float:
  """FLOPs of one token, with this many positions that it attends to."""
  _, active = params_lib.count(cfg)
  if not cfg.tied:
    active -= cfg.vocab * cfg.embed  # looked up, not multiplied
  # Latent attention is computed in its latent space, which is wider.
  widths = 2 * (cfg.kv_latent or cfg.head_dim) + cfg.rope_dim
  attention = cfg.layers * cfg.q_heads * widths
  return 2 * active + 2 * attention * context_tokens


def train(cfg: config.ModelConfig, tokens_per_row: int) -> float:
  """FLOPs of one token's forward and backward pass in a full row.

  The backward pass is twice the forward one; nothing computed again is counted.
  """
  return 3 * forward(cfg, (tokens_per_row + 1) / 2)
