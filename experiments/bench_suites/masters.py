"""Weights as a trainer publishes them, for the benchmark of their deltas."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from composer_jax import config
from composer_jax.learner import losses
from composer_jax.learner import optimizer
from composer_jax.learner import packing
from composer_jax.learner import step as step_lib
from composer_jax.model import params as params_lib
from kernels_triton import contract

_SMALL = config.ModelConfig(layers=2, embed=64, vocab=512, moe_ffn=64)


def simulate(rate: float, values: int, seed: int = 0) -> Iterator[np.ndarray]:
  """bf16 words, step after step, of f32 masters under AdamW.

  Gradients have unit variance and a drift of 0.15 sigma; rows of 2048 values
  have scales of their own.
  """
  rng = np.random.default_rng(seed)
  rows = np.exp(rng.normal(0, 0.3, (-(-values // 2048), 1)))
  w = (0.02 * rows * rng.standard_normal((len(rows), 2048))).ravel()[:values]
  w = w.astype(np.float32)
  drift = 0.15 * rng.standard_normal(values, np.float32)
  m = drift + 0.23 * rng.standard_normal(values, np.float32)
  v = 1 + drift**2
  while True:
    yield w.astype(ml_dtypes.bfloat16).view(np.uint16)
    g = drift + rng.standard_normal(values, np.float32)
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    w = (w - rate * (m / np.sqrt(v) + 0.1 * w)).astype(np.float32)


def real(rate: float) -> tuple[np.ndarray, np.ndarray]:
  """bf16 words of a small model before and after a real step at `rate`."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, _SMALL.vocab, (8, 64), np.int32)
  batch, _ = packing.pack_documents(
      list(tokens), packing.Shape(8, 64, contract.KEY_BLOCK)
  )
  mesh = step_lib.make_mesh(config.MeshConfig(1))
  tx = optimizer.AdamW(rate).build()
  state = step_lib.init_state(_SMALL, tx, 0, mesh)
  words = []
  for _ in range(4):
    words.append(
        np.concatenate(
            [
                np.asarray(a).astype(ml_dtypes.bfloat16).view(np.uint16).ravel()
                for a in params_lib.names(state.params).values()
            ]
        )
    )
    state, _ = step_lib.train_step(
        state,
        [batch],
        8 * 63,
        cfg=_SMALL,
        loss=losses.NextToken(),
        tx=tx,
        mesh=mesh,
    )
  return words[-2], words[-1]
