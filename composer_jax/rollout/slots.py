"""Host side of the decode slots: flat numpy tables, one row per slot.

Everything here is vectorised over slots: what a block of decode steps costs on
the host does not grow with a python loop over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
import dataclasses
import heapq
from typing import NamedTuple, Protocol

import numpy as np

from composer_jax import config
from composer_jax import trace


class Shaping(NamedTuple):
  """What changes the distribution that tokens are drawn from.

  As in other servers: penalties first, then temperature, then the cuts. The
  log-probs of the tokens stay the model's own, so such a sample is no evidence
  of the policy that it seems to come from, and is not trained on.

  Attributes:
    top_p: the likeliest tokens with this mass together.
    top_k: so many of the likeliest tokens; 0 for all.
    min_p: tokens with this share of the likeliest one's probability.
    frequency: taken off for every time a token was sampled for the request.
    presence: taken off once if it was.
    repetition: multiplies the log-prob of a token in the prompt or the sample.
  """

  top_p: float = 1.0
  top_k: int = 0
  min_p: float = 0.0
  frequency: float = 0.0
  presence: float = 0.0
  repetition: float = 1.0


class Constraint(Protocol):
  """What a reply must look like; it goes with one request, token by token."""

  def allow(self, bits: np.ndarray) -> None:
    """Sets the bits of the tokens that may come next, at least one.

    Args:
      bits: i32 [V / 32, rounded up], zeros; token i is bit i % 32 of i // 32.
    """
    ...

  def take(self, token: int) -> None:
    """Goes on to behind a token that was drawn."""
    ...


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """A context to continue.

  Attributes:
    context: the window so far; blank routing rows and versions below 0 are
      unknown and get filled, everything recorded stays as it is.
    max_tokens: most tokens to sample, at least 1.
    stop: ids that end the sample (and belong to it).
    seed: u32; with a token's position it fixes the token's noise.
    temperature: 0 is greedy. Log-probs are always those at temperature 1.
    stop_sequences: runs of sampled ids that end the sample like `stop`.
    on_tokens: called with the ids of every block, i32 [n], on the engine's
      thread: it must be quick and may not raise.
    shaping: None draws from the model's own distribution.
    constraint: None allows every token; one request's own otherwise, asked and
      told on the engine's thread.
  """

  context: trace.TokenTrace
  max_tokens: int
  stop: frozenset[int]
  seed: int
  temperature: float = 1.0
  stop_sequences: tuple[tuple[int, ...], ...] = ()
  on_tokens: Callable[[np.ndarray], None] | None = None
  shaping: Shaping | None = None
  constraint: Constraint | None = None


class SlotTable:
  """Windows that are being answered.

  Attributes:
    live: bool [N], being decoded; an admitted window is not while its context
      is prefilled, or while it has no pages.
    length: i32 [N], known tokens of the window; the last one is the next
      input.
    limit: i32 [N], most tokens of the window.
    order: i64 [N], rank by time of admission.
    tokens: i32 [N S+k]; a block may run k-1 tokens past a window's end.
    routing: [N S+k L K], blank where nothing is known yet.
    blank: id that marks an unknown route.
    seeds: u32 [N].
    temperatures: f32 [N].
    begin: i32 [N], tokens of the context.
    shaped: bool [N], whether `shaping` holds.
    shaping: f32 [N 6], fields of `Shaping`.
    constrained: bool [N], whether only some tokens may come next.
  """

  def __init__(
      self, cfg: config.ModelConfig, rollout: config.RolloutConfig
  ) -> None:
    n, room = rollout.slots, rollout.context_tokens + rollout.steps_per_sync
    self._context_tokens = rollout.context_tokens
    self._route_dtype = trace.route_dtype(cfg.experts)
    self.blank = trace.blank_route(self._route_dtype)
    self._route_shape = (cfg.moe_layers, cfg.top_k)
    self._vocab = cfg.vocab
    self.live = np.zeros(n, bool)
    self.length = np.ones(n, np.int32)
    self.tokens = np.zeros((n, room), np.int32)
    self.seeds = np.zeros(n, np.uint32)
    self.temperatures = np.zeros(n, np.float32)
    self.limit = np.ones(n, np.int32)
    self.begin = np.ones(n, np.int32)
    self.shaped = np.zeros(n, bool)
    self.shaping = np.tile(np.array(Shaping(), np.float32), (n, 1))
    self.constrained = np.zeros(n, bool)
    self.order = np.zeros(n, np.int64)
    self._admitted = 0
    self._stop = np.zeros((n, cfg.vocab), bool)
    self._sampled = np.zeros((n, room), bool)
    self._logps = np.zeros((n, room), np.float32)
    self._versions = np.zeros((n, room), np.int32)
    shape = n, room, *self._route_shape
    self.routing = np.full(shape, self.blank, self._route_dtype)
    self._requests: list[Request | None] = [None] * n
    self._futures: list[futures.Future | None] = [None] * n
    self._free = list(range(n))  # a heap: low slots first keep blocks small

  @property
  def free(self) -> int:
    """Number of free slots."""
    return len(self._free)

  def check(self, request: Request) -> None:
    """Refuses a request that could not be answered.

    Raises:
      ValueError: naming the field, its value and the cure.
    """
    context = request.context
    if not 1 <= len(context) < self._context_tokens:
      raise ValueError(
          f'Request.context: {len(context)} tokens; must be in [1,'
          f' {self._context_tokens - 1}] (RolloutConfig.context_tokens - 1)'
      )
    low, high = context.tokens.min(), context.tokens.max()
    if low < 0 or high >= self._vocab:
      raise ValueError(
          f'Request.context: token ids in [{low}, {high}]; must be in [0,'
          f' {self._vocab - 1}]'
      )
    if context.routing is not None:
      experts = context.routing.experts
      if experts.dtype != self._route_dtype or (
          experts.shape[1:] != self._route_shape
      ):
        raise ValueError(
            f'Request.context.routing: {experts.dtype} rows'
            f' {experts.shape[1:]}; the model wants {self._route_dtype} rows'
            f' {self._route_shape}'
        )
    if request.max_tokens < 1:
      raise ValueError(
          f'Request.max_tokens={request.max_tokens}: must be at least 1'
      )
    if not 0 <= request.seed < 2**32:
      raise ValueError(f'Request.seed={request.seed}: must be in [0, 2**32)')
    if not 0 <= request.temperature < np.inf:
      raise ValueError(
          f'Request.temperature={request.temperature}: must be finite and >= 0'
      )
    if (
        request.stop
        and not 0 <= min(request.stop) <= max(request.stop) < self._vocab
    ):
      raise ValueError(
          f'Request.stop={sorted(request.stop)}: must be in [0,'
          f' {self._vocab - 1}]'
      )
    if not all(request.stop_sequences):
      raise ValueError('Request.stop_sequences: holds an empty one; drop it')

  def limit_of(self, request: Request) -> int:
    """Most tokens of the request's window."""
    return min(len(request.context) + request.max_tokens, self._context_tokens)

  def admit(
      self, request: Request, future: futures.Future, version: int
  ) -> int:
    """Gives the request the lowest free slot; returns it."""
    slot = heapq.heappop(self._free)
    context, n = request.context, len(request.context)
    self._admitted += 1
    self.order[slot] = self._admitted
    self.length[slot] = n
    self.tokens[slot, :n] = context.tokens
    self.seeds[slot] = request.seed
    self.temperatures[slot] = request.temperature
    self.limit[slot] = self.limit_of(request)
    self.begin[slot] = n
    self.shaped[slot] = request.shaping is not None
    self.constrained[slot] = request.constraint is not None
    self.shaping[slot] = request.shaping or Shaping()
    self._stop[slot] = False
    self._stop[slot, list(request.stop)] = True
    self._sampled[slot, :n] = context.sampled
    self._logps[slot, :n] = context.logps
    self._versions[slot, :n] = np.where(
        context.versions < 0, version, context.versions
    )
    self.routing[slot] = self.blank
    if context.routing is not None:
      self.routing[slot, :n] = context.routing.experts
    self._requests[slot], self._futures[slot] = request, future
    return slot

  def asked_routing(self, slot: int, start: int, stop: int) -> np.ndarray:
    """Routes as the request recorded them, blank where it did not."""
    shape = stop - start, *self._route_shape
    rows = np.full(shape, self.blank, self._route_dtype)
    context = self._requests[slot].context
    if context.routing is not None:
      recorded = context.routing.experts[start:stop]
      rows[: len(recorded)] = recorded
    return rows

  def allowed(self, slots: np.ndarray) -> np.ndarray:
    """Which tokens may come next in these slots, as bits, i32 [N V/32]."""
    bits = np.full((len(self.live), -(-self._vocab // 32)), -1, np.int32)
    bits[slots] = 0
    for slot in slots:
      self._requests[slot].constraint.allow(bits[slot])
    return bits

  def fill_routing(self, slot: int, start: int, used: np.ndarray) -> None:
    """Takes the routing [T L K] from `start` on where none was recorded."""
    recorded = self.routing[slot, start : start + len(used)]
    blank = recorded[..., :1] == self.blank
    recorded[...] = np.where(blank, used, recorded)

  def cancelled(self) -> list[int]:
    """Slots whose caller does not want the answer any more."""
    return [
        slot
        for slot, future in enumerate(self._futures)
        if future is not None and future.cancelled()
    ]

  def append(
      self,
      slots: np.ndarray,
      tokens: np.ndarray,
      logps: np.ndarray,
      version: int,
      routing: np.ndarray,
  ) -> tuple[int, np.ndarray]:
    """Appends k sampled tokens to each slot, up to the window's end.

    Args:
      slots: int [n].
      tokens: i32 [n k].
      logps: f32 [n k].
      version: weight step that computed them.
      routing: [n k L K], the routing of each token's INPUT.

    Returns:
      (number of tokens kept, slots whose window has ended).
    """
    row, k = slots[:, None], tokens.shape[1]
    at = self.length[row] + np.arange(k)
    self.tokens[row, at] = tokens
    self._sampled[row, at] = True
    self._logps[row, at] = logps
    self._versions[row, at] = version
    self.routing[row, at - 1] = routing
    last = self._stop[row, tokens] | (at + 1 >= self.limit[row])
    for i, slot in enumerate(slots):
      for sequence in self._requests[slot].stop_sequences:
        last[i] |= self._sequence_ends(slot, at[i], sequence)
    ended = last.any(axis=1)
    kept = np.where(ended, last.argmax(axis=1) + 1, k)
    for i, slot in enumerate(slots):
      request = self._requests[slot]
      for token in tokens[i, : kept[i]] if request.constraint else ():
        request.constraint.take(int(token))
      if request.on_tokens:
        request.on_tokens(tokens[i, : kept[i]])
    self.length[slots] += kept.astype(np.int32)
    return int(kept.sum()), slots[ended]

  def _sequence_ends(self, slot, at, sequence) -> np.ndarray:
    """bool [k], whether a sampled `sequence` ends at these indices."""
    first = at[:, None] - np.arange(len(sequence))[::-1]
    begin = len(self._requests[slot].context)
    same = self.tokens[slot][np.maximum(first, 0)] == np.array(sequence)
    return (same & (first >= begin)).all(axis=1)

  def release(self, slot: int) -> tuple[futures.Future, trace.TokenTrace]:
    """Frees the slot; returns its future and the finished window."""
    n = self.length[slot]
    routing = self.routing[slot, :n].copy()
    # A block may have run on past the end, another may not: always blank.
    routing[-1] = self.blank
    window = trace.TokenTrace(
        tokens=self.tokens[slot, :n].copy(),
        sampled=self._sampled[slot, :n].copy(),
        logps=self._logps[slot, :n].copy(),
        versions=self._versions[slot, :n].copy(),
        routing=trace.RoutingTrace(routing),
    )
    return self.revoke(slot)[1], window

  def revoke(self, slot: int) -> tuple[Request, futures.Future]:
    """Frees the slot as if its request had never been admitted."""
    request, self._requests[slot] = self._requests[slot], None
    future, self._futures[slot] = self._futures[slot], None
    self.live[slot] = False
    self.length[slot] = 1
    heapq.heappush(self._free, slot)
    return request, future
