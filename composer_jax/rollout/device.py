"""Device side of the engine: weights, pages, and programs of fixed shapes.

Sizes come in a few buckets, so that after `Runner.warmup` nothing compiles.
"""

from __future__ import annotations

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
from composer_jax.model import transformer
from composer_jax.rollout import sampling
from kernels_triton import contract

_PLAIN_INPUTS = 6  # arrays of `_decode`
_MOST_INPUTS = 10  # of `_decode_shaped` with a constraint
_MOVED = 16  # pages that one call reads or writes

_prefill = jax.jit(
    decode.prefill, static_argnames='cfg', donate_argnames='pages'
)


@functools.partial(
    jax.jit, static_argnames=('cfg', 'steps'), donate_argnames='pages'
)
def _decode(
    params, pages, table, tokens, positions, routing, seeds, heat, *, cfg, steps
):
  last = table.shape[1] * contract.KEY_BLOCK - 1

  def body(carry, _):
    pages, tokens, at, recorded = carry
    logps, pages, routing = decode.step(
        params, pages, tokens, at, table, cfg=cfg, routing=recorded
    )
    drawn, picked = sampling.sample(
        logps, seeds, at + 1, heat, implementation=cfg.kernels
    )
    at = jnp.where(at < 0, at, jnp.minimum(at + 1, last))
    blank = transformer.blank_routing(cfg, tokens.shape[0])
    return (pages, drawn, at, blank), (drawn, picked, routing)

  carry = pages, tokens, positions, routing
  carry, out = lax.scan(body, carry, length=steps)
  return carry[0], out


@functools.partial(
    jax.jit, static_argnames=('cfg', 'steps'), donate_argnames='pages'
)
def _decode_shaped(
    params,
    pages,
    table,
    tokens,
    positions,
    routing,
    seeds,
    heat,
    windows,
    begin,
    shaping,
    allowed=None,
    *,
    cfg,
    steps,
):
  """`_decode` with `sampling.shape`; the other program stays as it is.

  With `allowed` it has one step: what may come next depends on what was drawn.
  """
  last = table.shape[1] * contract.KEY_BLOCK - 1
  n = len(tokens)
  column = jnp.arange(windows.shape[1], dtype=jnp.int32)[None, :]
  known = column <= positions[:, None]
  ours = column >= begin[:, None]
  rows = jnp.arange(n, dtype=jnp.int32)
  zeros = jnp.zeros((n, cfg.vocab), jnp.int32)
  count = lambda mask: zeros.at[rows[:, None], windows].add(
      mask.astype(jnp.int32)
  )
  prompted = count(known & ~ours) > 0

  def body(carry, _):
    pages, tokens, at, recorded, counts = carry
    logps, pages, routing = decode.step(
        params, pages, tokens, at, table, cfg=cfg, routing=recorded
    )
    shaped = logps if allowed is None else sampling.mask(logps, allowed)
    shaped = sampling.shape(shaped, counts, prompted, heat, shaping)
    drawn, _ = sampling.sample(
        shaped, seeds, at + 1, heat, implementation=cfg.kernels
    )
    picked = jnp.take_along_axis(logps, drawn[:, None], axis=1)[:, 0]
    at = jnp.where(at < 0, at, jnp.minimum(at + 1, last))
    blank = transformer.blank_routing(cfg, n)
    counts = counts.at[rows, drawn].add(1)
    return (pages, drawn, at, blank, counts), (drawn, picked, routing)

  carry = pages, tokens, positions, routing, count(known & ours)
  carry, out = lax.scan(body, carry, length=steps)
  return carry[0], out


@jax.jit
def _read(pages, ids):
  return jax.tree.map(lambda p: p.at[ids].get(mode='clip'), pages)


@functools.partial(jax.jit, donate_argnames='pages')
def _write(pages, ids, content):
  put = lambda old, new: old.at[ids].set(new, mode='drop')
  return jax.tree.map(put, pages, content)


def compilations() -> int:
  """Programs compiled so far by all runners of this process."""
  return sum(
      f._cache_size()
      for f in (_prefill, _decode, _decode_shaped, _read, _write)
  )


def _geometric(first: int, last: int, factor: int) -> list[int]:
  """first, first * factor, ... while below last, then last."""
  sizes = []
  while first < last:
    sizes.append(first)
    first *= factor
  return [*sizes, last]


def _bucket(sizes: Sequence[int], n: int) -> int:
  return next(s for s in sizes if s >= n)


