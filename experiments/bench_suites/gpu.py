"""One script for a GPU: equal bits, errors, and time beside the machine's.

Rooflines are of one H200 (141 GB). Everything takes its sizes and the
implementation from the caller, so that a machine without a GPU can run it
small; the figures mean something on a GPU only.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import hashlib
import os
import statistics
import subprocess
import sys
import time

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
from kernels_triton import delta
from kernels_triton import grouped
from kernels_triton import logprob

_BYTES_PER_SECOND = 4.3e12
_FLOPS = {'bfloat16': 790e12, 'float32': 60e12}  # f32: without tensor cores
_MOST_ERROR = {'bfloat16': 1e-2, 'float32': 1e-5}
_REPEATS = 20


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Of one layer; the default is that of a 30B-parameter model, 3B active."""

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
  words: int = 1 << 30  # of a weight delta
  checked: int = 512  # tokens of a row in the checks of bits and errors


def _normal(seed: int, *shape: int, dtype='bfloat16', scale=1.0) -> jax.Array:
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


@functools.partial(jax.jit, static_argnames='cfg')
def _score(params, tokens, cfg):
  """Log-probs and routes of whole rows."""
  b, t = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
  ones = jnp.ones((b, t), jnp.int32)
  out = transformer.forward(params, tokens, ones, positions, cfg=cfg)
  targets = jnp.roll(tokens, -1, axis=1)
  logps, _ = transformer.token_logps(params, out.hidden, targets, cfg=cfg)
  return logps, out.routing


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


def _attention_operands(sizes: Sizes, rows: int, tokens: int):
  m = sizes.model
  q = _normal(1, rows, tokens, m.q_heads, m.head_dim, dtype=m.dtype)
  q = (q.astype(jnp.float32) * m.head_dim**-0.5).astype(m.dtype)
  k, v = (
      _normal(s, rows, tokens, m.kv_heads, m.head_dim, dtype=m.dtype)
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
  operands = _attention_operands(sizes, 1, sizes.checked)
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
      'from experiments.bench_suites import gpu;'
      f'from composer_jax import config; sizes = {_source(sizes)};'
      'print(gpu.digests(sizes, None))'
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
      .replace('Sizes(', 'gpu.Sizes(')
      .replace('ModelConfig(', 'config.ModelConfig(')
  )


def _error(name: str, got, want, dtype: str) -> paired.Figure:
  got, want = (np.asarray(x, np.float64) for x in jax.device_get((got, want)))
  error = np.abs(got - want).max() / np.abs(want).max()
  return paired.Figure(
      f'error of {name}, {dtype}',
      error,
      'of the largest',
      most=_MOST_ERROR[dtype],
  )


