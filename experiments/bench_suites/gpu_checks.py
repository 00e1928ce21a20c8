"""Equal bits and small errors of the kernels of one layer.

Sizes and implementation come from the caller, so that a machine without a GPU
can run all of it, small.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax.model import params as params_lib
from composer_jax.model import transformer
from experiments.bench_suites import paired
from experiments.bench_suites import plain_ops
from kernels_triton import attention
from kernels_triton import contract
from kernels_triton import grouped
from kernels_triton import logprob

MOST_ERROR = {'bfloat16': 1e-2, 'float32': 1e-5}
_REPEATS = 20


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of one layer; by default of a 30B-parameter model, 3B active."""

  model: config.ModelConfig = config.ModelConfig(
      vocab=151_936,
      layers=2,
      embed=2048,
      q_heads=32,
      kv_heads=4,
      head_dim=128,
      experts=128,
      top_k=8,
      moe_ffn=768,
      dtype='bfloat16',
  )
  tokens: int = 8192  # of a training batch
  row: int = 4096  # of them in one row
  sequences: int = 64  # decoded together
  context: int = 32_768  # of each
  checked: int = 512  # tokens of a row in the checks of bits and errors


def normal(seed: int, *shape: int, dtype='bfloat16', scale=1.0) -> jax.Array:
  x = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
  return (x * scale).astype(dtype)


def _digest(*trees) -> str:
  total = hashlib.sha256()
  for leaf in jax.tree.leaves(jax.device_get(trees)):
    total.update(np.ascontiguousarray(leaf).tobytes())
  return total.hexdigest()


def differing(a, b) -> int:
  """Elements whose bytes differ."""
  a, b = (np.ascontiguousarray(jax.device_get(x)) for x in (a, b))
  a, b = (x.view(f'u{x.itemsize}') for x in (a, b))
  return int((a != b).sum())


def score(params, tokens: jax.Array, cfg: config.ModelConfig):
  """Log-probs and routes of whole rows."""
  b, t = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
  ones = jnp.ones((b, t), jnp.int32)
  out = transformer.forward(params, tokens, ones, positions, cfg=cfg)
  targets = jnp.roll(tokens, -1, axis=1)
  logps, _ = transformer.token_logps(params, out.hidden, targets, cfg=cfg)
  return logps, out.routing


_score = jax.jit(score, static_argnames='cfg')


@functools.partial(jax.jit, static_argnames='cfg')
def _gradients(params, tokens, cfg):
  return jax.grad(lambda p: jnp.sum(_score(p, tokens, cfg)[0]))(params)


def _small(sizes: Sizes, implementation: str | None) -> config.ModelConfig:
  """The model with a vocabulary that one process can hold twice."""
  vocab = min(sizes.model.vocab, 4096)
  return dataclasses.replace(sizes.model, vocab=vocab, kernels=implementation)


def _model(sizes: Sizes, implementation: str | None):
  cfg = _small(sizes, implementation)
  params = params_lib.publish_dtype(params_lib.init(cfg, jax.random.key(0)))
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, cfg.vocab, (4, sizes.checked), np.int32)
  return cfg, params, jnp.asarray(tokens)


def digests(sizes: Sizes, implementation: str | None) -> str:
  """sha256 of log-probs, routes and every gradient of a small batch."""
  cfg, params, tokens = _model(sizes, implementation)
  return _digest(_score(params, tokens, cfg), _gradients(params, tokens, cfg))


def _zero(name: str, count: int) -> paired.Figure:
  return paired.Figure(name, count, 'differing', most=0)


def attention_operands(sizes: Sizes, rows: int, tokens: int):
  m = sizes.model
  q = normal(1, rows, tokens, m.q_heads, m.head_dim, dtype=m.dtype)
  q = (q.astype(jnp.float32) * m.head_dim**-0.5).astype(m.dtype)
  k, v = (
      normal(s, rows, tokens, m.kv_heads, m.head_dim, dtype=m.dtype)
      for s in (2, 3)
  )
  positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), q.shape[:2])
  return q, k, v, jnp.ones_like(positions), positions


