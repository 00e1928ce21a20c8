"""Log-probabilities from the final hidden state, in f32, block by block."""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from kernels_triton import gradients
from kernels_triton import launch
from kernels_triton import rmsnorm
from kernels_triton import rows

# Rows, or on a GPU columns, whose logits the backward holds at once.
_BACKWARD_ROWS = 2048
_BACKWARD_COLUMNS = 16384


def _block(eps, params, hidden):
  scale, unembed = params
  normed = rmsnorm.rms_norm(hidden, scale, eps, implementation=launch.REFERENCE)
  logits = normed @ unembed.astype(jnp.float32)
  # The barrier gives both roles the very same log-softmax, whatever reads it.
  return lax.optimization_barrier(jax.nn.log_softmax(logits, axis=-1))


def log_probs(
    params,
    hidden: jax.Array,
    *,
    eps: float,
    implementation: str | None = None,
) -> jax.Array:
  """Log-softmax over the vocabulary; for decode.

  Args:
    params: (final norm scale [D], unembedding [D V]).
    hidden: [n D].
    eps: of the norm.
    implementation: see `launch`.

  Returns:
    f32 [n V].
  """
  name = launch.resolve(implementation)
  if name != launch.REFERENCE:
    return _kernel_log_probs(params, hidden, eps, name)
  f = functools.partial(_block, eps)
  return rows.run_rows(f, params, hidden, implementation=launch.REFERENCE)


def _target_block(eps, params, hidden, targets):
  logps = _block(eps, params, hidden)
  ids = jnp.arange(logps.shape[-1], dtype=jnp.int32)[None, :]
  picked = jnp.sum(jnp.where(ids == targets[:, None], logps, 0.0), axis=-1)
  return picked, -jnp.sum(jnp.exp(logps) * logps, axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _target_log_probs(params, hidden, targets, eps):
  f = functools.partial(_target_block, eps)
  return rows.run_rows(
      f, params, hidden, targets, implementation=launch.REFERENCE
  )


def target_log_probs(
    params,
    hidden: jax.Array,
    targets: jax.Array,
    eps: float,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Log-prob of each row's target and the entropy of its distribution.

  [n V] is never held: forward works in row blocks, backward in chunks that
  recompute the logits. The entropy is a statistic and carries no gradient.

  Args:
    params: (final norm scale [D], unembedding [D V]).
    hidden: [n D].
    targets: i32 [n].
    eps: of the norm.
    implementation: see `launch`.

  Returns:
    (log-probs f32 [n], entropy f32 [n] in nats).
  """
  name = launch.resolve(implementation)
  if name == launch.REFERENCE:
    return _target_log_probs(params, hidden, targets, eps)
  normed, unembed = _normed(params, hidden, eps, name)
  return _kernel_target_log_probs(normed, unembed, targets, name)


def _forward(params, hidden, targets, eps):
  return _target_log_probs(params, hidden, targets, eps), (
      params,
      hidden,
      targets,
  )


def _backward(eps, residuals, cotangents):
  (scale, unembed), hidden, targets = residuals
  g, _ = cotangents
  n = hidden.shape[0]
  size = min(_BACKWARD_ROWS, n)
  chunks = -(-n // size)
  weights = unembed.astype(jnp.float32)
  ids = jnp.arange(unembed.shape[-1], dtype=jnp.int32)[None, :]

  def split(x):
    pad = [(0, chunks * size - n)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, pad).reshape(chunks, size, *x.shape[1:])

  def chunk(carry, xs):
    d_scale, d_unembed = carry
    h, t, w = xs
    norm = functools.partial(
        rmsnorm.rms_norm, eps=eps, implementation=launch.REFERENCE
    )
    normed, norm_vjp = jax.vjp(norm, h, scale)
    probs = jax.nn.softmax(normed @ weights, axis=-1)
    d_logits = ((ids == t[:, None]) - probs) * w[:, None]
    d_h, d_s = norm_vjp(d_logits @ weights.T)
    return (
        d_scale + d_s,
        d_unembed + gradients.of_weights(normed, d_logits),
    ), d_h

  zeros = (jnp.zeros_like(scale), jnp.zeros(unembed.shape, jnp.float32))
  (d_scale, d_unembed), d_hidden = lax.scan(
      chunk, zeros, (split(hidden), split(targets), split(g))
  )
  d_hidden = d_hidden.reshape(-1, hidden.shape[-1])[:n]
  return (d_scale, d_unembed.astype(unembed.dtype)), d_hidden, None


_target_log_probs.defvjp(_forward, _backward)


def _normed(params, hidden, eps, implementation):
  """The operands of the product, both of the type of the hidden state."""
  scale, unembed = params
  normed = rmsnorm.rms_norm(hidden, scale, eps, implementation=implementation)
  return normed.astype(hidden.dtype), unembed.astype(hidden.dtype)


def _kernel_log_probs(params, hidden, eps, implementation):
  from kernels_triton import logprob_kernel  # needs triton

  normed, unembed = _normed(params, hidden, eps, implementation)
  targets = jnp.zeros(hidden.shape[0], jnp.int32)
  lse, _, _, logits = logprob_kernel.statistics(
      normed, unembed, targets, implementation, keep=True
  )
  # The same subtraction as in `_kernel_forward`, hence the same bits.
  return logits - lse[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _kernel_target_log_probs(normed, unembed, targets, implementation):
  return _kernel_forward(normed, unembed, targets, implementation)[0]


def _kernel_forward(normed, unembed, targets, implementation):
  from kernels_triton import logprob_kernel  # needs triton

  lse, entropy, logit, _ = logprob_kernel.statistics(
      normed, unembed, targets, implementation
  )
  return (logit - lse, entropy), (normed, unembed, targets, lse)


def _kernel_backward(implementation, residuals, cotangents):
  """Two plain matmuls per chunk of the vocabulary, chunks ascending."""
  from kernels_triton import grouped_kernel  # needs triton
  from kernels_triton import logprob_kernel

  normed, unembed, targets, lse = residuals
  one_group = launch.size(normed.shape[0])
  d_normed = jnp.zeros(normed.shape, jnp.float32)
  d_unembed = []
  for chunk in range(-(-unembed.shape[1] // _BACKWARD_COLUMNS)):
    errors = logprob_kernel.errors(
        normed,
        unembed,
        targets,
        lse,
        cotangents[0],
        chunk,
        _BACKWARD_COLUMNS,
        implementation,
    )
    start = chunk * _BACKWARD_COLUMNS
    weights = unembed[:, start : start + _BACKWARD_COLUMNS]
    d_normed += grouped_kernel.rows_matmul(
        errors,
        weights[None],
        one_group,
        transposed=True,
        implementation=implementation,
    )
    part = grouped_kernel.weights_matmul(
        normed, errors, one_group, implementation=implementation
    )
    d_unembed.append(part[0].astype(unembed.dtype))
  d_unembed = jnp.concatenate(d_unembed, axis=1)
  return d_normed.astype(normed.dtype), d_unembed, None


_kernel_target_log_probs.defvjp(_kernel_forward, _kernel_backward)
