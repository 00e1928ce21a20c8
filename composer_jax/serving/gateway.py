"""The endpoint as foreign harnesses see it, from any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
import dataclasses
import json
from typing import Any, TypeVar

from composer_jax import trace
from composer_jax.agents import external
from composer_jax.serving import server as server_lib
from composer_jax.serving import service as service_lib

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class EndpointGateway:
  """An `external.Gateway` to rollouts that are trained on.

  Attributes:
    service: answers.
    server: where it is reached; what is awaited here runs on its loop.
  """

  service: service_lib.Service
  server: server_lib.Server

  async def open(self, rollout_id: str, seed: int) -> external.Access:
    """Admits a rollout."""
    key = await self._run(self.service.open(rollout_id, seed, 'train'))
    return external.Access(f'{self.server.url}/v1', key, self.service.model)

  async def finished(self, rollout_id: str) -> external.Finish:
    """Waits until the service declares the rollout finished."""
    return external.Finish(
        **json.loads(await self._run(self._last(rollout_id)))
    )

  async def close(self, rollout_id: str) -> tuple[trace.TokenTrace, ...]:
    """Admits no further call; returns the windows that were sampled.

    Raises:
      ConnectionError: a call was lost, so they are not all of them.
    """
    return await self._run(self.service.close(rollout_id))

  async def _last(self, rollout_id: str) -> str:
    session = await self.service.session(name=rollout_id)
    if session is None:
      raise KeyError(rollout_id)
    await session.finished.wait()
    return session.finish

  async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
    future = asyncio.run_coroutine_threadsafe(coroutine, self.server.loop)
    return await asyncio.wrap_future(future)