def errors(
    sizes: Sizes, dtype: str, implementation: str | None = None
) -> list[paired.Figure]:
  """Largest errors against float64, relative to the largest value."""
  sizes = dataclasses.replace(
      sizes, model=dataclasses.replace(_small(sizes, None), dtype=dtype)
  )
  operands = _attention_operands(sizes, 1, sizes.checked)
  x, gates, chosen, w_in, w_out = expert_operands(sizes, sizes.checked)
  params = jnp.ones(x.shape[1]), _normal(
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
    exact_x, exact_gates, exact_in, exact_out = inputs[1]
    want = (
        plain_ops.segment_attention(*inputs[0], *operands[3:]),
        plain_ops.dense_experts(
            exact_x, exact_gates, chosen, exact_in, exact_out
        ),
        plain_ops.target_log_probs(inputs[2], exact_x, targets, eps=1e-6)[0],
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
  w_in = _normal(
      7, m.experts, m.embed, 2 * m.moe_ffn, dtype=m.dtype, scale=m.embed**-0.5
  )
  w_out = _normal(
      8, m.experts, m.moe_ffn, m.embed, dtype=m.dtype, scale=m.moe_ffn**-0.5
  )
  x = _normal(9, tokens, m.embed, dtype=m.dtype)
  return x, jax.nn.softmax(values, axis=-1), chosen, w_in, w_out


def _round(f: Callable, *args) -> paired.Round:
  compiled = jax.jit(f)
  return lambda: jax.block_until_ready(compiled(*args))


def _works(run: paired.Round) -> bool:
  """Not every peer knows every shape, type and device."""
  try:
    run()
  except (ValueError, TypeError, RuntimeError, NotImplementedError):
    return False
  return True


def _timed(
    name: str,
    ours: paired.Round,
    peers: dict[str, paired.Round],
    *,
    work: float,
    peak: float,
    unit: str,
    pairs: int,
) -> list[paired.Result | paired.Figure]:
  """Rate of `ours` against its peers, and as a share of the machine's."""
  result = paired.measure(
      name,
      ours,
      {peer: run for peer, run in peers.items() if _works(run)},
      work=work / 1e12,
      unit=unit,
      pairs=pairs,
      target=1.0,
  )
  share = 100 * statistics.median(result.ours) * 1e12 / peak
  return [result, paired.Figure(f'{name}, of the roofline', share, '%')]


def _dot_product_attention(q, k, v, implementation):
  return jax.nn.dot_product_attention(
      q,
      k,
      v,
      scale=1.0,
      is_causal=q.shape[1] > 1,
      implementation=implementation,
  )


def _time_attention(sizes, pairs, implementation):
  m, rows = sizes.model, sizes.tokens // sizes.row
  q, k, v, *where = _attention_operands(sizes, rows, sizes.row)
  ours = lambda q, k, v: attention.segment_attention(
      q, k, v, *where, implementation=implementation
  )
  flops = 2 * sizes.tokens * sizes.row * m.q_heads * m.head_dim  # half masked
  out = []
  for name, wrap, factor in (
      ('attention forward', lambda f: f, 1.0),
      ('attention with gradients', _with_gradients, 3.5),
  ):
    out += _timed(
        f'{name}, {rows} rows of {sizes.row}',
        _round(wrap(ours), q, k, v),
        {
            f'dot_product_attention/{p}': _round(
                wrap(
                    functools.partial(_dot_product_attention, implementation=p)
                ),
                q,
                k,
                v,
            )
            for p in ('cudnn', 'xla')
        },
        work=factor * flops,
        peak=_FLOPS[m.dtype],
        unit='TFLOP/s',
        pairs=pairs,
    )
  return out


def _with_gradients(f):
  loss = lambda *args: jnp.sum(f(*args).astype(jnp.float32))
  return jax.grad(loss, (0, 1, 2))


def _time_decode(sizes, pairs, implementation):
  m, b, s = sizes.model, sizes.sequences, sizes.context
  pages = b * s // contract.KEY_BLOCK
  shape = (pages, m.kv_heads, contract.KEY_BLOCK, m.head_dim)
  k, v = (_normal(seed, *shape, dtype=m.dtype) for seed in (2, 3))
  table = jax.random.permutation(jax.random.key(4), pages).reshape(b, -1)
  q = _normal(1, b, m.q_heads, m.head_dim, dtype=m.dtype)
  positions = jnp.full((b,), s - 1, jnp.int32)
  contiguous = (b, s, m.kv_heads, m.head_dim)
  peer = lambda q, k, v: _dot_product_attention(
      q[:, None], k.reshape(contiguous), v.reshape(contiguous), 'xla'
  )
  return _timed(
      f'decode attention, {b} x {s}',
      _round(
          functools.partial(
              attention.paged_decode_attention, implementation=implementation
          ),
          q,
          k,
          v,
          table,
          positions,
      ),
      {'dot_product_attention/xla, no pages': _round(peer, q, k, v)},
      work=k.nbytes + v.nbytes,
      peak=_BYTES_PER_SECOND,
      unit='TB/s',
      pairs=pairs,
  )


def _time_experts(sizes, pairs, implementation):
  m = sizes.model
  x, gates, chosen, w_in, w_out = expert_operands(sizes, sizes.tokens)
  ours = functools.partial(
      grouped.expert_ffn, dtype=m.dtype, implementation=implementation
  )
  wide = x.astype(jnp.float32)
  return _timed(
      f'experts, {sizes.tokens} tokens',
      _round(ours, wide, gates, chosen, w_in, w_out),
      {
          'lax.ragged_dot': _round(
              plain_ops.ragged_experts, x, gates, chosen, w_in, w_out
          )
      },
      work=6 * sizes.tokens * m.top_k * m.embed * m.moe_ffn,
      peak=_FLOPS[m.dtype],
      unit='TFLOP/s',
      pairs=pairs,
  )


def _time_log_probs(sizes, pairs, implementation):
  m, n = sizes.model, sizes.tokens
  hidden = _normal(9, n, m.embed, dtype=m.dtype)
  unembed = _normal(5, m.embed, m.vocab, dtype=m.dtype, scale=m.embed**-0.5)
  targets = jnp.arange(n, dtype=jnp.int32) % m.vocab
  scale = jnp.ones(m.embed)

  def gradients(op, **options):
    def loss(scale, unembed, hidden):
      logps, _ = op((scale, unembed), hidden, targets, eps=1e-6, **options)
      return jnp.sum(logps)

    return _round(jax.grad(loss, (0, 1, 2)), scale, unembed, hidden)

  return _timed(
      f'log-probs with gradients, {n} tokens',
      gradients(logprob.target_log_probs, implementation=implementation),
      {'all logits at once': gradients(plain_ops.target_log_probs)},
      work=8 * n * m.embed * m.vocab,  # logits twice, and two products
      peak=_FLOPS[m.dtype],
      unit='TFLOP/s',
      pairs=pairs,
  )


def _time_delta(sizes, pairs, implementation):
  old = jax.random.bits(jax.random.key(0), (sizes.words,), jnp.uint16)
  new = old.at[::100].add(1)
  room = sizes.words // 100 + 1

  def encode(old, new):
    counts = delta.count(old, new, implementation=implementation)
    return delta.compact(
        old, new, counts, room=room, implementation=implementation
    )

  return _timed(
      f'delta of {sizes.words} words, 1% changed',
      _round(encode, old, new),
      {},
      work=2 * (old.nbytes + new.nbytes),  # each is read twice
      peak=_BYTES_PER_SECOND,
      unit='TB/s',
      pairs=pairs,
  )


def times(
    sizes: Sizes, *, pairs: int, implementation: str | None = None
) -> list[paired.Result | paired.Figure]:
  """Rates of the kernels."""
  parts = (
      _time_attention,
      _time_decode,
      _time_experts,
      _time_log_probs,
      _time_delta,
  )
  return [r for part in parts for r in part(sizes, pairs, implementation)]


def run(
    *, pairs: int, sizes: Sizes = Sizes()
) -> list[paired.Result | paired.Figure]:
  """Everything, in at most eight minutes."""
  start = time.perf_counter()
  out = bits(sizes)
  out.append(fresh_processes(sizes))
  for dtype in _MOST_ERROR:
    out += errors(sizes, dtype)
  out += times(sizes, pairs=pairs)
  minutes = (time.perf_counter() - start) / 60
  return [*out, paired.Figure('this script', minutes, 'minutes', most=8)]
