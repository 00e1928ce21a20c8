"""Continuous-batching decode engine: one thread, fixed slots, fixed shapes.

Between two blocks of decode steps the thread takes new weights if there are
any, prefills what waits, and answers what has ended. Weights are swapped under
running requests: their keys and values stay, every later token carries the new
version, nothing is aborted. There is no cache between requests, so no prefill
can outlive its weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import threading
import time

import jax
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.model import params as params_lib
from composer_jax.rollout import runner
from composer_jax.rollout import slots as slots_lib

Request = slots_lib.Request
Refresh = Callable[[], tuple[trace.WeightVersion, params_lib.Params] | None]
compilations = runner.compilations


@dataclasses.dataclass
class Stats:
  """Totals since the engine started."""

  decoded_tokens: int = 0
  prefill_tokens: int = 0  # a shared context counts once
  busy_seconds: float = 0.0  # prefilling or decoding
  swaps: int = 0
  swap_seconds: float = 0.0  # decoding stood still for new weights
  aborted: int = 0  # requests that failed: the engine was closed or broke


class Engine:
  """Answers requests with whole windows; see the module's docstring.

  Same weights, context, seed and temperature give the same tokens, log-probs
  and routing, whatever else runs and in whatever order it came.

  Attributes:
    digests: digest of every weight step used so far.
  """

  def __init__(
      self,
      cfg: config.ModelConfig,
      rollout: config.RolloutConfig,
      version: trace.WeightVersion,
      params: params_lib.Params,
      *,
      refresh: Refresh | None = None,
      device: jax.Device | None = None,
  ) -> None:
    """Starts the engine's thread.

    Args:
      cfg: the model.
      rollout: sizes.
      version: of `params`.
      params: arrays of numpy or jax; copied to the device.
      refresh: called between blocks; returns newer weights, or None.
      device: where params and cache live; None takes the first one.
    """
    self._rollout = rollout
    self._poll = refresh
    self._version = version
    self.digests: dict[int, str] = {version.step: version.digest}
    self._runner = runner.Runner(cfg, rollout, params, device)
    self._table = slots_lib.SlotTable(cfg, rollout)
    self._stats = Stats()
    # Contexts in order of arrival, each with all that wait for it.
    self._waiting: dict[bytes, list[tuple[Request, futures.Future]]] = {}
    self._open: set[futures.Future] = set()
    self._stopped: Exception | None = None
    self._changed = threading.Condition()
    self._thread = threading.Thread(
        target=self._run, name='decode-engine', daemon=True
    )
    self._thread.start()

  def __enter__(self) -> Engine:
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def close(self) -> None:
    """Ends the thread; requests that are not answered yet fail."""
    with self._changed:
      self._stopped = self._stopped or RuntimeError('closed')
      self._changed.notify()
    self._thread.join()

  def warmup(self) -> None:
    """Compiles every shape; `compilations` does not change afterwards."""
    self._runner.warmup()

  def stats(self) -> Stats:
    """A copy of the totals."""
    return dataclasses.replace(self._stats)

  def submit(self, request: Request) -> futures.Future[trace.TokenTrace]:
    """Queues one request; the result is the whole window.

    Raises:
      ValueError: the request could not be answered (`SlotTable.check`).
      RuntimeError: the engine has ended.
    """
    return self.submit_group([request])[0]

  def submit_group(
      self, requests: Sequence[Request]
  ) -> list[futures.Future[trace.TokenTrace]]:
    """Queues requests at once, so that equal contexts share one prefill.

    Equal contexts also share it when they come one by one and wait together.
    """
    for request in requests:
      self._table.check(request)
    waiting = [(r, futures.Future()) for r in requests]
    with self._changed:
      if self._stopped is not None:
        raise RuntimeError('decode engine has ended') from self._stopped
      for request, future in waiting:
        key = _context_key(request.context)
        self._waiting.setdefault(key, []).append((request, future))
        self._open.add(future)
      self._changed.notify()
    return [future for _, future in waiting]

  def _run(self) -> None:
    try:
      while self._wait():
        self._refresh()
        start = time.perf_counter()
        while batch := self._next_batch():
          self._admit(batch)
        self._decode()
        self._stats.busy_seconds += time.perf_counter() - start
    except Exception as error:  # handed to every caller below
      with self._changed:
        self._stopped = error
    self._fail_open()

  def _wait(self) -> bool:
    """Blocks until there is work; False once the engine is closed."""
    with self._changed:
      self._changed.wait_for(
          lambda: self._stopped or self._waiting or self._table.live.any()
      )
      return self._stopped is None

  def _fail_open(self) -> None:
    for future in list(self._open):
      if future.running() or future.set_running_or_notify_cancel():
        error = RuntimeError(f'decode engine has ended: {self._stopped!r}')
        error.__cause__ = self._stopped
        future.set_exception(error)
        self._stats.aborted += 1

  def _refresh(self) -> None:
    start = time.perf_counter()
    fresh = None if self._poll is None else self._poll()
    if fresh is None:
      return
    version, params = fresh
    if version.step <= self._version.step:
      raise ValueError(
          f'weights step {version.step}: must be above the current'
          f' {self._version.step}; versions only go forward'
      )
    self._runner.swap(params)
    self._version = version
    self.digests[version.step] = version.digest
    self._stats.swaps += 1
    self._stats.swap_seconds += time.perf_counter() - start

  def _next_batch(self) -> list[list[tuple[Request, futures.Future]]]:
    """Takes groups of equal context to prefill together, oldest first.

    All fit the same padded length as the oldest. A group larger than the free
    slots is split.
    """
    batch, room, length = [], self._table.free, None
    with self._changed:
      for key, group in list(self._waiting.items()):
        if not room or len(batch) == self._rollout.prefill_rows:
          break
        padded = self._runner.padded_length(len(group[0][0].context))
        length = length or padded
        if padded != length:
          continue
        taken, group[:] = group[:room], group[room:]
        if not group:
          del self._waiting[key]
        running = [x for x in taken if x[1].set_running_or_notify_cancel()]
        self._open.difference_update(f for _, f in taken if f.cancelled())
        if running:
          batch.append(running)
          room -= len(running)
    return batch

  def _admit(self, batch) -> None:
    """Prefills one row per group and starts every member in its own slot."""
    table = self._table
    contexts = [group[0][0].context for group in batch]
    prefilled = self._runner.prefill(contexts)
    rows, slots = np.array(
        [
            (row, table.admit(request, future, self._version.step))
            for row, group in enumerate(batch)
            for request, future in group
        ],
        np.int32,
    ).T
    chunks = self._runner.start(
        prefilled,
        rows,
        slots,
        table.seeds[slots],
        table.length[slots],
        table.temperatures[slots],
    )
    routing, chunks = jax.device_get((prefilled.routing, chunks))
    for row, slot in zip(rows, slots, strict=True):
      table.fill_routing(slot, routing[row])
    self._stats.prefill_tokens += sum(len(c) for c in contexts)
    tokens, logps = (
        np.concatenate(x)[: len(slots), None] for x in zip(*chunks, strict=True)
    )
    self._append(slots, tokens, logps)

  def _decode(self) -> None:
    table = self._table
    live = np.flatnonzero(table.live)
    if not live.size:
      return
    at = table.length - 1
    tokens = table.tokens[np.arange(at.size), at]
    out = self._runner.decode(
        live[-1] + 1, tokens, at, table.seeds, table.temperatures
    )
    self._append(live, *(np.moveaxis(x, 0, 1)[live] for x in out))

  def _append(self, slots, tokens, logps, routing=None) -> None:
    """Stores sampled tokens and answers the windows that they end."""
    kept, ended = self._table.append(
        slots, tokens, logps, self._version.step, routing
    )
    self._stats.decoded_tokens += kept
    for slot in ended:
      future, window = self._table.release(int(slot))
      self._open.discard(future)
      future.set_result(window)


def _context_key(context: trace.TokenTrace) -> bytes:
  """Equal for contexts that prefill to the same bits."""
  routing = context.routing
  recorded = b'' if routing is None else routing.experts.tobytes()
  size = len(context).to_bytes(8)
  return b''.join((size, context.tokens.tobytes(), recorded))


@dataclasses.dataclass(frozen=True)
class EnginePolicy:
  """The engine as a policy that a harness can await."""

  engine: Engine

  @property
  def digests(self) -> dict[int, str]:
    """Digest of every weight step the engine has used."""
    return dict(self.engine.digests)

  async def complete(
      self,
      context: trace.TokenTrace,
      *,
      max_tokens: int,
      stop: frozenset[int],
      seed: int,
      temperature: float,
  ) -> trace.TokenTrace:
    """Continues the context; returns the whole window."""
    request = Request(context, max_tokens, stop, seed, temperature)
    return await asyncio.wrap_future(self.engine.submit(request))
