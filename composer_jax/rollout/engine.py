"""Continuous-batching decode engine: one thread, fixed slots, fixed shapes.

The slots are shared out among lanes, one per device, which run at the same
time. Between two blocks of decode steps the thread takes new weights if there
are any, prefills what waits, and answers what has ended. Weights are swapped
under running requests, on all lanes at once: their keys and values stay, every
later token carries the new version, nothing is aborted. There is no cache
between requests, so no prefill can outlive its weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import threading
import time

import jax

from composer_jax import config
from composer_jax import trace
from composer_jax.model import params as params_lib
from composer_jax.rollout import lane as lane_lib
from composer_jax.rollout import runner
from composer_jax.rollout import slots as slots_lib

Request = slots_lib.Request
Refresh = Callable[[], tuple[trace.WeightVersion, params_lib.Params] | None]
compilations = runner.compilations


@dataclasses.dataclass
class Stats:
  """Totals since the engine started."""

  decoded_tokens: int = 0
  prefill_tokens: int = 0  # a shared context counts once per lane
  busy_seconds: float = 0.0  # prefilling or decoding
  swaps: int = 0
  swap_seconds: float = 0.0  # decoding stood still for new weights
  aborted: int = 0  # requests that failed: the engine was closed or broke


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
      version: of `params`.
      params: arrays of numpy or jax; copied to every device.
      devices: of the lanes; at most one per slot is used. A host device is
        worth about one core.
      refresh: called between blocks; returns newer weights, or None.
    """
    self._poll = refresh
    self._version = version
    self.digests: dict[int, str] = {version.step: version.digest}
    self._lanes = []
    for i, device in enumerate(devices[: rollout.slots]):
      slots = len(range(i, rollout.slots, len(devices)))
      share = dataclasses.replace(rollout, slots=slots)
      self._lanes.append(lane_lib.Lane(cfg, share, params, device))
    self._stats = Stats()
    # Contexts in order of arrival, each with all that wait for it.
    self._waiting: dict[bytes, lane_lib.Group] = {}
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
      self._lanes[0].table.check(request)
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
        # Before the refresh: what is submitted once new weights are ready must
        # be served by them, and not by those of a refresh just before.
        batch = self._take()
        self._refresh()
        start = time.perf_counter()
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
          lambda: self._stopped or self._waiting or any(map(_busy, self._lanes))
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
    for lane in self._lanes:
      lane.runner.swap(params)
    self._version = version
    self.digests[version.step] = version.digest
    self._stats.swaps += 1
    self._stats.swap_seconds += time.perf_counter() - start

  def _take(self) -> list[list[lane_lib.Group]]:
    """Takes what fits, oldest first; returns each lane's groups.

    A group goes whole to the lane with the most free slots, where it shares one
    prefill, and is split only if it does not fit there.
    """
    batch = [[] for _ in self._lanes]
    room = [lane.table.free for lane in self._lanes]
    with self._changed:
      for key, group in list(self._waiting.items()):
        while group and any(room):
          most = max(room)
          i = room.index(most)
          taken, group[:] = group[:most], group[most:]
          running = [x for x in taken if x[1].set_running_or_notify_cancel()]
          self._open.difference_update(f for _, f in taken if f.cancelled())
          if running:
            batch[i].append(running)
            room[i] -= len(running)
        if not group:
          del self._waiting[key]
    return batch

  def _admit(self, batch) -> None:
    step, launched = self._version.step, []
    for lane, groups in zip(self._lanes, batch, strict=True):
      launched += lane.admit(groups, step)
      self._stats.prefill_tokens += sum(len(g[0][0].context) for g in groups)
    self._collect(launched)

  def _decode(self) -> None:
    step = self._version.step
    self._collect([lane.decode(step) for lane in self._lanes if _busy(lane)])

  def _collect(self, launched: Sequence[lane_lib.Collect]) -> None:
    """Waits for what all lanes run, and answers the windows it ended."""
    for collect in launched:
      kept, answers = collect()
      self._stats.decoded_tokens += kept
      for future, window in answers:
        self._open.discard(future)
        future.set_result(window)


def _busy(lane: lane_lib.Lane) -> bool:
  return lane.table.live.any()


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
