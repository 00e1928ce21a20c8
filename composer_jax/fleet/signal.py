"""How coroutines of one event loop wait for a change."""

from __future__ import annotations

import asyncio


class Signal:
  """Wakes everybody who waits now; remembers nothing."""

  def __init__(self):
    self._event = asyncio.Event()

  def fire(self) -> None:
    self._event.set()
    self._event = asyncio.Event()

  async def wait(self) -> None:
    await self._event.wait()
