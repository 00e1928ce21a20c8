"""A small model as the hub has them: random weights, tokenizer, template."""

import pathlib

import numpy as np
from tests import template_test
from tests import fresh

from composer_jax import config
from composer_jax.chat import hub_files
from composer_jax.model import hf
from composer_jax.model import params as params_lib

MODEL = config.ModelConfig(
    vocab=512,
    layers=2,
    embed=32,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    experts=4,
    top_k=2,
    moe_ffn=16,
    qk_norm=True,
)
CONTEXT_TOKENS = 4096


def write(folder: pathlib.Path, cfg: config.ModelConfig = MODEL) -> None:
  """Makes the folder of a Qwen3-MoE, whose seed no experiment has."""
  params = params_lib.publish_dtype(fresh.params(cfg, 7))
  named = {k: np.asarray(v) for k, v in params_lib.names(params).items()}
  files = hub_files.write(
      template_test.tokenizer().to_str(), template_test.QWEN, ['<|im_end|>'], {}
  )
  hf.save(folder, cfg, named, files, CONTEXT_TOKENS)
