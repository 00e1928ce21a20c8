"""A JetStream stream, through the absence of its server.

Whoever asks waits for a server that is away; after ten minutes they get a
ConnectionError.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
import contextlib
import json
import time
from typing import Any, TypeVar

from nats import errors
from nats.js import api
from nats.js import client as js_client
from nats.js import errors as js_errors

from composer_jax.fleet import nats_client

_PATIENT_SECONDS = 600.0
_PAUSE_SECONDS = 0.5
_IDLE_SECONDS = 5.0  # after which a reader looks whether it missed something
_LOST_RACE = 10071  # error: the subject has another last sequence number
_T = TypeVar('_T')


class Stream:
  """The newest message of every subject.

  Attributes:
    name: name of the stream.
  """

  def __init__(self, js: js_client.JetStreamContext, name: str):
    self._js = js
    self.name = name

  async def patiently(
      self,
      ask: Callable[[], Awaitable[_T]],
      unsure: Callable[[Exception], None] = lambda _: None,
  ) -> _T:
    """Waits for an answer; asks again while the server is away.

    Args:
      ask: asks.
      unsure: called when nobody knows whether what was asked has been done.
    """
    end = time.monotonic() + _PATIENT_SECONDS
    while True:
      try:
        return await ask()
      except nats_client.AWAY as e:
        answer = isinstance(e, js_errors.APIError) and (e.code or 0) < 500
        if answer or isinstance(e, errors.MaxPayloadError):
          raise
        if time.monotonic() > end:
          raise ConnectionError(
              f'queue: no answer for {_PATIENT_SECONDS:.0f} s; {e!r}'
          ) from e
        unsure(e)
        await asyncio.sleep(_PAUSE_SECONDS)

  async def last(self, subject: str) -> api.RawStreamMsg | None:
    """The message on a subject."""

    try:
      return await self.patiently(
          lambda: self._js.get_last_msg(self.name, subject, direct=True)
      )
    except js_errors.NotFoundError:
      return None

  async def write(
      self,
      subject: str,
      data: bytes,
      at: int,
      unsure: Callable[[Exception], None] = lambda _: None,
  ) -> int:
    """Writes a subject if its last sequence number is `at` (0: there is none).

    Args:
      subject: the subject.
      data: what to write.
      at: its last sequence number.
      unsure: see `_patiently`.

    Returns:
      The new number; 0 if it has another one.
    """
    header = {'Nats-Expected-Last-Subject-Sequence': str(at)}
    try:
      written = await self.patiently(
          lambda: self._js.publish(
              subject, data, headers=header, stream=self.name
          ),
          unsure,
      )
      return written.seq
    except js_errors.APIError as e:
      if e.err_code != _LOST_RACE:
        raise
      return 0

  async def swap(self, subject: str, value: Any, at: int) -> int:
    """As `_write`, of what nobody else would write.

    So a write whose answer was lost with the server is known again.
    """
    data, unsure = json.dumps(value).encode(), []
    written = await self.write(subject, data, at, unsure.append)
    if written or not unsure:
      return written
    found = await self.last(subject)
    return found.seq if found and found.data == data else 0

  async def purge(self, subject: str) -> None:
    """Removes what is on subjects; * and > stand for any."""
    await self.patiently(
        lambda: self._js.purge_stream(self.name, subject=subject)
    )

  async def follow(
      self, subject: str, after: int
  ) -> AsyncIterator[tuple[int, bytes]]:
    """Messages behind a sequence number, whatever happens to the server.

    Yields:
      (sequence number, data; empty where something was removed).
    """
    while True:
      config = api.ConsumerConfig(
          deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
          opt_start_seq=after + 1,
      )
      try:
        reader = await self._js.subscribe(
            subject,
            stream=self.name,
            ordered_consumer=True,
            config=config,
        )
      except js_errors.NotFoundError as e:
        raise ConnectionError(f'queue: {self.name} is gone') from e
      except nats_client.AWAY:
        await asyncio.sleep(_PAUSE_SECONDS)
        continue
      try:
        while True:
          message = await reader.next_msg(timeout=_IDLE_SECONDS)
          after = message.metadata.sequence.stream
          yield after, message.data
      except (
          nats_client.AWAY
      ):  # nothing new, or the reader was lost with the server
        pass
      finally:
        with contextlib.suppress(*nats_client.AWAY):
          await reader.unsubscribe()

  async def put(self, subject: str, data: bytes) -> None:
    """Writes a subject, whatever is there."""
    await self.patiently(
        lambda: self._js.publish(subject, data, stream=self.name)
    )
