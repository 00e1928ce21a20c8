"""Work queue over NATS JetStream: hosts anywhere, a trainer that may be killed.

See `streams` for what is stored. Durable writes per rollout: its offer, its
lease and its result. A lease lasts as long as its holder gives signs of life to
the server, which then hands the task to somebody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import json
import secrets
import time
from typing import Any, Literal, Self

from nats import errors
from nats.aio import client as client_lib
from nats.aio import msg as msg_lib
from nats.js import errors as js_errors

from composer_jax import trace
from composer_jax.fleet import blobs
from composer_jax.fleet import facts
from composer_jax.fleet import nats_client
from composer_jax.fleet import nats_stream
from composer_jax.fleet import queue
from composer_jax.fleet import streams

_PAUSE_SECONDS = 0.5
_FETCH_SECONDS = 30.0  # of one request for a task


@dataclasses.dataclass(frozen=True)
class _Lease(queue.Lease):
  """A lease with what the server knows it by.

  Attributes:
    offer: sequence number of the task.
    at: sequence number of the record that says who has it.
    delivery: the delivery to acknowledge.
  """

  offer: int
  at: int
  delivery: msg_lib.Msg


class NatsQueue:
  """`queue.WorkQueue` over a stream; for ONE event loop.

  A server that goes away for a while delays whoever calls; after ten minutes
  they get a ConnectionError.
  """

  def __init__(
      self, client: client_lib.Client, run: str, max_attempts: int = 3
  ):
    """Describes a run's queue; the trainer's `create` makes it.

    Args:
      client: what `connect` returned.
      run: id of the run.
      max_attempts: leases per task; then it counts as lost.
    """
    self._client = client
    self._js = client.jetstream(timeout=nats_client.REQUEST_SECONDS)
    self._run = run
    self._stream = nats_stream.Stream(self._js, streams.stream(run))
    self._max_attempts = max_attempts
    self._pulls: dict[str, Any] = {}

  async def create(
      self,
      lease_seconds: float,
      about: Mapping[str, Any],
      pools: Sequence[str] = (queue.POOL,),
  ) -> Self:
    """Makes the stream if it is not there; the trainer's.

    Args:
      lease_seconds: a worker that gives no sign for so long loses its lease.
      about: what hosts need to know of the run, as JSON.
      pools: pools of tasks.

    Raises:
      ValueError: the key may not do that.
    """
    name = self._stream.name
    try:
      try:
        await self._js.stream_info(name)
      except js_errors.NotFoundError:
        await self._js.add_stream(streams.stream_config(self._run))
      for pool in pools:
        consumer = streams.consumer_config(self._run, pool, lease_seconds)
        await self._js.add_consumer(name, consumer)
      await self._js.publish(f'{self._run}.c', json.dumps(about).encode())
    except nats_client.AWAY as e:  # a denial, too, is a silence
      raise ValueError(
          f'queue: stream {name}: {str(e) or "no answer"}; is this the key of'
          ' the trainer, and is JetStream on?'
      ) from e
    return self

  async def about(self) -> dict[str, Any]:
    """What `create` said of the run.

    Raises:
      ValueError: there is no such run.
    """
    try:
      # With no stream nobody answers the other requests.
      await self._js.stream_info(self._stream.name)
      found = await self._stream.last(f'{self._run}.c')
    except js_errors.NotFoundError:
      found = None
    if found is None:
      raise ValueError(
          f'run={self._run}: not on this server; runs there:'
          f' {", ".join(await nats_client.runs(self._client)) or "none"}'
      )
    return json.loads(found.data)

  async def offer(self, task_id: str, spec: Mapping[str, Any]) -> bool:
    subject = streams.task(_pool(spec), task_id)
    if await self._stream.write(subject, json.dumps(spec).encode(), 0):
      return True
    found = await self._stream.last(subject)
    if found and json.loads(found.data) == spec:
      return False
    await self.again(task_id, spec)
    return True

  async def again(self, task_id: str, spec: Mapping[str, Any]) -> None:
    # Another message: results and leases of the one before are not of it.
    subject = streams.task(_pool(spec), task_id)
    data = json.dumps(spec).encode()
    await self._stream.put(subject, data)

  async def retire(self, task_ids: Sequence[str]) -> None:
    subjects = [
        subject
        for task_id in task_ids
        for subject in (streams.task('*', task_id), streams.work(task_id))
    ]
    await asyncio.gather(*map(self._stream.purge, subjects))

  async def close(self) -> None:
    """Ends the connection."""
    await self._client.close()

  async def clear(self) -> None:
    """Retires every task of the run."""
    for part in 'tw':
      await self._stream.purge(f'{self._run}.{part}.>')

  async def lease(self, pool: str, timeout: float) -> queue.Lease | None:
    end = time.monotonic() + timeout
    while (left := end - time.monotonic()) > 0:
      message = await self._fetch(pool, min(left, _FETCH_SECONDS))
      if message and (lease := await self._take(message)):
        return lease
    return None

  async def _fetch(self, pool: str, seconds: float) -> msg_lib.Msg | None:
    try:
      if pool not in self._pulls:
        self._pulls[pool] = await self._js.pull_subscribe_bind(
            consumer=pool, stream=self._stream.name
        )
      (message,) = await self._pulls[pool].fetch(1, timeout=seconds)
      return message
    except errors.TimeoutError:
      return None
    except nats_client.AWAY:
      await asyncio.sleep(_PAUSE_SECONDS)
      return None

  async def _take(self, message: msg_lib.Msg) -> _Lease | None:
    """The lease of a task that was delivered; None: there is nothing to do."""
    task_id = streams.task_id(message.subject)
    offer = message.metadata.sequence.stream
    attempt = message.metadata.num_delivered
    record = await self._stream.last(streams.work(task_id))
    state = json.loads(record.data) if record and record.data else {}
    if state.get('offer') == offer and 'result' in state:
      await message.term()
      return None
    at, token = record.seq if record else 0, secrets.token_hex(8)
    if attempt > self._max_attempts:
      if await self._stream.swap(
          streams.work(task_id),
          _done(message.subject, offer, '', queue.ResultRef(task_id)),
          at,
      ):
        await message.term()
      return None
    leased = {'offer': offer, 'token': token}
    at = await self._stream.swap(streams.work(task_id), leased, at)
    if not at:  # who had it before has just ended it
      return None
    known = await self._stream.last(f'{self._run}.v')
    version = json.loads(known.data)['step'] if known else None
    spec = json.loads(message.data)
    return _Lease(task_id, spec, token, version, attempt, offer, at, message)

  async def extend(self, lease: queue.Lease) -> bool:
    assert isinstance(lease, _Lease)
    record = await self._stream.last(streams.work(lease.id))
    if record is None or record.seq != lease.at:
      return False
    with contextlib.suppress(*nats_client.AWAY):
      await lease.delivery.in_progress()
    return True

  async def release(self, lease: queue.Lease, retry: bool) -> None:
    assert isinstance(lease, _Lease)
    if retry and lease.attempt < self._max_attempts:
      record = await self._stream.last(streams.work(lease.id))
      if record is not None and record.seq == lease.at:
        # As a request: the next fetch must not be faster.
        with contextlib.suppress(*nats_client.AWAY):
          await self._client.request(
              lease.delivery.reply, b'-NAK', timeout=nats_client.REQUEST_SECONDS
          )
      return
    await self._end(lease, queue.ResultRef(lease.id))

  async def complete(
      self, lease: queue.Lease, result: queue.ResultRef
  ) -> Literal['accepted', 'duplicate']:
    if result.task_id != lease.id:
      raise ValueError(f'result of {result.task_id!r} for lease {lease.id!r}')
    return 'accepted' if await self._end(lease, result) else 'duplicate'

  async def _end(self, lease: queue.Lease, result: queue.ResultRef) -> bool:
    assert isinstance(lease, _Lease)
    subject = lease.delivery.subject
    state = _done(subject, lease.offer, lease.token, result)
    if not await self._stream.swap(streams.work(lease.id), state, lease.at):
      return False
    with contextlib.suppress(
        *nats_client.AWAY
    ):  # delivered again, it is found done
      await lease.delivery.ack()
    return True

  async def results(
      self, cursor: int
  ) -> AsyncIterator[tuple[int, queue.ResultRef]]:
    async for at, data in self._stream.follow(f'{self._run}.w.>', cursor):
      state = json.loads(data) if data else {}
      if 'result' not in state:
        continue
      task = await self._stream.last(state['task'])
      if task is not None and task.seq == state['offer']:
        yield at, _result(state['result'])

  async def publish_version(self, version: trace.WeightVersion) -> None:
    """Moves the pointer if `version` follows the current one.

    Raises:
      ValueError: the step does not grow, or a delta has another parent.
    """
    subject = f'{self._run}.v'
    found = await self._stream.last(subject)
    current = trace.WeightVersion(**json.loads(found.data)) if found else None
    if version == current:
      return
    if current is not None and (
        version.step <= current.step
        or version.parent not in (None, current.digest)
    ):
      raise ValueError(f'version {version}: does not follow {current}')
    at = found.seq if found else 0
    if not await self._stream.swap(subject, dataclasses.asdict(version), at):
      raise ValueError(
          f'version {version}: another trainer publishes for run'
          f' {self._run}; stop one of them'
      )

  async def versions(self) -> AsyncIterator[trace.WeightVersion]:
    async for _, data in self._stream.follow(f'{self._run}.v', 0):
      yield trace.WeightVersion(**json.loads(data))


def _pool(spec: Mapping[str, Any]) -> str:
  return spec.get('pool', queue.POOL)


def _done(
    subject: str, offer: int, token: str, result: queue.ResultRef
) -> dict[str, Any]:
  """The record of a task that has ended."""
  return {
      'task': subject,
      'offer': offer,
      'token': token,
      'result': {
          'id': result.task_id,
          'blob': result.blob and dataclasses.asdict(result.blob),
          'facts': result.facts and facts.to_json(result.facts),
      },
  }


def _result(data: Mapping[str, Any]) -> queue.ResultRef:
  blob, said = data['blob'], data['facts']
  return queue.ResultRef(
      data['id'],
      blob and blobs.BlobRef(**blob),
      said and facts.from_json(said),
  )
