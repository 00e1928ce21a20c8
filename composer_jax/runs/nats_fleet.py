"""A run whose tasks are played elsewhere, by way of a NATS server."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

from composer_jax import config
from composer_jax import config_text
from composer_jax.fleet import nats
from composer_jax.fleet import nats_client
from composer_jax.fleet import store_blobs
from composer_jax.fleet import worker
from composer_jax.runs import manifest


@dataclasses.dataclass(frozen=True)
class Fleet:
  """Where a run's tasks, payloads and weights are.

  Attributes:
    queue: URL of the NATS server.
    key: file with the key of the trainer there, or None.
    blobs: URL of the store of payloads.
    weights: URL of the weight store.
    facts: facts of the run's manifest, for hosts to compare with theirs.
  """

  queue: str
  key: str | None
  blobs: str
  weights: str
  facts: Mapping[str, Any]

  async def open(
      self, cfg: config.Experiment, run_id: str
  ) -> tuple[nats.NatsQueue, store_blobs.StoreBlobs]:
    """Makes the run's stream, or goes on with it."""
    client = await nats_client.connect(self.queue, self.key)
    made = nats.NatsQueue(client, run_id, worker.MAX_ATTEMPTS)
    about = {
        'config': config_text.to_json(cfg),
        'weights': self.weights,
        'blobs': self.blobs,
        'numerics': manifest.numerics(self.facts),
    }
    await made.create(cfg.rl.lease_seconds, about)
    return made, store_blobs.StoreBlobs(self.blobs)

  async def clear(self, cfg: config.Experiment, run_id: str) -> None:
    """Removes tasks, results and payloads of a run that is over."""
    queue, blobs = await self.open(cfg, run_id)
    await queue.clear()
    await blobs.delete(await blobs.names(f'{run_id}/'))
    await queue.close()
