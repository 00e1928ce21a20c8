"""A host that plays the tasks of a run whose trainer is elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax

from composer_jax import config
from composer_jax import config_text
from composer_jax.fleet import nats
from composer_jax.fleet import nats_client
from composer_jax.fleet import queue as queue_lib
from composer_jax.fleet import store_blobs
from composer_jax.fleet import worker
from composer_jax.runs import base_model
from composer_jax.runs import manifest
from composer_jax.runs import player
from composer_jax.runs import rollouts
from composer_jax.runs import stored_model

_PATIENCE_SECONDS = 2.0  # for a task, between looks at whether to stop
_LOOK_SECONDS = 0.2


def play(
    url: str,
    key: str | None,
    *,
    run_id: str | None,
    store: str | None,
    blobs: str | None,
    count: int,
    device: jax.Device,
    facts: Callable[[config.Experiment], Mapping[str, Any]],
    accept: bool,
    stop: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
  """Plays tasks of a run until `stop`, then to the end of what has begun.

  Args:
    url: URL of the NATS server.
    key: file with the key of a host there, or None.
    run_id: which run; None for the only one there is.
    store: URL of the weight store as this machine sees it; None for the
      trainer's own.
    blobs: URL of the store of payloads, likewise.
    count: tasks at once.
    device: device of the engine.
    facts: facts of this machine, as `manifest.build` has them.
    accept: play although this machine computes other bits.
    stop: asked now and then.
    say: called with a line for people.

  Raises:
    ValueError: the queue, the run or the store is not there, or this machine
      would compute other bits than the trainer.
  """
  found = asyncio.run(_find(url, key, run_id, stop, say))
  if found is None:
    return
  name, about = found
  cfg = config_text.from_json(about['config'])
  different = manifest.differences(about['numerics'], facts(cfg))
  if different and not accept:
    raise ValueError(
        f'run {name}: this machine would compute other bits than the trainer'
        f' ({"; ".join(map(str, different))}); use one like it, or take the'
        ' differences into the loss with --accept_numeric_change'
    )
  store = store or about['weights']
  renderer = base_model.renderer(cfg, stored_model.read(store))
  with player.Player(cfg, store, renderer, device=device) as host:
    say('compiling the decode programs; later runs find them cached')
    host.engine.warmup()
    say(f'plays {count} tasks of run {name} at a time, weights from {store}')
    host.call(
        _work(url, key, name, cfg, host, blobs or about['blobs'], count, stop)
    )


async def _find(
    url: str,
    key: str | None,
    run_id: str | None,
    stop: Callable[[], bool],
    say: Callable[[str], None],
) -> tuple[str, dict[str, Any]] | None:
  """A run's id and what is to know of it; None if there was none until stop."""
  client = await nats_client.connect(url, key, 'host')
  try:
    found = [run_id] if run_id else await nats_client.runs(client)
    if not found:
      say(f'no run at {url} yet; waits for `experiments.rl --queue`')
    while not found and not stop():
      await asyncio.sleep(_PATIENCE_SECONDS)
      found = await nats_client.runs(client)
    if not found:
      return None
    if len(found) > 1:
      raise ValueError(
          f'queue {url}: has runs {", ".join(found)}; choose one with --run'
      )
    return found[0], await nats.NatsQueue(client, found[0]).about()
  finally:
    await client.close()


async def _work(url, key, name, cfg, host, blobs, count, stop) -> None:
  client = await nats_client.connect(url, key, 'host')
  queue = nats.NatsQueue(client, name, worker.MAX_ATTEMPTS)
  works = [
      asyncio.create_task(
          worker.work(
              queue,
              store_blobs.StoreBlobs(blobs),
              functools.partial(rollouts.play, cfg, host),
              pool=queue_lib.POOL,
              lease_seconds=cfg.rl.lease_seconds,
              patience=_PATIENCE_SECONDS,
              stop=stop,
          )
      )
      for _ in range(count)
  ]
  try:
    while any(not task.done() for task in works):
      await asyncio.wait(works, timeout=_LOOK_SECONDS)
      for task in works:
        if task.done():
          task.result()
  finally:
    for task in works:
      task.cancel()
    await asyncio.gather(*works, return_exceptions=True)
    await client.close()
