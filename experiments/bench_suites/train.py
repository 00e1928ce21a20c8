"""Full train step, f32, 16 rows of 256 tokens; ours with the bit contract."""

from __future__ import annotations

import functools

import jax
import numpy as np

from composer_jax import config
from composer_jax.learner import losses
from composer_jax.learner import optimizer
from composer_jax.learner import packing
from composer_jax.learner import step
from experiments.bench_suites import mixtral
from experiments.bench_suites import paired
from kernels_triton import contract

_LEARNING_RATE = 1e-3
_TARGET = 0.8


class _Ours:

  def __init__(self, cfg: config.ModelConfig, devices: int):
    self._tx = optimizer.AdamW(_LEARNING_RATE).build()
    self._mesh = step.make_mesh(config.MeshConfig(devices))
    self._cfg = cfg
    self._state = step.init_state(cfg, self._tx, 0, self._mesh)

  def step(self, batch, targets: int) -> float:
    self._state, metrics = step.train_step(
        self._state,
        [batch],
        targets,
        cfg=self._cfg,
        loss=losses.NextToken(),
        tx=self._tx,
        mesh=self._mesh,
    )
    return metrics['loss']


def run(
    *,
    pairs: int,
    cfg: config.ModelConfig = mixtral.MODEL,
    rows: int = 16,
    tokens_per_row: int = 256,
    steps: int = 5,
) -> list[paired.Result]:
  """Tokens per second of a round of `steps` updates on the same tokens."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, cfg.vocab, (rows, tokens_per_row), np.int32)
  batch, _ = packing.pack_documents(
      list(tokens), packing.Shape(rows, tokens_per_row, contract.KEY_BLOCK)
  )
  ours = _Ours(cfg, devices=min(2, len(jax.devices())))
  targets = rows * (tokens_per_row - 1)
  peers = {
      name: mixtral.Trainer(model, _LEARNING_RATE)
      for name, model in mixtral.models(cfg, tokens_per_row).items()
  }

  def repeat(update):
    for _ in range(steps):
      update()

  return [
      paired.measure(
          f'train {rows}x{tokens_per_row}',
          lambda: repeat(lambda: ours.step(batch, targets)),
          {
              name: functools.partial(
                  repeat, functools.partial(peer.step, tokens)
              )
              for name, peer in peers.items()
          },
          work=steps * tokens.size,
          unit='tokens/s',
          pairs=pairs,
          target=_TARGET,
      )
  ]
