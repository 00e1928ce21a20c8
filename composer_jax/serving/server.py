"""An HTTP server on a thread and an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
import contextlib
import errno
import socket
import threading
from typing import Any, Self, TypeVar

import h11
from starlette import applications
import uvicorn
from uvicorn.protocols.http import h11_impl

_CLOSE_SECONDS = 5  # for what still runs
# Longer than clients keep idle connections, or one that is being used again
# would be closed now and then.
_IDLE_SECONDS = 120
PATIENCE_SECONDS = 300.0
T = TypeVar('T')


def bind(host: str, port: int) -> socket.socket:
  """Takes the port before anything else is done; 0 for any.

  Raises:
    ValueError: it is not free, or not ours to take.
  """
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  taken = socket.socket(family)
  taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    taken.bind((host, port))
  except OSError as e:
    taken.close()
    if e.errno == errno.EADDRINUSE:
      raise ValueError(
          f'port {port}: another process listens there; stop it, or choose'
          ' another --port'
      ) from e
    raise ValueError(f'{host}, port {port}: {e.strerror}') from e
  return taken


class _Protocol(h11_impl.H11Protocol):
  """Ends a connection whose client does not complete a request."""

  patience: float  # seconds; see `Server`
  _timer: asyncio.TimerHandle | None = None

  def connection_made(self, transport) -> None:
    super().connection_made(transport)
    self._watch()

  def handle_events(self) -> None:
    super().handle_events()
    self._watch()

  def on_response_complete(self) -> None:
    super().on_response_complete()
    self._watch()

  def connection_lost(self, exc) -> None:
    super().connection_lost(exc)
    self._stop()

  def _watch(self) -> None:
    if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
      self._stop()
    elif self._timer is None:  # one for head and body, however slowly they come
      self._timer = self.loop.call_later(self.patience, self.transport.abort)

  def _stop(self) -> None:
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None


class Server:
  """Serves an app between `start` and `stop`.

  Attributes:
    loop: event loop of the app.
    url: where it is reached.
  """

  def __init__(self, taken: socket.socket, patience: float = PATIENCE_SECONDS):
    """Starts the loop, but nothing listens yet.

    Args:
      taken: socket from `bind`.
      patience: seconds that a client has for a whole request, and to take what
        was sent to it; then its connection is ended.
    """
    self._socket = taken
    self._patience = patience
    # The kernel ends connections whose client takes nothing, or is gone.
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (
        (socket.TCP_USER_TIMEOUT, 1000 * patience),
        (socket.TCP_KEEPIDLE, patience / 2),
        (socket.TCP_KEEPINTVL, patience / 4),
    ):
      taken.setsockopt(socket.IPPROTO_TCP, option, max(1, int(seconds)))
    host, port = taken.getsockname()[:2]
    host = f'[{host}]' if ':' in host else host
    self.url = f'http://{host}:{port}'
    self._server: uvicorn.Server | None = None
    self.loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
        target=self.loop.run_forever, name='http-server', daemon=True
    )
    self._thread.start()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_) -> None:
    self.stop()

  def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the loop; for other threads."""
    return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

  async def start(self, app: applications.Starlette) -> None:
    """Listens; called on the loop."""
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan='off',
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        timeout_keep_alive=_IDLE_SECONDS,
        http=type('Protocol', (_Protocol,), {'patience': self._patience}),
        ws='none',
    )
    self._server = uvicorn.Server(settings)
    serving = self._server.serve(sockets=[self._socket])
    self._serving = asyncio.create_task(serving)
    while not self._server.started:
      await asyncio.sleep(0.005)

  def stop(self) -> None:
    """Ends connections and the loop."""

    async def stop() -> None:
      if self._server:
        self._server.should_exit = True
        await self._serving
      mine = asyncio.current_task()
      tasks = [t for t in asyncio.all_tasks() if t is not mine]
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)

    with contextlib.closing(self._socket):
      self.call(stop())
    self.loop.call_soon_threadsafe(self.loop.stop)
    self._thread.join()
    self.loop.close()
