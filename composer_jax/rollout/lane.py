"""One device's share of the engine: its weights, its pages and its slots.

Everything here launches work and returns what waits for it: jax returns before
the device is done, so the engine can keep every device busy from one thread.

A context is prefilled up to its last token, in chunks; the last one is the
input of the first decode step, so a fresh window, a shared prefix and a resumed
window all go on in the same way. A window that finds no free page gives way to
older ones: its pages move to the host and come back with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.model import params as params_lib
from composer_jax.rollout import cache as cache_lib
from composer_jax.rollout import device as device_lib
from composer_jax.rollout import slots as slots_lib
from kernels_triton import contract

# Requests of one context, which share a prefill.
Group = list[tuple[slots_lib.Request, futures.Future]]
Answer = tuple[futures.Future, trace.TokenTrace]
# Waits for launched work; returns (number of tokens kept, windows it ended).
Collect = Callable[[], tuple[int, list[Answer]]]

_SIZE, _TILE = contract.KEY_BLOCK, contract.QUERY_ROWS


@dataclasses.dataclass
class Stats:
  """Totals since the engine started."""

  decoded_tokens: int = 0
  prefill_tokens: int = 0  # of contexts; a shared one counts once per lane
  cached_tokens: int = 0  # of contexts, found in the cache instead
  preemptions: int = 0
  busy_seconds: float = 0.0  # prefilling or decoding
  swaps: int = 0
  swap_seconds: float = 0.0  # decoding stood still for new weights
  longest_swap_seconds: float = 0.0
  cancelled: int = 0  # requests given up by their callers
  aborted: int = 0  # requests that failed: the engine was closed or broke


@dataclasses.dataclass
class _Prompt:
  """A context on its way into pages, and the slots that wait for it.

  Attributes:
    slots: all share its full pages; the first one's own page gets the rest.
    done: tokens that are stored or launched.
    stop: tokens to store.
  """

  slots: list[int]
  done: int
  stop: int


class Lane:
  """A runner, its slot table and the pages of the slots.

  Collect everything before launching again: the next inputs depend on it, and
  a device may still read the tables in place.

  Attributes:
    runner: the device side.
    table: the host side.
  """

  def __init__(
      self,
      cfg: config.ModelConfig,
      rollout: config.RolloutConfig,
      version: trace.WeightVersion,
      params: params_lib.Params,
      device: jax.Device,
      stats: Stats,
  ) -> None:
    self._steps = rollout.steps_per_sync
    self._stats = stats
    self.runner = device_lib.Runner(cfg, rollout, params, device)
    self.table = slots_lib.SlotTable(cfg, rollout)
    self._cache = cache_lib.SlotCache(
        rollout.slots,
        self.runner.width,
        self.runner.pages,
        version.digest.encode(),
    )
    self._prompts: list[_Prompt] = []
    self._paused: dict[int, tuple[int, Any]] = {}  # slot -> pages, content

  @property
  def busy(self) -> bool:
    """True while any request is in a slot."""
    return bool(self._prompts or self._paused or self.table.live.any())

  @property
  def room(self) -> int:
    """Slots for new requests; none while older ones wait for pages."""
    return 0 if self._paused else self.table.free

  @property
  def free_pages(self) -> int:
    """Pages that nobody holds."""
    return self._cache.pool.available

  def swap(
      self, version: trace.WeightVersion, params: params_lib.Params
  ) -> list[Group]:
    """Takes new weights: what runs keeps its pages, nothing new finds them.

    Returns:
      Requests whose context is not complete. They have to be admitted again:
      one version prefills a context, or nobody could tell which did what.
    """
    begun = [slot for prompt in self._prompts for slot in prompt.slots]
    groups = [
        [self.table.revoke(slot) for slot in prompt.slots]
        for prompt in self._prompts
    ]
    self._prompts.clear()
    for slot in begun:
      self._cache.drop(slot)
    self.runner.swap(params)
    self._cache.forget(version.digest.encode())
    return groups

  def admit(self, group: Group, version: int) -> int:
    """Gives slots and pages to as many of a group as find both.

    Args:
      group: requests of one context.
      version: step of the weights in use.

    Returns:
      How many, counted from the first.
    """
    # The last token is not prefilled: it is the input of the first decode step.
    # The group shares the full pages of the rest; what follows them is each
    # request's own, with room for its first block of decode steps.
    pool, slots = self._cache.pool, []
    context = group[0][0].context
    stop = len(context) - 1
    shared = stop // _SIZE
    prefix = self._find(context, shared)
    # Before anything is taken: `take` gives away pages that nobody holds.
    pool.hold(prefix)
    known, missing = len(prefix), shared - len(prefix)
    for request, future in group[: self.table.free]:
      first = min(stop + self._steps, self.table.limit_of(request) - 1)
      own = cache_lib.count(first) - shared
      if pool.available < missing + own:
        break  # and none behind it goes first
      if slots:  # every slot holds what it reads, once
        pool.hold(prefix)
      else:  # the first also takes the shared pages that were not found
        prefix, missing = prefix + pool.take(missing), 0
      slot = self.table.admit(request, future, version)
      self._cache.start(slot)
      self._cache.give(slot, prefix + pool.take(own))
      slots.append(slot)
    if not slots:
      pool.drop(prefix)
      return 0
    self._stats.prefill_tokens += len(context) - known * _SIZE
    self._stats.cached_tokens += known * _SIZE
    for i, page in enumerate(prefix[:known]):
      self.table.fill_routing(slots[0], i * _SIZE, pool.payload(page))
    self._prompts.append(_Prompt(slots, known * _SIZE, stop))
    return len(slots)

  def cached(self, context: trace.TokenTrace) -> int:
    """Pages of the context that need no prefill."""
    return len(self._find(context, (len(context) - 1) // _SIZE))

  def _find(self, context: trace.TokenTrace, shared: int) -> list[int]:
    n = shared * _SIZE
    if context.routing is None:
      shape = n, *self.table.routing.shape[2:]
      routing = np.full(shape, self.table.blank, self.table.routing.dtype)
    else:
      routing = context.routing.experts
    return self._cache.find(context.tokens[:n], routing[:n])

  def cancel(self) -> None:
    """Frees slots and pages of the requests whose future was cancelled."""
    for slot in self.table.cancelled():
      for prompt in self._prompts:
        if slot == prompt.slots[0] and len(prompt.slots) > 1:
          self._cache.exchange(slot, prompt.slots[1])  # to an heir, as it is
          prompt.slots[:2] = reversed(prompt.slots[:2])
          self._inherit(slot, prompt)
        if slot in prompt.slots:
          prompt.slots.remove(slot)
      self._prompts = [p for p in self._prompts if p.slots]
      self._paused.pop(slot, None)
      self._cache.drop(slot)
      self.table.release(slot)
      self._stats.cancelled += 1

  def _inherit(self, slot, prompt):
    self.table.fill_routing(
        prompt.slots[0], 0, self.table.routing[slot, : prompt.done]
    )

  def launch(self, version: int) -> list[Collect]:
    """Launches a chunk of prefill, then a block of decode steps.

    Args:
      version: step of the weights in use.
    """
    launched = []
    if self._prompts:
      launched.append(self._prefill())
    self._grow()
    self._resume()
    # In programs of their own, so that nobody's bits depend on the others.
    constrained = self.table.constrained
    shaped = self.table.shaped & ~constrained
    for kind in (~(shaped | constrained), shaped, constrained):
      live = self.table.live & kind
      if live.any():
        launched.append(self._decode(version, live))
    return launched

  def _prefill(self) -> Collect:
    """Feeds the oldest contexts; those that are complete start to decode."""
    room, pieces = self.runner.tiles, []
    for prompt in self._prompts:
      size = min(prompt.stop - prompt.done, room * _TILE)
      pieces.append((prompt.slots[0], prompt.done, size))
      prompt.done += size
      room -= -(-size // _TILE)
    ended = [p for p in self._prompts if p.done == p.stop]
    self._prompts = [p for p in self._prompts if p.done < p.stop]
    used = self._feed([p for p in pieces if p[2]])
    pairs = []
    for prompt in ended:
      pages = [self._cache.pages(slot) for slot in prompt.slots]
      if prompt.stop % _SIZE:
        at = prompt.stop // _SIZE
        pairs += [(pages[0][at], other[at]) for other in pages[1:]]
      self.table.live[prompt.slots] = True
    if pairs:
      self.runner.copy(*zip(*pairs, strict=True))
    return functools.partial(self._prefilled, pieces, ended, used)

  def _feed(self, pieces: Sequence[tuple[int, int, int]]) -> Any:
    """Launches a prefill of (slot, first token, number of tokens)."""
    if not pieces:
      return None
    table = self.table
    tiles = [-(-size // _TILE) for _, _, size in pieces]
    n = sum(tiles) * _TILE
    tokens, positions = np.zeros(n, np.int32), np.full(n, -1, np.int32)
    routing = np.full((n, *table.routing.shape[2:]), table.blank)
    routing = routing.astype(table.routing.dtype)
    start = 0
    for (slot, at, size), count in zip(pieces, tiles, strict=True):
      here, there = slice(start, start + size), slice(at, at + size)
      tokens[here] = table.tokens[slot, there]
      positions[here] = np.arange(at, at + size)
      routing[here] = table.routing[slot, there]
      start += count * _TILE
    return self.runner.prefill(
        tokens.reshape(n // _TILE, _TILE),
        positions.reshape(n // _TILE, _TILE),
        np.repeat(self._cache.table[[p[0] for p in pieces]], tiles, axis=0),
        routing.reshape(n // _TILE, _TILE, *routing.shape[1:]),
    )

  def _prefilled(self, pieces, ended, used):
    table, start = self.table, 0
    if used is not None:
      used = np.concatenate(np.asarray(used))  # of tiles
    for slot, at, size in pieces:
      if size:
        table.fill_routing(slot, at, used[start : start + size])
        start += -(-size // _TILE) * _TILE
    for prompt in ended:
      leader, *others = prompt.slots
      self._publish(leader, prompt.stop)
      for slot in others:
        table.fill_routing(slot, 0, table.routing[leader, : prompt.stop])
        self._cache.follow(slot, leader)
    return 0, []

  def _publish(self, slot: int, stored: int) -> None:
    span = slice(self._cache.unpublished(slot), stored)
    self._cache.publish(
        slot,
        self.table.tokens[slot, span],
        self.table.asked_routing(slot, span.start, span.stop),
        self.table.routing[slot, span],
    )

  def _grow(self) -> None:
    """Gives every live slot the pages of the next block, oldest first."""
    need = self._needed()
    slots = np.flatnonzero(self.table.live & (need > self._cache.held))
    for slot in slots[np.argsort(self.table.order[slots])]:
      missing = int(need[slot] - self._cache.held[slot])
      while self.table.live[slot] and self.free_pages < missing:
        live = np.flatnonzero(self.table.live)
        self._pause(int(live[np.argmax(self.table.order[live])]))
      if self.table.live[slot]:
        self._cache.give(slot, self._cache.pool.take(missing))

  def _needed(self) -> np.ndarray:
    """Pages of each slot once a block has run, i32 [N]."""
    last = self.table.length - 1 + self._steps
    return cache_lib.count(np.minimum(last, self.table.limit - 1))

  def _pause(self, slot: int) -> None:
    pages = self._cache.pages(slot)
    self._paused[slot] = len(pages), self.runner.save(pages)
    self._cache.drop(slot)
    self.table.live[slot] = False
    self._stats.preemptions += 1

  def _resume(self) -> None:
    """Brings paused slots back, oldest first, as far as pages go."""
    need = self._needed()
    for slot in sorted(self._paused, key=lambda s: self.table.order[s]):
      count, content = self._paused[slot]
      total = max(count, int(need[slot]))
      if self.free_pages < total:
        break
      del self._paused[slot]
      self._cache.give(slot, self._cache.pool.take(total))
      self.runner.load(self._cache.pages(slot)[:count], content)
      self.table.live[slot] = True

  def _decode(self, version: int, running) -> Collect:
    table = self.table
    live = np.flatnonzero(running)
    at, rows = table.length - 1, np.arange(table.length.size)
    constrained, shaped = table.constrained[live[0]], table.shaped[live[0]]
    plain = not (shaped or constrained)
    out = self.runner.decode(
        live[-1] + 1,
        self._cache.table if plain else self._cache.table.copy(),
        table.tokens[rows, at],
        np.where(running, at, -1),
        table.routing[rows, at],
        table.seeds,
        table.temperatures,
        # Copies: the other program's tokens are collected while this one runs.
        *(() if plain else (table.tokens.copy(), table.begin, table.shaping)),
        *((table.allowed(live),) if constrained else ()),
    )
    return functools.partial(self._decoded, live, out, version)

  def _decoded(self, live, out, version):
    tokens, logps, routing = (
        np.moveaxis(x, 0, 1)[live] for x in jax.device_get(out)
    )
    kept, ended = self.table.append(live, tokens, logps, version, routing)
    stored = self.table.length[live] - 1
    for slot in self._cache.grown(live, stored):
      self._publish(int(slot), int(self.table.length[slot]) - 1)
    for slot in ended:
      self._cache.drop(int(slot))
    return kept, [self.table.release(int(slot)) for slot in ended]
