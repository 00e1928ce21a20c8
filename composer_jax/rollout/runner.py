"""Device side of the engine: weights, cache, and programs of fixed shapes.

Sizes come in a few buckets, so that after `Runner.warmup` nothing compiles.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.model import decode
from composer_jax.model import params as params_lib
from composer_jax.rollout import sampling
from kernels_triton import contract

_prefill = jax.jit(decode.prefill, static_argnames='cfg')


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='cache')
def _insert(
    cache, prefilled, rows, slots, seeds, positions, temperatures, *, cfg
):
  cache = decode.insert(cache, prefilled.k, prefilled.v, rows, slots)
  logps = prefilled.logps[rows]
  return cache, sampling.sample(
      logps, seeds, positions, temperatures, implementation=cfg.kernels
  )


@functools.partial(
    jax.jit, static_argnames=('cfg', 'steps'), donate_argnames='cache'
)
def _decode(
    params, cache, tokens, positions, seeds, temperatures, *, cfg, steps
):
  last = cache.k[0].shape[2] - 1

  def body(carry, _):
    cache, tokens, at = carry
    logps, cache, routing = decode.step(params, cache, tokens, at, cfg=cfg)
    drawn, picked = sampling.sample(
        logps, seeds, at + 1, temperatures, implementation=cfg.kernels
    )
    carry = cache, drawn, jnp.minimum(at + 1, last)
    return carry, (drawn, picked, routing)

  carry, out = lax.scan(body, (cache, tokens, positions), length=steps)
  return carry[0], out


def compilations() -> int:
  """Programs compiled so far by all runners of this process."""
  return sum(f._cache_size() for f in (_prefill, _insert, _decode))


def _geometric(first: int, last: int, factor: int) -> list[int]:
  """first, first * factor, ... while below last, then last."""
  sizes = []
  while first < last:
    sizes.append(first)
    first *= factor
  return [*sizes, last]


def _bucket(sizes: Sequence[int], n: int) -> int:
  return next(s for s in sizes if s >= n)


class Runner:
  """Owns the params and the cache on one device."""

  def __init__(
      self,
      cfg: config.ModelConfig,
      rollout: config.RolloutConfig,
      params: params_lib.Params,
      device: jax.Device,
  ) -> None:
    self._cfg, self._rollout, self._device = cfg, rollout, device
    block = contract.KEY_BLOCK
    self._length = -(-rollout.context_tokens // block) * block
    self._lengths = _geometric(block, self._length, 2)
    self._row_counts = _geometric(
        max(rollout.prefill_rows // 4, 1), rollout.prefill_rows, 4
    )
    self._slot_counts = _geometric(16, rollout.slots, 4)
    self._params = self._copy(params)
    self._cache = self._new_cache()

  def _copy(self, params):
    # Never an alias: the caller may change or donate its arrays in place, and
    # device_put shares host memory with numpy whatever `may_alias` says.
    params = jax.tree.map(lambda x: x.copy(), params)
    return jax.block_until_ready(jax.device_put(params, self._device))

  def _new_cache(self):
    cache = decode.init_cache(self._cfg, self._rollout.slots, self._length)
    return jax.device_put(cache, self._device)

  def swap(self, params: params_lib.Params) -> None:
    """Replaces the weights; the cache stays.

    Raises:
      ValueError: other shapes or types, which would compile anew.
    """
    old, new = (
        jax.tree.map(lambda x: (x.shape, x.dtype), p)
        for p in (self._params, params)
    )
    if old != new:
      raise ValueError(
          'new weights: shapes or types differ from those in use'
          f' ({self._params.norm.dtype}); publish one kind'
      )
    self._params = self._copy(params)

  def padded_length(self, tokens: int) -> int:
    """Length that a context of so many tokens is prefilled at."""
    return _bucket(self._lengths, tokens)

  def prefill(self, contexts: Sequence[trace.TokenTrace]) -> decode.Prefill:
    """Prefills up to `prefill_rows` contexts, obeying recorded routes.

    So keys and values fit the routes that the trainer will replay, whichever
    weights recorded them.
    """
    longest = max(len(c) for c in contexts)
    return self._prefill(
        contexts,
        _bucket(self._row_counts, len(contexts)),
        self.padded_length(longest),
    )

  def _prefill(self, contexts, rows, length):
    cfg, dtype = self._cfg, trace.route_dtype(self._cfg.experts)
    tokens = np.zeros((rows, length), np.int32)
    lengths = np.ones(rows, np.int32)
    shape = (rows, length, cfg.layers, cfg.top_k)
    routing = np.full(shape, trace.blank_route(dtype), dtype)
    for i, context in enumerate(contexts):
      n = lengths[i] = len(context)
      tokens[i, :n] = context.tokens
      if context.routing is not None:
        routing[i, :n] = context.routing.experts
    return _prefill(self._params, tokens, lengths, cfg=cfg, routing=routing)

  def start(
      self,
      prefilled: decode.Prefill,
      rows: np.ndarray,
      slots: np.ndarray,
      *sampler: np.ndarray,
  ) -> list[Any]:
    """Copies prefilled rows to slots and draws the first token of each.

    Args:
      prefilled: from `prefill`.
      rows: i32 [n], any n.
      slots: i32 [n].
      *sampler: seeds, positions, temperatures [n] of the tokens.

    Returns:
      Chunks of (tokens, log-probs) on the device; the first n entries count.
    """
    size, chunks = self._rollout.prefill_rows, []
    for i in range(0, len(rows), size):
      part = [x[i : i + size] for x in (rows, slots, *sampler)]
      self._cache, drawn = self._insert(self._cache, prefilled, part)
      chunks.append(drawn)
    return chunks

  def _insert(self, cache, prefilled, arrays):
    size = self._rollout.prefill_rows
    padded = [np.zeros(size, x.dtype) for x in arrays]
    padded[1][:] = self._rollout.slots  # past the end: skipped
    for whole, some in zip(padded, arrays, strict=True):
      whole[: len(some)] = some
    return _insert(cache, prefilled, *padded, cfg=self._cfg)

  def decode(self, n: int, *inputs: np.ndarray) -> Any:
    """Runs `steps_per_sync` = k steps of at least the first n slots.

    A window that ends inside the block runs on to the block's end: its slot is
    its own, and the host keeps nothing of the excess.

    Args:
      n: slots that matter.
      *inputs: tokens, positions, seeds, temperatures of all slots [N].

    Returns:
      (tokens, log-probs [k n'], routing of the inputs [k n' L K]) on the
      device, which may read the inputs in place until it is done.
    """
    n = _bucket(self._slot_counts, n)
    inputs = [x[:n] for x in inputs]
    self._cache, out = self._decode(self._cache, inputs)
    return out

  def _decode(self, cache, inputs):
    steps = self._rollout.steps_per_sync
    return _decode(self._params, cache, *inputs, cfg=self._cfg, steps=steps)

  def warmup(self) -> None:
    """Compiles every shape on a cache of its own; may run beside requests."""
    kinds = (np.int32, np.int32, np.uint32, np.int32, np.float32)
    nothing = [np.zeros(0, k) for k in kinds]
    cache = self._new_cache()
    for length in self._lengths:
      for count in self._row_counts:
        prefilled = self._prefill([], count, length)
        cache, _ = self._insert(cache, prefilled, nothing)
    for n in self._slot_counts:
      kinds = (np.int32, np.int32, np.uint32, np.float32)
      cache, _ = self._decode(cache, [np.zeros(n, k) for k in kinds])
    jax.block_until_ready(cache)
