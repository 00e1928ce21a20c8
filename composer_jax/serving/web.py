"""What the endpoint's routes share of HTTP: bodies, keys, streams, answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
import json
from typing import Any

from starlette import requests
from starlette import responses

from composer_jax.serving import api_errors

BODY_BYTES = 32 << 20
# Of a body that is too long so much is read, so that the client can hear of it.
_READ_BYTES = 8 * BODY_BYTES


class EventStream(responses.StreamingResponse):
  """Server-sent events; `release` is called when they end, however."""

  def __init__(self, events: AsyncIterator[bytes], release: Callable[[], None]):
    super().__init__(
        events,
        media_type='text/event-stream',
        headers={'Cache-Control': 'no-cache', 'X-Accel-Buffering': 'no'},
    )
    self._release = release

  async def __call__(self, scope, receive, send) -> None:
    try:
      await super().__call__(scope, receive, send)
    finally:
      self._release()


def key_of(request: requests.Request) -> str:
  header = request.headers.get('authorization', '')
  scheme, _, key = header.partition(' ')
  if scheme.lower() == 'bearer':
    return key.strip()
  return request.headers.get('x-api-key', '')


async def body_of(request: requests.Request) -> bytes:
  """The body.

  Raises:
    api_errors.ApiError: it is too long.
  """
  parts, size = [], 0
  async for part in request.stream():
    size += len(part)
    if size <= BODY_BYTES:
      parts.append(part)
    elif size > _READ_BYTES:
      break
  if size > BODY_BYTES:
    raise api_errors.ApiError(
        413, f'body: {size} bytes or more; must be at most {BODY_BYTES}'
    )
  return b''.join(parts)


async def before_disconnect(
    request: requests.Request, until: Awaitable[Any]
) -> bool:
  """Waits; false if the client has left before."""

  async def left() -> None:
    while (await request.receive())['type'] != 'http.disconnect':
      pass

  waiting = asyncio.ensure_future(until)
  leaving = asyncio.create_task(left())
  try:
    await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
    return waiting.done()
  finally:
    waiting.cancel()
    leaving.cancel()


def gone() -> responses.Response:
  return responses.Response(status_code=499)  # nobody reads it


def json_response(value: Any, status: int = 200) -> responses.Response:
  text = json.dumps(value)
  return responses.Response(text, status, media_type='application/json')


def event(value: Any) -> bytes:
  return f'data: {json.dumps(value)}\n\n'.encode()