def table_width(rollout: config.RolloutConfig) -> int:
  """Pages of the longest sequence."""
  return -(-rollout.context_tokens // contract.KEY_BLOCK)


def page_count(rollout: config.RolloutConfig) -> int:
  """Pages of a device."""
  width = table_width(rollout)
  if rollout.cache_tokens is None:
    return rollout.slots * width
  return max(rollout.cache_tokens // contract.KEY_BLOCK, width)


class Runner:
  """Owns the params and the pages on one device.

  Attributes:
    pages: number of pages; as an id it means no page.
    width: pages of the longest sequence.
    tiles: most query tiles of a prefill.
  """

  def __init__(
      self,
      cfg: config.ModelConfig,
      rollout: config.RolloutConfig,
      params: params_lib.Params,
      device: jax.Device,
  ) -> None:
    self._cfg, self._rollout, self._device = cfg, rollout, device
    self.width = table_width(rollout)
    self.pages = page_count(rollout)
    self.tiles = rollout.prefill_tokens // contract.QUERY_ROWS
    self._tile_counts = _geometric(min(16, self.tiles), self.tiles, 4)
    self._slot_counts = _geometric(16, rollout.slots, 4)
    self._params = self._copy(params)
    self._pages = self._new_pages()

  def _copy(self, params):
    # Never an alias: the caller may change or donate its arrays in place, and
    # device_put shares host memory with numpy whatever `may_alias` says.
    params = jax.tree.map(lambda x: x.copy(), params)
    return jax.block_until_ready(jax.device_put(params, self._device))

  def _new_pages(self):
    pages = decode.init_pages(self._cfg, self.pages)
    return jax.device_put(pages, self._device)

  def swap(self, params: params_lib.Params) -> None:
    """Replaces the weights; the pages stay.

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

  def prefill(
      self,
      tokens: np.ndarray,
      positions: np.ndarray,
      table: np.ndarray,
      routing: np.ndarray,
  ) -> Any:
    """Feeds at most `tiles` query tiles, obeying recorded routes.

    So keys and values fit the routes that the trainer will replay, whichever
    weights recorded them.

    Args:
      tokens: i32 [B Q].
      positions: i32 [B Q], below 0 for padding.
      table: i32 [B width].
      routing: [B Q L K], blank where unknown.

    Returns:
      Routing of all tokens on the device, [>= B Q L K].
    """
    tail = _bucket(self._tile_counts, len(tokens)) - len(tokens)

    def pad(x, value):
      fill = np.full((tail, *x.shape[1:]), value, x.dtype)
      return np.concatenate([x, fill])

    self._pages, used = _prefill(
        self._params,
        self._pages,
        pad(tokens, 0),
        pad(positions, -1),
        pad(table, 0),
        cfg=self._cfg,
        routing=pad(routing, trace.blank_route(routing.dtype)),
    )
    return used

  def decode(self, n: int, *inputs: np.ndarray) -> Any:
    """Runs k = `steps_per_sync` steps of at least the first n slots.

    A window that ends inside the block runs on to the block's end: its pages
    are its own, and the host keeps nothing of the excess.

    Args:
      n: slots that matter.
      *inputs: arrays of all slots: page table [N width], tokens, positions
        (below 0 where nothing runs), recorded routing of these tokens [N L K],
        seeds, temperatures; for a shaped sample also windows [N S], tokens of
        their contexts and `slots.SlotTable.shaping`; and then, for one step
        only, `slots.SlotTable.allowed`. These two programs compile when they
        are first asked for.

    Returns:
      (tokens, log-probs [k n'], routing of the inputs [k n' L K]) on the
      device, which may read the inputs in place until it is done.
    """
    n = _bucket(self._slot_counts, n)
    self._pages, out = self._decode(self._pages, [x[:n] for x in inputs])
    return out

  def _decode(self, pages, inputs):
    steps = 1 if len(inputs) == _MOST_INPUTS else self._rollout.steps_per_sync
    program = _decode if len(inputs) == _PLAIN_INPUTS else _decode_shaped
    return program(self._params, pages, *inputs, cfg=self._cfg, steps=steps)

  def _ids(self, ids: Sequence[int]) -> list[np.ndarray]:
    padded = np.full(-(-len(ids) // _MOVED) * _MOVED, self.pages, np.int32)
    padded[: len(ids)] = ids
    return list(padded.reshape(-1, _MOVED))

  def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copies pages on the device."""
    pairs = zip(self._ids(sources), self._ids(targets), strict=True)
    for source, target in pairs:
      content = _read(self._pages, source)
      self._pages = _write(self._pages, target, content)

  def save(self, ids: Sequence[int]) -> list[decode.Pages]:
    """Content of pages, on the host; waits for what runs."""
    return [jax.device_get(_read(self._pages, x)) for x in self._ids(ids)]

  def load(self, ids: Sequence[int], content: Sequence[decode.Pages]) -> None:
    """Writes what `save` returned to as many pages."""
    for x, part in zip(self._ids(ids), content, strict=True):
      self._pages = _write(self._pages, x, part)

  def warmup(self) -> None:
    """Compiles every shape on pages of its own; may run beside requests."""
    cfg, pages = self._cfg, self._new_pages()
    dtype = trace.route_dtype(cfg.experts)
    routes = cfg.moe_layers, cfg.top_k
    for b in self._tile_counts:
      shape = b, contract.QUERY_ROWS
      pages, _ = _prefill(
          self._params,
          pages,
          np.zeros(shape, np.int32),
          np.full(shape, -1, np.int32),
          np.zeros((b, self.width), np.int32),
          cfg=cfg,
          routing=np.zeros((*shape, *routes), dtype),
      )
    for n in self._slot_counts:
      inputs = (
          np.zeros((n, self.width), np.int32),
          np.zeros(n, np.int32),
          np.full(n, -1, np.int32),
          np.zeros((n, *routes), dtype),
          np.zeros(n, np.uint32),
          np.zeros(n, np.float32),
      )
      pages, _ = self._decode(pages, inputs)
    (nothing,) = self._ids([self.pages])
    content = _read(pages, nothing)
    pages = _write(pages, nothing, content)
    pages = _write(pages, nothing, jax.device_get(content))
    jax.block_until_ready(pages)
