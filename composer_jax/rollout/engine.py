"""Continuous batching: one thread, pages and slots on every device.

The slots are shared out among lanes, one per device, which run at the same
time. Between two blocks of decode steps the thread takes new weights if there
are any, admits what waits and fits, prefills a chunk of it, and answers what
has ended. Weights are swapped on all lanes at once: running requests keep their
keys and values, every later token carries the new version, nothing is aborted,
and no new request reuses what other weights have computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent import futures
import contextlib
import dataclasses
import threading
import time

import jax

from composer_jax import config
from composer_jax import trace
from composer_jax.model import params as params_lib
from composer_jax.rollout import device as device_lib
from composer_jax.rollout import lane as lane_lib
from composer_jax.rollout import slots as slots_lib

Request = slots_lib.Request
Refresh = Callable[[], tuple[trace.WeightVersion, params_lib.Params] | None]
compilations = device_lib.compilations

Stats = lane_lib.Stats


class Engine:
  """Answers requests with whole windows; see the module's docstring.

  Same weights, context, seed and temperature give the same tokens, log-probs
  and routing, whatever else runs, in whatever order it came, on whichever lane.

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
      devices: Sequence[jax.Device],
      refresh: Refresh | None = None,
  ) -> None:
    """Starts the engine's thread.

    Args:
      cfg: the model.
      rollout: sizes.
      version: version of `params`.
      params: arrays of numpy or jax; copied to every device.
      devices: one per lane, at most one per slot is used. A host device is
        worth about one core.
      refresh: called between blocks; returns newer weights, or None.
    """
    self._poll = refresh
    self._fresh = None  # newer weights that wait for turns to end
    self._sync = rollout.swap == 'sync'
    self._version = version
    self._stats = Stats()
    self.digests: dict[int, str] = {version.step: version.digest}
    self._lanes = []
    devices = devices[: rollout.slots]
    self._slack = rollout.slots // len(devices) // 4
    tokens = rollout.cache_tokens
    for i, device in enumerate(devices):
      share = dataclasses.replace(
          rollout,
          slots=len(range(i, rollout.slots, len(devices))),
          cache_tokens=tokens and tokens // len(devices),
      )
      self._lanes.append(
          lane_lib.Lane(cfg, share, version, params, device, self._stats)
      )
    # Contexts in order of arrival, each with all that wait for it: new ones,
    # and those that the thread has taken but that did not fit yet.
    self._waiting: dict[bytes, lane_lib.Group] = {}
    self._taken: dict[bytes, lane_lib.Group] = {}
    self._cancelled = threading.Event()
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
    for lane in self._lanes:
      lane.runner.warmup()

  @property
  def alive(self) -> bool:
    """False once it was closed or has failed."""
    return self._stopped is None

  def stats(self) -> Stats:
    """A copy of the totals."""
    return dataclasses.replace(self._stats)

  def free(self) -> tuple[int, int]:
    """Pages and slots that no request holds."""
    lanes = self._lanes
    return sum(x.free_pages for x in lanes), sum(x.table.free for x in lanes)

  def submit(self, request: Request) -> futures.Future[trace.TokenTrace]:
    """Queues one request; the result is the whole window.

    Cancelling the future frees the request's pages before the next block.

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
      self._lanes[0].table.check(request)
    waiting = [(r, futures.Future()) for r in requests]
    for _, future in waiting:
      future.add_done_callback(self._note_cancelled)
    with self._changed:
      if self._stopped is not None:
        raise RuntimeError('decode engine has ended') from self._stopped
      for request, future in waiting:
        key = _context_key(request.context)
        self._waiting.setdefault(key, []).append((request, future))
        self._open.add(future)
      self._changed.notify()
    return [future for _, future in waiting]

  def _note_cancelled(self, future: futures.Future) -> None:
    if future.cancelled():
      self._cancelled.set()

  def _run(self) -> None:
    try:
      while self._wait():
        # Before the refresh: what is submitted once new weights are ready must
        # be served by them, and not by those of a refresh just before.
        self._take()
        if self._refresh():
          self._admit()
        start = time.perf_counter()
        self._block()
        self._stats.busy_seconds += time.perf_counter() - start
    except Exception as error:  # handed to every caller below
      with self._changed:
        self._stopped = error
    self._fail_open()

  def _wait(self) -> bool:
    """Blocks until there is work; False once the engine is closed."""
    with self._changed:
      self._changed.wait_for(
          lambda: self._stopped or self._waiting or self._taken or self._busy()
      )
      return self._stopped is None

  def _busy(self) -> bool:
    return any(lane.busy for lane in self._lanes)

  def _fail_open(self) -> None:
    for future in list(self._open):
      error = RuntimeError(f'decode engine has ended: {self._stopped!r}')
      error.__cause__ = self._stopped
      with contextlib.suppress(futures.InvalidStateError):  # cancelled
        future.set_exception(error)
        self._stats.aborted += 1

  def _take(self) -> None:
    """Takes what was submitted, and lets go of what was cancelled."""
    with self._changed:
      waiting, self._waiting = self._waiting, {}
    for group in waiting.values():
      self._queue(group)
    if self._cancelled.is_set():
      self._cancelled.clear()
      for lane in self._lanes:
        lane.cancel()
      with self._changed:  # callers add to it
        gone = {f for f in self._open if f.cancelled()}
        self._open -= gone
      for future in gone:
        future.set_running_or_notify_cancel()  # or `futures.wait` hangs
      for key, group in list(self._taken.items()):
        left = [member for member in group if not member[1].cancelled()]
        self._stats.cancelled += len(group) - len(left)
        if left:
          self._taken[key] = left
        else:
          del self._taken[key]

  def _queue(self, group: lane_lib.Group) -> None:
    key = _context_key(group[0][0].context)
    self._taken.setdefault(key, []).extend(group)

  def _refresh(self) -> bool:
    """Takes newer weights if there are any; False while they wait for turns."""
    start = time.perf_counter()
    self._fresh = (self._poll and self._poll()) or self._fresh
    if self._fresh is None:
      return True
    if self._sync and self._busy():
      return False
    (version, params), self._fresh = self._fresh, None
    if version.step <= self._version.step:
      raise ValueError(
          f'weights step {version.step}: must be above the current'
          f' {self._version.step}; versions only go forward'
      )
    again = [g for lane in self._lanes for g in lane.swap(version, params)]
    waiting, self._taken = self._taken, {}
    for group in again:
      self._queue(group)
    for group in waiting.values():
      self._queue(group)
    self._version = version
    self.digests[version.step] = version.digest
    pause, stats = time.perf_counter() - start, self._stats
    stats.swaps += 1
    stats.swap_seconds += pause
    stats.longest_swap_seconds = max(stats.longest_swap_seconds, pause)
    return True

  def _admit(self) -> None:
    """Hands what fits to the lanes, oldest first.

    A group goes whole to one lane, where it shares one prefill, and is split
    only if it does not fit there.
    """
    for key, group in list(self._taken.items()):
      while group:
        lane = self._lane(group[0][0].context)
        count = lane.admit(group, self._version.step) if lane.room else 0
        if not count:
          return
        del group[:count]
      del self._taken[key]

  def _lane(self, context: trace.TokenTrace) -> lane_lib.Lane:
    """The lane with the most of the context, among those about as free.

    A session comes back to its pages, and a prefix that all requests share does
    not crowd them on one lane.
    """
    most = max(lane.room for lane in self._lanes)
    free = [x for x in self._lanes if x.room and x.room >= most - self._slack]
    if len(free) < 2:
      return max(self._lanes, key=lambda lane: lane.room)
    return max(free, key=lambda lane: (lane.cached(context), lane.room))

  def _block(self) -> None:
    """Runs a block on every lane, and answers the windows it ended."""
    step = self._version.step
    launched = [run for lane in self._lanes for run in lane.launch(step)]
    for collect in launched:
      kept, answers = collect()
      self._stats.decoded_tokens += kept
      for future, window in answers:
        self._open.discard(future)
        with contextlib.suppress(futures.InvalidStateError):  # cancelled
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
