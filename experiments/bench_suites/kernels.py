"""What the numeric contract costs, and how near the kernels are to the machine.

On a CPU: a training step against the same model with plain ops, the experts'
tile map against the ways to do without it, and what a long row costs to
compile. On a GPU one script of a few minutes: equal bits, errors, rates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax.learner import losses
from composer_jax.learner import optimizer
from composer_jax.learner import packing
from composer_jax.learner import step
from experiments.bench_suites import gpu_checks
from experiments.bench_suites import gpu_times
from experiments.bench_suites import mixtral
from experiments.bench_suites import paired
from experiments.bench_suites import plain_ops
from kernels_triton import contract
from kernels_triton import grouped

_LEAST_RATIO = 1 / 1.10  # speed with the contract over speed without
_MOST_COMPILE_SECONDS = 20
_STEPS = 5  # per round


class Trainer:
  """Training steps on one batch, with a program of its own."""

  def __init__(
      self, cfg: config.ModelConfig, rows: int, tokens_per_row: int, plain: bool
  ):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, cfg.vocab, (rows, tokens_per_row), np.int32)
    batch, _ = packing.pack_documents(
        list(tokens), packing.Shape(rows, tokens_per_row, contract.KEY_BLOCK)
    )
    devices = min(2, len(jax.devices()), rows)
    mesh = step.make_mesh(config.MeshConfig(devices))
    self._tx = optimizer.AdamW(1e-3).build()
    self._state = step.init_state(cfg, self._tx, 0, mesh)
    targets = jnp.float32(rows * (tokens_per_row - 1))
    self._operands = jax.device_put(batch), targets
    # Not `step.gradients` itself: both ways must be traced afresh.
    gradients = functools.partial(
        step.gradients.__wrapped__, cfg=cfg, loss=losses.NextToken(), mesh=mesh
    )
    start = time.perf_counter()
    with plain_ops.replaced() if plain else contextlib.nullcontext():
      lowered = jax.jit(gradients).lower(self._state.params, *self._operands)
    self._gradients = lowered.compile()
    self.compile_seconds = time.perf_counter() - start

  def run(self, steps: int):
    """Returns the parameters after so many more steps."""
    for _ in range(steps):
      gradients, _ = self._gradients(self._state.params, *self._operands)
      self._state = step.apply_gradients(self._state, gradients, tx=self._tx)
    return jax.block_until_ready(self._state.params)


def cost_of_contract(
    cfg: config.ModelConfig, rows: int, tokens_per_row: int, pairs: int
) -> paired.Result:
  """Tokens per second with the contract over those with plain ops."""
  ours, plain = (
      Trainer(cfg, rows, tokens_per_row, plain) for plain in (False, True)
  )
  return paired.measure(
      f'train {rows}x{tokens_per_row} {cfg.dtype} with the contract',
      functools.partial(ours.run, _STEPS),
      {'plain ops': functools.partial(plain.run, _STEPS)},
      work=_STEPS * rows * tokens_per_row,
      unit='tokens/s',
      pairs=pairs,
      target=_LEAST_RATIO,
  )


def compile_seconds(cfg: config.ModelConfig, tokens: int) -> paired.Figure:
  """Time to trace and compile the gradient of one row of `tokens`."""
  with _without_cache():
    seconds = Trainer(cfg, 1, tokens, plain=False).compile_seconds
  return paired.Figure(
      f'compile a row of {tokens} tokens, {cfg.dtype}',
      seconds,
      's',
      most=_MOST_COMPILE_SECONDS,
  )


@contextlib.contextmanager
def _without_cache():
  before = jax.config.jax_enable_compilation_cache
  jax.config.update('jax_enable_compilation_cache', False)
  try:
    yield
  finally:
    jax.config.update('jax_enable_compilation_cache', before)


def experts(
    cfg: config.ModelConfig, tokens: int, pairs: int
) -> list[paired.Result]:
  """Tokens per second of the experts, forward and backward."""
  keys = jax.random.split(jax.random.key(0), 5)
  normal = jax.random.normal
  x = normal(keys[0], (tokens, cfg.embed))
  logits = normal(keys[1], (tokens, cfg.experts))
  values, chosen = jax.lax.top_k(logits, cfg.top_k)
  gates = jax.nn.softmax(values, axis=-1)
  w_in = normal(keys[2], (cfg.experts, cfg.embed, 2, cfg.moe_ffn))
  w_out = normal(keys[3], (cfg.experts, cfg.moe_ffn, cfg.embed))
  weights = normal(keys[4], x.shape)

  def round_of(experts):
    def loss(x, gates, w_in, w_out):
      return jnp.sum(experts(x, gates, chosen, w_in, w_out) * weights)

    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    args = x, gates, w_in * cfg.embed**-0.5, w_out * cfg.moe_ffn**-0.5
    return lambda: jax.block_until_ready(gradients(*args))

  return [
      paired.measure(
          f'experts, {tokens} tokens, by tile map',
          round_of(grouped.expert_ffn),
          {name: round_of(peer)},
          work=tokens,
          unit='tokens/s',
          pairs=pairs,
          target=1.0,
      )
      for name, peer in (
          ('lax.ragged_dot', plain_ops.ragged_experts),
          ('dense', plain_ops.dense_experts),
      )
  ]


def gpu_script(
    sizes: gpu_checks.Sizes, pairs: int
) -> list[paired.Result | paired.Figure]:
  """Everything a GPU is asked, in at most eight minutes."""
  start = time.perf_counter()
  out = gpu_checks.bits(sizes)
  out.append(gpu_checks.fresh_processes(sizes))
  for dtype in gpu_checks.MOST_ERROR:
    out += gpu_checks.errors(sizes, dtype)
  out += gpu_times.times(sizes, pairs=pairs)
  minutes = (time.perf_counter() - start) / 60
  return [*out, paired.Figure('this script', minutes, 'minutes', most=8)]


def run(*, pairs: int) -> list[paired.Result | paired.Figure]:
  """All figures of the device at hand."""
  if jax.default_backend() == 'gpu':
    return gpu_script(gpu_checks.Sizes(), pairs)
  models = [
      dataclasses.replace(mixtral.MODEL, dtype=dtype)
      for dtype in ('float32', 'bfloat16')
  ]
  costs = [cost_of_contract(cfg, 16, 256, pairs) for cfg in models]
  compiled = [compile_seconds(cfg, 4096) for cfg in models]
  return [*costs, *experts(mixtral.MODEL, 4096, pairs), *compiled]
