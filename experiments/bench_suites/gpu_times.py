"""Rates of the kernels of one layer, beside others' and the machine's.

Rooflines are of one H200; elsewhere the shares of them mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import statistics

import jax
import jax.numpy as jnp

from experiments.bench_suites import gpu_checks
from experiments.bench_suites import paired
from experiments.bench_suites import plain_ops
from kernels_triton import attention
from kernels_triton import contract
from kernels_triton import grouped
from kernels_triton import logprob

_BYTES_PER_SECOND = 4.3e12  # measured
_FLOPS = {'bfloat16': 790e12, 'float32': 60e12}  # f32: without tensor cores


def _round(f: Callable, *args) -> paired.Round:
  compiled = jax.jit(f)
  return lambda: jax.block_until_ready(compiled(*args))


def _works(run: paired.Round) -> bool:
  """Says whether the peer can do this shape and type on this device."""
  try:
    run()
  except (ValueError, TypeError, RuntimeError):
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
  q, k, v, *where = gpu_checks.attention_operands(sizes, rows, sizes.row)
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
  k, v = (gpu_checks.normal(seed, *shape, dtype=m.dtype) for seed in (2, 3))
  table = jax.random.permutation(jax.random.key(4), pages).reshape(b, -1)
  q = gpu_checks.normal(1, b, m.q_heads, m.head_dim, dtype=m.dtype)
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
  x, gates, chosen, w_in, w_out = gpu_checks.expert_operands(
      sizes, sizes.tokens
  )
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
  hidden = gpu_checks.normal(9, n, m.embed, dtype=m.dtype)
  unembed = gpu_checks.normal(
      5, m.embed, m.vocab, dtype=m.dtype, scale=m.embed**-0.5
  )
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


def times(
    sizes: gpu_checks.Sizes, *, pairs: int, implementation: str | None = None
) -> list[paired.Result | paired.Figure]:
  """Rates of the kernels."""
  parts = (
      _time_attention,
      _time_decode,
      _time_experts,
      _time_log_probs,
  )
  return [r for part in parts for r in part(sizes, pairs, implementation)]
