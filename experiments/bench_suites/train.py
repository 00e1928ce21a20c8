"""Full train steps in f32, of a small and of a larger MoE, ours with the bit
contract; and the share of this machine's matmul peak that they achieve."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax.learner import losses
from composer_jax.learner import optimizer
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.model import flops
from composer_jax.model import params as params_lib
from experiments.bench_suites import mixtral
from experiments.bench_suites import paired
from kernels_triton import contract

_LEARNING_RATE = 1e-3
_TARGET = 1.0
# 49M parameters, 16M of them active per token.
LARGE = dataclasses.replace(
    mixtral.MODEL,
    vocab=8192,
    embed=512,
    q_heads=8,
    kv_heads=4,
    head_dim=64,
    moe_ffn=768,
)
_PEAK_SIZE = 2048  # of the square matrices whose product is the peak


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


def run(*, pairs: int) -> list[paired.Result | paired.Figure]:
  """Both models, and their GFLOP/s against those of a large matmul."""
  peak = matmul_gflops()
  results: list[paired.Result | paired.Figure] = [
      paired.Figure('matmul peak, f32', peak, 'GFLOP/s')
  ]
  for cfg, rows, steps in ((mixtral.MODEL, 16, 5), (LARGE, 8, 1)):
    result = measure(pairs=pairs, cfg=cfg, rows=rows, steps=steps)
    rate = statistics.median(result.ours) * flops.train(cfg, 256) / 1e9
    results += [
        result,
        paired.Figure(f'{result.name}, achieved', rate, 'GFLOP/s'),
        paired.Figure(f'{result.name}, of the peak', rate / peak, 'x'),
    ]
  return results


def matmul_gflops(size: int = _PEAK_SIZE, rounds: int = 7) -> float:
  """The best of some products of square f32 matrices, on all cores."""
  a = jnp.ones((size, size), jnp.float32)
  multiply = jax.jit(jnp.matmul)
  multiply(a, a).block_until_ready()
  seconds = []
  for _ in range(rounds):
    began = time.perf_counter()
    multiply(a, a).block_until_ready()
    seconds.append(time.perf_counter() - began)
  return 2 * size**3 / min(seconds) / 1e9


def measure(
    *,
    pairs: int,
    cfg: config.ModelConfig,
    rows: int,
    tokens_per_row: int = 256,
    steps: int,
    devices: Sequence[int] = (1, 2),
) -> paired.Result:
  """Tokens per second of a round of `steps` updates on the same tokens.

  Args:
    pairs: rounds that count (`paired.measure`).
    cfg: the model.
    rows: rows of the batch.
    tokens_per_row: all of one document.
    steps: updates in a round.
    devices: sizes of a mesh for us to choose from.
  """
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, cfg.vocab, (rows, tokens_per_row), np.int32)
  batch, _ = packing.pack_documents(
      list(tokens), packing.Shape(rows, tokens_per_row, contract.KEY_BLOCK)
  )
  targets = rows * (tokens_per_row - 1)
  peers = {
      name: mixtral.Trainer(model, _LEARNING_RATE)
      for name, model in mixtral.models(cfg, tokens_per_row).items()
  }

  def repeat(update):
    for _ in range(steps):
      update()

  # Two devices take half the rows each, one does every sum on two cores. Which
  # is faster depends on the model, as it does for the peer's experts.
  ours = {}
  for count in devices:
    update = functools.partial(_Ours(cfg, count).step, batch, targets)
    ours[f'{count} devices'] = functools.partial(repeat, update)
  millions = params_lib.count(cfg)[0] / 1e6
  return paired.measure(
      f'train {millions:.3g}M {rows}x{tokens_per_row}',
      ours[paired.fastest(ours)],
      {
          name: functools.partial(repeat, functools.partial(peer.step, tokens))
          for name, peer in peers.items()
      },
      work=steps * tokens.size,
      unit='tokens/s',
      pairs=pairs,
      target=_TARGET,
  )