def _pages(x: jax.Array, order: jax.Array) -> jax.Array:
  """Keys [T M H] cut into pages that lie in `order`."""
  t, m, h = x.shape
  pages = x.reshape(t // contract.KEY_BLOCK, contract.KEY_BLOCK, m, h)
  return jnp.zeros_like(pages).at[order].set(pages).swapaxes(1, 2)


def bits(
    sizes: Sizes,
    implementation: str | None = None,
    repeats: int = _REPEATS,
) -> list[paired.Figure]:
  """Counts of what should have been equal bits, all 0."""
  cfg, params, tokens = _model(sizes, implementation)
  logps, routes = _score(params, tokens, cfg)
  alone = [_score(params, tokens[i : i + 1], cfg) for i in range(len(tokens))]
  logps_alone, routes_alone = (
      jnp.concatenate([a[i] for a in alone]) for i in (0, 1)
  )
  first = digests(sizes, implementation)
  changed = sum(digests(sizes, implementation) != first for _ in range(repeats))
  operands = attention_operands(sizes, 1, sizes.checked)
  prefill = attention.segment_attention(
      *operands, implementation=implementation
  )
  q, k, v, _, positions = (x[0] for x in operands)
  order = jax.random.permutation(
      jax.random.key(4), sizes.checked // contract.KEY_BLOCK
  )
  decoded = attention.paged_decode_attention(
      q,
      _pages(k, order),
      _pages(v, order),
      jnp.broadcast_to(order[None], (len(q), order.size)),
      positions,
      implementation=implementation,
  )
  return [
      _zero('log-probs alone and in a batch', differing(logps, logps_alone)),
      _zero('routes alone and in a batch', differing(routes, routes_alone)),
      _zero('rows of decode and prefill', differing(prefill[0], decoded)),
      _zero(f'digests of {repeats} repeats', changed),
  ]


def fresh_processes(sizes: Sizes, processes: int = 2) -> paired.Figure:
  """Digests of other processes against this one's."""
  program = (
      'from experiments.bench_suites import gpu_checks;'
      f'from composer_jax import config; sizes = {_source(sizes)};'
      'print(gpu_checks.digests(sizes, None))'
  )
  # This process holds most of the memory.
  env = os.environ | {'XLA_PYTHON_CLIENT_MEM_FRACTION': '.1'}
  found = [
      subprocess.run(
          [sys.executable, '-c', program],
          env=env,
          stdout=subprocess.PIPE,
          check=True,
          text=True,
      ).stdout.split()[-1]
      for _ in range(processes)
  ]
  want = digests(sizes, None)
  return _zero(
      f'digests of {processes} fresh processes', sum(f != want for f in found)
  )


def _source(sizes: Sizes) -> str:
  return (
      repr(sizes)
      .replace('Sizes(', 'gpu_checks.Sizes(')
      .replace('ModelConfig(', 'config.ModelConfig(')
  )


def _error(name: str, got, want, dtype: str) -> paired.Figure:
  got, want = (np.asarray(x, np.float64) for x in jax.device_get((got, want)))
  error = np.abs(got - want).max() / np.abs(want).max()
  return paired.Figure(
      f'error of {name}, {dtype}',
      error,
      'of the largest',
      most=MOST_ERROR[dtype],
  )


def errors(
    sizes: Sizes, dtype: str, implementation: str | None = None
) -> list[paired.Figure]:
  """Largest errors against float64, relative to the largest value."""
  sizes = dataclasses.replace(
      sizes, model=dataclasses.replace(_small(sizes, None), dtype=dtype)
  )
  operands = attention_operands(sizes, 1, sizes.checked)
  segments, positions = operands[3:]
  x, gates, chosen, w_in, w_out = expert_operands(sizes, sizes.checked)
  params = jnp.ones(x.shape[1]), normal(
      5, x.shape[1], sizes.model.vocab, dtype=dtype, scale=x.shape[1] ** -0.5
  )
  targets = jnp.arange(len(x), dtype=jnp.int32) % sizes.model.vocab
  name = {'implementation': implementation}
  got = (
      attention.segment_attention(*operands, **name),
      grouped.expert_ffn(
          x.astype(jnp.float32), gates, chosen, w_in, w_out, dtype=dtype, **name
      ),
      logprob.target_log_probs(params, x, targets, eps=1e-6, **name)[0],
  )
  double = lambda tree: jax.tree.map(
      lambda a: np.asarray(a.astype(jnp.float32), np.float64), tree
  )
  inputs = [double(t) for t in (operands[:3], (x, gates, w_in, w_out), params)]
  with jax.enable_x64(True):
    (q, k, v), (exact_x, exact_gates, exact_in, exact_out), exact_params = (
        inputs
    )
    want = (
        plain_ops.segment_attention(q, k, v, segments, positions),
        plain_ops.dense_experts(
            exact_x, exact_gates, chosen, exact_in, exact_out
        ),
        plain_ops.target_log_probs(exact_params, exact_x, targets, eps=1e-6)[0],
    )
    want = jax.device_get(want)
  names = 'attention', 'experts', 'log-probs'
  return [
      _error(n, a, b, dtype) for n, a, b in zip(names, got, want, strict=True)
  ]


def expert_operands(sizes: Sizes, tokens: int):
  m = sizes.model
  keys = jax.random.split(jax.random.key(6), 2)
  values, chosen = jax.lax.top_k(
      jax.random.normal(keys[0], (tokens, m.experts)), m.top_k
  )
  w_in = normal(
      7, m.experts, m.embed, 2, m.moe_ffn, dtype=m.dtype, scale=m.embed**-0.5
  )
  w_out = normal(
      8, m.experts, m.moe_ffn, m.embed, dtype=m.dtype, scale=m.moe_ffn**-0.5
  )
  x = normal(9, tokens, m.embed, dtype=m.dtype)
  return x, jax.nn.softmax(values, axis=-1), chosen, w_in, w_out
