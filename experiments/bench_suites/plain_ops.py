"""The model's ops as one would write them without the numeric contract."""

from __future__ import annotations

from collections.abc import Generator
import contextlib
from unittest import mock

import jax
from jax import lax
import jax.numpy as jnp

from kernels_triton import attention
from kernels_triton import logprob
from kernels_triton import rows


def _wide(x: jax.Array) -> jax.Array:
  """Widens to f32; f64 stays, so that these also serve as references."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def segment_attention(q, k, v, segments, positions, *, implementation=None):
  """One softmax over all keys; see `attention.segment_attention`."""
  del implementation
  b, t, n, h = q.shape
  m = k.shape[2]
  q, k, v = map(_wide, (q, k, v))
  seen = segments[:, :, None] == segments[:, None]
  seen &= positions[:, None] <= positions[:, :, None]
  s = jnp.einsum('btmgh,bsmh->bmgts', q.reshape(b, t, m, n // m, h), k)
  p = jax.nn.softmax(jnp.where(seen[:, None, None], s, -1e30), axis=-1)
  return jnp.einsum('bmgts,bsmh->btmgh', p, v).reshape(b, t, n, h)


def target_log_probs(params, hidden, targets, eps, *, implementation=None):
  """All logits at once; see `logprob.target_log_probs`."""
  del implementation
  scale, unembed = map(_wide, params)
  hidden = _wide(hidden)
  mean_square = jnp.mean(hidden * hidden, axis=-1, keepdims=True)
  normed = hidden * lax.rsqrt(mean_square + eps) * scale[None]
  logps = jax.nn.log_softmax(normed @ unembed, axis=-1)
  picked = jnp.take_along_axis(logps, targets[:, None], axis=1)[:, 0]
  entropy = -jnp.sum(jnp.exp(logps) * logps, axis=-1)
  return picked, lax.stop_gradient(entropy)


@contextlib.contextmanager
def replaced() -> Generator[None]:
  """Whatever is traced meanwhile uses plain ops, but the experts' tile map."""
  with contextlib.ExitStack() as stack:
    for module, name, plain in (
        (rows, 'rowwise', lambda f, implementation=None: f),
        (attention, 'segment_attention', segment_attention),
        (logprob, 'target_log_probs', target_log_probs),
    ):
      stack.enter_context(mock.patch.object(module, name, plain))
    yield


def dense_experts(x, gates, experts, w_in, w_out):
  """Every expert on every token; see `grouped.expert_ffn`."""
  ids = jnp.arange(w_in.shape[0])[None, None]
  weights = jnp.sum(gates[..., None] * (experts[..., None] == ids), axis=1)
  a, b = jnp.einsum('nd,edgf->genf', x, w_in)
  act = jax.nn.silu(a) * b * weights.T[:, :, None]
  return jnp.einsum('enf,efd->nd', act, w_out)


def ragged_experts(x, gates, experts, w_in, w_out):
  """Sorted assignments through lax.ragged_dot; see `grouped.expert_ffn`."""
  k = experts.shape[1]
  order = jnp.argsort(experts.reshape(-1), stable=True)
  ids = jnp.arange(w_in.shape[0])[:, None]
  sizes = jnp.sum(experts.reshape(1, -1) == ids, axis=1, dtype=jnp.int32)
  product = lambda a, w: lax.ragged_dot(
      a, w, sizes, preferred_element_type=jnp.float32
  )
  up = product(x[order // k], w_in.reshape(*w_in.shape[:2], -1))
  a, b = jnp.split(up, 2, axis=-1)
  act = jax.nn.silu(a) * b * gates.reshape(-1)[order][:, None]
  y = product(act.astype(w_out.dtype), w_out)
  return jnp.sum(y[jnp.argsort(order)].reshape(-1, k, y.shape[1]), axis=1)
