"""Connections to a NATS server, and what runs there are."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import nats
from nats import errors
from nats.aio import client as client_lib
from nats.js import errors as js_errors

from composer_jax.fleet import streams

CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 5.0
# The server is away, or does not answer what a key may not ask.
AWAY = (errors.Error, TimeoutError, OSError)
_PAUSE_SECONDS = 0.5


async def connect(
    url: str, key: str | None = None, role: str = 'trainer'
) -> client_lib.Client:
  """Connects to a server, again and again once it was there.

  Args:
    url: nats://HOST:PORT or tls://HOST:PORT.
    key: file with the seed of an nkey; None for a server that asks for none.
    role: one of `streams.ROLES`; answers to others are not for its ears.

  Raises:
    ValueError: nobody answers there, or the key is not known there.
  """
  said: list[str] = []

  async def note(error: Exception) -> None:
    said.append(str(error) or repr(error))

  try:
    async with asyncio.timeout(CONNECT_SECONDS):
      return await nats.connect(
          url,
          nkeys_seed=key,
          inbox_prefix=streams.inbox(role),
          error_cb=note,
          max_reconnect_attempts=-1,
          reconnect_time_wait=_PAUSE_SECONDS,
          allow_reconnect=True,
          connect_timeout=2,
      )
  except (*AWAY, ValueError) as e:
    why = said[-1] if said else str(e) or 'no answer'
    cure = 'start it with `python3 -m experiments.fleet up`'
    if 'authorization' in why.lower() or 'nkey' in why.lower():
      cure = 'give the key file that `experiments.fleet up` wrote for this role'
    raise ValueError(f'queue {url}: {why}; {cure}') from e


async def runs(client: client_lib.Client) -> list[str]:
  """Ids of the runs on a server."""
  infos = await client.jetstream(timeout=REQUEST_SECONDS).streams_info()
  names = (info.config.name or '' for info in infos)
  return sorted(n.removeprefix('RUN_') for n in names if n.startswith('RUN_'))


@dataclasses.dataclass(frozen=True)
class Pool:
  """Tasks of a run that are not retired.

  Attributes:
    name: name of the pool.
    waiting: nobody plays them.
    played: somebody does.
    done: their results wait to be trained on, and saved.
    weights: the newest version, or None.
  """

  name: str
  waiting: int
  played: int
  done: int
  weights: int | None


async def pools(client: client_lib.Client, run: str) -> list[Pool]:
  """The pools of a run and what is in them."""
  js, name = client.jetstream(timeout=REQUEST_SECONDS), streams.stream(run)
  try:
    newest = await js.get_last_msg(name, f'{run}.v', direct=True)
    weights = json.loads(newest.data)['step']
  except js_errors.NotFoundError:
    weights = None
  found = []
  for consumer in await js.consumers_info(name):
    if not consumer.config.durable_name:
      continue
    offered = consumer.config.filter_subject
    tasks = await js.stream_info(name, subjects_filter=offered)
    waiting = consumer.num_pending or 0
    played = consumer.num_ack_pending or 0
    done = len(tasks.state.subjects or ()) - waiting - played
    found.append(Pool(consumer.name, waiting, played, max(done, 0), weights))
  return sorted(found, key=lambda pool: pool.name)
