"""Host side of the decode slots: flat numpy tables, one row per slot.

Everything here is vectorised over slots: what a block of decode steps costs on
the host does not grow with a python loop over tokens.
"""

from __future__ import annotations

from concurrent import futures
import dataclasses
import heapq

import numpy as np

from composer_jax import config
from composer_jax import trace


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
  """

  context: trace.TokenTrace
  max_tokens: int
  stop: frozenset[int]
  seed: int
  temperature: float = 1.0


class SlotTable:
  """Windows that are being decoded.

  Attributes:
    live: bool [N].
    length: i32 [N], known tokens of the window; the last one is the next
      input. 1 for a free slot, which decodes garbage nobody reads.
    tokens: i32 [N S+k]; a block may run k-1 tokens past a window's end.
    seeds: u32 [N].
    temperatures: f32 [N].
  """

  def __init__(
      self, cfg: config.ModelConfig, rollout: config.RolloutConfig
  ) -> None:
    n, room = rollout.slots, rollout.context_tokens + rollout.steps_per_sync
    self._context_tokens = rollout.context_tokens
    self._route_dtype = trace.route_dtype(cfg.experts)
    self._blank = trace.blank_route(self._route_dtype)
    self._route_shape = (cfg.layers, cfg.top_k)
    self._vocab = cfg.vocab
    self.live = np.zeros(n, bool)
    self.length = np.ones(n, np.int32)
    self.tokens = np.zeros((n, room), np.int32)
    self.seeds = np.zeros(n, np.uint32)
    self.temperatures = np.zeros(n, np.float32)
    self._limit = np.ones(n, np.int32)
    self._stop = np.zeros((n, cfg.vocab), bool)
    self._sampled = np.zeros((n, room), bool)
    self._logps = np.zeros((n, room), np.float32)
    self._versions = np.zeros((n, room), np.int32)
    self._routing = np.zeros((n, room, *self._route_shape), self._route_dtype)
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

  def admit(
      self, request: Request, future: futures.Future, version: int
  ) -> int:
    """Gives the request the lowest free slot; returns it."""
    slot = heapq.heappop(self._free)
    context, n = request.context, len(request.context)
    self.live[slot] = True
    self.length[slot] = n
    self.tokens[slot, :n] = context.tokens
    self.seeds[slot] = request.seed
    self.temperatures[slot] = request.temperature
    self._limit[slot] = min(n + request.max_tokens, self._context_tokens)
    self._stop[slot] = False
    self._stop[slot, list(request.stop)] = True
    self._sampled[slot, :n] = context.sampled
    self._logps[slot, :n] = context.logps
    self._versions[slot, :n] = np.where(
        context.versions < 0, version, context.versions
    )
    self._routing[slot, :n] = (
        self._blank if context.routing is None else context.routing.experts
    )
    self._futures[slot] = future
    return slot

  def fill_routing(self, slot: int, routing: np.ndarray) -> None:
    """Takes the prefill's routing [T L K] where the context had none."""
    n = self.length[slot]
    recorded = self._routing[slot, :n]
    blank = recorded[..., :1] == self._blank
    self._routing[slot, :n] = np.where(blank, routing[:n], recorded)

  def append(
      self,
      slots: np.ndarray,
      tokens: np.ndarray,
      logps: np.ndarray,
      version: int,
      routing: np.ndarray | None = None,
  ) -> tuple[int, np.ndarray]:
    """Appends k sampled tokens to each slot, up to the window's end.

    Args:
      slots: int [n].
      tokens: i32 [n k].
      logps: f32 [n k].
      version: weight step that computed them.
      routing: [n k L K], the routing of each token's INPUT; None if the
        prefill already gave it.

    Returns:
      (number of tokens kept, slots whose window has ended).
    """
    row, k = slots[:, None], tokens.shape[1]
    at = self.length[row] + np.arange(k)
    self.tokens[row, at] = tokens
    self._sampled[row, at] = True
    self._logps[row, at] = logps
    self._versions[row, at] = version
    if routing is not None:
      self._routing[row, at - 1] = routing
    last = self._stop[row, tokens] | (at + 1 >= self._limit[row])
    ended = last.any(axis=1)
    kept = np.where(ended, last.argmax(axis=1) + 1, k)
    self.length[slots] += kept.astype(np.int32)
    return int(kept.sum()), slots[ended]

  def release(self, slot: int) -> tuple[futures.Future, trace.TokenTrace]:
    """Frees the slot; returns its future and the finished window."""
    n = self.length[slot]
    routing = self._routing[slot, :n].copy()
    # A block may have run on past the end, another may not: always blank.
    routing[-1] = self._blank
    window = trace.TokenTrace(
        tokens=self.tokens[slot, :n].copy(),
        sampled=self._sampled[slot, :n].copy(),
        logps=self._logps[slot, :n].copy(),
        versions=self._versions[slot, :n].copy(),
        routing=trace.RoutingTrace(routing),
    )
    future, self._futures[slot] = self._futures[slot], None
    self.live[slot] = False
    self.length[slot] = 1
    heapq.heappush(self._free, slot)
    return future, window
