"""Calls of the log-prob kernels; import it only where Triton is installed.

The arithmetic type of the products is that of the hidden state.
"""

import functools

import jax
import jax.numpy as jnp

from kernels_triton import launch
from kernels_triton import logprob_kernel as kernel
from kernels_triton import matmul

_CHUNK = 16384  # columns of the vocabulary whose errors the backward holds


def _spec(shape, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _statistics(normed, unembed, targets, keep, implementation):
  """(lse, entropy, target logit [n], logits [n V] if keep)."""
  n, depth = normed.shape
  vocab = unembed.shape[1]
  config = launch.config(kernel.CONFIGS, normed.dtype, implementation)
  blocks = -(-vocab // config.tiles['COLS'])
  parts, logits = launch.call(
      kernel.tiles,
      normed,
      unembed,
      targets.astype(jnp.int32),
      launch.size(n),
      out=(_spec((blocks, 4, n)), _spec((n, vocab) if keep else (1, 1))),
      grid=(-(-n // config.tiles['ROWS']), blocks),
      config=config,
      implementation=implementation,
      KEEP=keep,
      D=depth,
      V=vocab,
  )
  config = launch.config(kernel.MERGE_CONFIGS, jnp.float32, implementation)
  merged = launch.call(
      kernel.merge,
      parts,
      launch.size(n),
      out=(_spec((n,)),) * 3,
      grid=(-(-n // config.tiles['ROWS']),),
      config=config,
      implementation=implementation,
      BLOCKS=blocks,
  )
  return *merged, logits


def log_probs(normed, unembed, implementation):
  """Log-softmax rows f32 [n V] of normed [n D] @ unembed [D V]."""
  unembed = unembed.astype(normed.dtype)
  targets = jnp.zeros(normed.shape[0], jnp.int32)
  lse, _, _, logits = _statistics(
      normed, unembed, targets, True, implementation
  )
  return logits - lse[:, None]


def _forward(normed, unembed, targets, implementation):
  lse, entropy, hit, _ = _statistics(
      normed, unembed.astype(normed.dtype), targets, False, implementation
  )
  return (hit - lse, entropy), (normed, unembed, targets, lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def target_log_probs(normed, unembed, targets, implementation):
  """(log-prob of each row's target, entropy), f32 [n] each."""
  return _forward(normed, unembed, targets, implementation)[0]


def _backward(implementation, residuals, cotangents):
  normed, unembed, targets, lse = residuals
  g, _ = cotangents  # the entropy is a statistic
  n, depth = normed.shape
  vocab = unembed.shape[1]
  weights = unembed.astype(normed.dtype)
  config = launch.config(kernel.CONFIGS, normed.dtype, implementation)
  d_normed = jnp.zeros((n, depth), jnp.float32)
  d_unembed = []
  for first in range(0, vocab, _CHUNK):
    width = min(_CHUNK, vocab - first)
    (errors,) = launch.call(
        kernel.errors,
        normed,
        weights,
        targets.astype(jnp.int32),
        lse,
        g,
        launch.size(n),
        out=(_spec((n, width), normed.dtype),),
        grid=(
            -(-n // config.tiles['ROWS']),
            -(-width // config.tiles['COLS']),
        ),
        config=config,
        implementation=implementation,
        FIRST=first,
        WIDTH=width,
        D=depth,
        V=vocab,
    )
    chunk = weights[:, first : first + width]
    d_normed += matmul.matmul(errors, chunk.T, implementation=implementation)
    d_unembed.append(
        matmul.matmul(normed.T, errors, implementation=implementation)
    )
  d_unembed = jnp.concatenate(d_unembed, axis=1)
  return d_normed.astype(normed.dtype), d_unembed.astype(unembed.dtype), None


target_log_probs.defvjp(_forward, _backward)
