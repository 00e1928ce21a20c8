"""A rollout host around a store: weights in, an HTTP endpoint out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import pathlib
from typing import Self

import jax

from composer_jax import config
from composer_jax.rollout import engine as engine_lib
from composer_jax.runs import feed as feed_lib
from composer_jax.runs import stored_model
from composer_jax.serving import capture as capture_lib
from composer_jax.serving import endpoint
from composer_jax.serving import server as server_lib
from composer_jax.serving import service as service_lib


@dataclasses.dataclass(frozen=True)
class Settings:
  """How a host serves.

  Attributes:
    url: URL of the weight store.
    capture: directory of the record of all calls.
    clock: seconds since 1970, for clients.
    host: address to listen on.
    port: 0 for any that is free.
    slots: calls that are sampled together.
    max_waiting: calls that may wait for a slot; more are told to come again.
    context_tokens: longest window; None for what the model was made for.
    swap: what new weights do to a running turn (`RolloutConfig`).
    name: name of the model, for clients; None for its own.
    admin_key: opens rollouts over HTTP; None: nobody can.
    modes: modes of rollouts that may be opened over HTTP.
    drain_seconds: time that running calls have, once the host is to stop.
  """

  url: str
  capture: pathlib.Path
  clock: Callable[[], float]
  host: str = '127.0.0.1'
  port: int = 8000
  slots: int = 64
  max_waiting: int = 256
  context_tokens: int | None = None
  swap: str = 'async'
  name: str | None = None
  admin_key: str | None = None
  modes: tuple[str, ...] = service_lib.MODES
  drain_seconds: float = 30.0


class Host:
  """Serves while its context is entered.

  Attributes:
    engine: samples.
    service: answers calls.
    server: listens.
  """

  def __init__(
      self,
      settings: Settings,
      *,
      devices: Sequence[jax.Device],
      feed: Callable[[str], feed_lib.WeightFeed | feed_lib.FixedFeed] = (
          feed_lib.WeightFeed
      ),
  ):
    """Describes the host.

    Args:
      settings: what to serve, and where.
      devices: devices of the engine.
      feed: makes the source of weights from the store's URL.
    """
    self._settings = settings
    self._devices = devices
    self._make_feed = feed
    self._swaps = 0

  def __enter__(self) -> Self:
    """Listens once weights are verified, is ready once programs are compiled.

    Raises:
      ValueError: the port is taken, the store incomplete, the record in use.
    """
    asked = self._settings
    with contextlib.ExitStack() as stack:
      # First: a port that is taken should not cost a download.
      taken = server_lib.bind(asked.host, asked.port)
      self.server = stack.enter_context(server_lib.Server(taken))
      stored = stored_model.read(asked.url)
      capture = capture_lib.Capture(asked.capture)
      stack.callback(capture.close)
      feed = self._make_feed(asked.url)
      stack.callback(feed.close)
      version, params = feed.first
      rollout = config.RolloutConfig(
          slots=asked.slots,
          context_tokens=asked.context_tokens or stored.context_tokens,
          swap=asked.swap,
      )
      self.engine = engine_lib.Engine(
          stored.model,
          rollout,
          version,
          params,
          devices=self._devices,
          refresh=feed.refresh,
      )
      stack.callback(self.engine.close)
      self.server.call(self._serve(stored, rollout, capture))
      self.engine.warmup()
      self.service.ready = True
      # Last in, first out: calls drain, then the engine fails what is left.
      stack.callback(self._drain)
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *_) -> None:
    self._stack.close()

  async def _serve(self, stored, rollout, capture) -> None:
    asked = self._settings
    self.service = service_lib.Service(
        self.engine,
        stored.chat_format(),
        capture,
        model=asked.name or stored.name,
        max_model_len=rollout.context_tokens,
        max_calls=asked.slots + asked.max_waiting,
        clock=asked.clock,
    )
    self.service.ready = False
    app = endpoint.app(self.service, asked.admin_key, asked.modes)
    await self.server.start(app)

  def _drain(self) -> None:
    self.server.call(self.service.drain(self._settings.drain_seconds))

  def open(self, rollout: str, mode: str, key: str | None) -> str:
    """Opens a rollout, or finds the one of this key; returns the key."""

    async def find() -> str:
      if key is not None and await self.service.session(secret=key):
        return key
      return await self.service.open(rollout, 0, mode, key)

    return self.server.call(find())

  def describe(self) -> str:
    """What is served, in one line."""
    step, digest = max(dict(self.engine.digests).items())
    return (
        f'{self.service.model}, weights version {step} ({digest[:12]}), windows'
        f' of {self.service.max_model_len} tokens, at {self.server.url}/v1'
    )

  def news(self) -> Iterator[str]:
    """A line for every swap of weights since the last time.

    Raises:
      RuntimeError: the engine has ended.
    """
    if not self.engine.alive:
      raise RuntimeError('the engine has ended; its error is in every answer')
    stats = self.engine.stats()
    if stats.swaps > self._swaps:
      step, digest = max(dict(self.engine.digests).items())
      count, self._swaps = stats.swaps - self._swaps, stats.swaps
      more = f' ({count} swaps)' if count > 1 else ''
      yield (
          f'weights version {step} ({digest[:12]}) in use{more}; longest pause'
          f' so far {1e3 * stats.longest_swap_seconds:.1f} ms'
      )
