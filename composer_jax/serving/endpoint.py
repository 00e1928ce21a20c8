"""The policy behind an OpenAI-compatible HTTP interface.

The API key is the right to sample in one rollout. Operators have another key,
with which they open rollouts from elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
import functools
import hmac
import json
import logging
import math
import time
from typing import Any

from starlette import applications
from starlette import exceptions
from starlette import requests
from starlette import responses
from starlette import routing

from composer_jax.serving import api_errors
from composer_jax.serving import choices
from composer_jax.serving import openai_replies
from composer_jax.serving import openai_requests
from composer_jax.serving import service as service_lib
from composer_jax.serving import session as session_lib
from composer_jax.serving import web

_COUNTED = ('messages', 'tools', 'prompt', 'chat_template_kwargs')
_PACE_SECONDS = 0.02  # between the events of a stream, at least

ApiError = api_errors.ApiError
Request = requests.Request
Response = responses.Response
Handler = Callable[[Request], Awaitable[Response]]


def app(
    service: service_lib.Service,
    admin_key: str | None = None,
    modes: Sequence[str] = service_lib.MODES,
) -> applications.Starlette:
  """The routes.

  Args:
    service: answers.
    admin_key: opens rollouts; None: nobody can over HTTP.
    modes: modes of rollouts that it may open.
  """
  endpoint = _Endpoint(service, admin_key, modes)
  chat = functools.partial(endpoint.complete, chat=True)
  plain = functools.partial(endpoint.complete, chat=False)
  table: list[tuple[str, str, str, Handler]] = [
      ('POST', '/v1/chat/completions', 'chat', chat),
      ('POST', '/v1/completions', 'completions', plain),
      ('GET', '/v1/models', 'models', endpoint.models),
      ('POST', '/v1/messages/count_tokens', 'count', endpoint.count),
      ('POST', '/tokenize', 'count', endpoint.count),
      ('POST', '/rollouts', 'open', endpoint.open),
      ('POST', '/rollouts/{rollout:path}/finish', 'finish', endpoint.finish),
      # For a client that knows the base URL of the API only.
      ('POST', '/v1/rollouts/{rollout:path}/finish', 'finish', endpoint.finish),
      ('GET', '/health', 'health', endpoint.health),
      ('GET', '/ready', 'ready', endpoint.ready),
      ('GET', '/metrics', 'metrics', endpoint.metrics),
  ]
  return applications.Starlette(
      routes=[
          routing.Route(path, endpoint.guarded(name, handler), methods=[method])
          for method, path, name, handler in table
      ],
      exception_handlers={exceptions.HTTPException: _no_route},
  )


async def _no_route(request: Request, error: Exception) -> Response:
  status = getattr(error, 'status_code', 404)
  path = f'{request.method} {request.url.path}'
  message = f'{path}: not served here'
  return web.json_response(ApiError(status, message).body, status)


class _Endpoint:
  """Handlers of the routes."""

  def __init__(
      self,
      service: service_lib.Service,
      admin_key: str | None,
      modes: Sequence[str],
  ):
    self._service = service
    self._admin_key = admin_key
    self._modes = modes

  def guarded(self, name: str, handler: Handler) -> Handler:
    """Answers errors as the API does, and counts."""

    async def answer(request: Request) -> Response:
      start = time.perf_counter()
      try:
        response = await handler(request)
      except ApiError as e:
        response = web.json_response(e.body, e.status)
        if e.retry_after is not None:
          response.headers['Retry-After'] = str(e.retry_after)
      except requests.ClientDisconnect:  # before its request was complete
        response = web.gone()
      except Exception:  # a fault of ours ends one request, never the server
        logging.exception('%s %s', request.method, request.url.path)
        response = web.json_response(
            ApiError(500, 'internal error; see the log').body, 500
        )
      seconds = time.perf_counter() - start
      self._service.metrics.answered(name, response.status_code, seconds)
      return response

    return answer

  async def complete(self, request: Request, *, chat: bool) -> Response:
    service = self._service
    session = await self._session(request)
    body = await web.body_of(request)
    self._check_ready()
    ask = await asyncio.to_thread(
        self._ask, body, chat, session.mode == 'train'
    )
    if ask.model != service.model:
      raise ApiError(
          404,
          f'model={ask.model!r}: not served here; use {service.model!r}',
          param='model',
          code='model_not_found',
      )
    work = service.submit(
        session,
        ask,
        body,
        retry=request.headers.get('x-stainless-retry-count', '0') != '0',
        key=request.headers.get('idempotency-key'),
    )
    release = functools.partial(service.release, session, work)
    try:
      until = work.started.wait() if ask.stream else asyncio.wait([work.task])
      if not await web.before_disconnect(request, until):
        return web.gone()
      if not ask.stream or (work.task.done() and _failure(work)):
        return web.json_response(_result(work))
      held, release = release, lambda: None
      return web.EventStream(self._events(work), held)
    finally:
      release()

  def _ask(self, body: bytes, chat: bool, train: bool) -> openai_requests.Ask:
    fields = openai_requests.load(body)
    ask = openai_requests.parse(fields, chat=chat, train=train)
    openai_requests.check_size(ask, self._service.max_model_len)
    return ask

  async def _events(self, work: session_lib.Work) -> AsyncIterator[bytes]:
    ask, start = work.ask, time.perf_counter()
    chat = session_lib.chat_of(self._service.chat, ask)
    sent: list[dict[str, str]] = [{} for _ in range(ask.n)]
    if ask.messages is not None:
      for i in range(ask.n):
        role = {'role': 'assistant', 'content': ''}
        yield web.event(openai_replies.chunk(work.head, i, role))
    while not work.task.done():
      work.changed.clear()
      for i, ids in enumerate(work.sampled):
        shown = choices.certain(ask, chat, ids)
        for name, text in shown.items():
          if not (new := text[len(sent[i].get(name, '')) :]):
            continue
          if not any(sent):
            seconds = time.perf_counter() - start
            self._service.metrics.first_token.observe(seconds)
          sent[i][name] = text
          yield web.event(openai_replies.chunk(work.head, i, {name: new}))
      await asyncio.sleep(_PACE_SECONDS)
      await work.changed.wait()
    if error := _failure(work):
      yield web.event(error.body)
      return
    for event in openai_replies.rest(ask, work.task.result(), sent):
      yield web.event(event)
    yield b'data: [DONE]\n\n'

  async def models(self, request: Request) -> Response:
    await self._session(request)
    model = {
        'id': self._service.model,
        'object': 'model',
        'created': 0,
        'owned_by': 'composer_jax',
        'max_model_len': self._service.max_model_len,
    }
    return web.json_response({'object': 'list', 'data': [model]})

  async def count(self, request: Request) -> Response:
    await self._session(request)
    body = openai_requests.load(await web.body_of(request))
    limit = self._service.max_model_len
    ask = openai_requests.parse(
        {k: v for k, v in body.items() if k in _COUNTED},
        chat='messages' in body,
        train=False,
    )
    openai_requests.check_size(ask, limit)
    ids = list(
        await session_lib.encoded(
            ask, session_lib.chat_of(self._service.chat, ask)
        )
    )
    n = len(ids)
    return web.json_response(
        {'input_tokens': n, 'count': n, 'tokens': ids, 'max_model_len': limit}
    )

  async def open(self, request: Request) -> Response:
    if not self._is_admin(request):
      raise ApiError(403, 'this key cannot open rollouts; use the admin key')
    self._check_ready()
    body = openai_requests.load(await web.body_of(request))
    rollout, mode = body.get('id'), body.get('mode', 'train')
    seed = body.get('seed', 0)
    if not isinstance(rollout, str) or not rollout or '\0' in rollout:
      raise ApiError(400, f'id={rollout!r}: want a text', param='id')
    if mode not in self._modes:
      want = ' or '.join(self._modes)
      raise ApiError(400, f'mode={mode!r}: want {want}', param='mode')
    if type(seed) is not int:
      raise ApiError(400, f'seed={seed!r}: want an integer', param='seed')
    try:
      key = await self._service.open(rollout, seed, mode)
    except ValueError as e:
      raise ApiError(409, str(e)) from e
    answer = {'id': rollout, 'api_key': key, 'model': self._service.model}
    return web.json_response(answer, 201)

  async def finish(self, request: Request) -> Response:
    name = request.path_params['rollout']
    if self._is_admin(request):
      session = await self._service.session(name=name)
      if session is None:
        raise ApiError(404, f'rollout {name}: never opened here')
      if session.closed:
        raise _closed(session)
    else:
      session = await self._session(request, finished=True)
      if session.id != name:
        raise ApiError(403, f'this key is not that of rollout {name}')
    body = openai_requests.load(await web.body_of(request))
    submission, reward = body.get('submission'), body.get('reward')
    status = body.get('status', '')
    if submission is not None and not (
        isinstance(submission, dict)
        and all(isinstance(text, str) for text in submission.values())
    ):
      raise ApiError(400, 'submission: want {path: text}', param='submission')
    if reward is not None and not (
        type(reward) in (int, float) and math.isfinite(reward)
    ):
      raise ApiError(400, f'reward={reward!r}: want a number', param='reward')
    if not isinstance(status, str):
      raise ApiError(400, f'status={status!r}: want a text', param='status')
    kept = {'submission': submission, 'reward': reward, 'status': status}
    await self._service.finish(session, json.dumps(kept, sort_keys=True))
    return web.json_response({'id': name})

  async def health(self, request: Request) -> Response:
    del request
    if not self._service.engine.alive:
      raise ApiError(503, 'the engine has ended; restart the host')
    return web.json_response({'status': 'ok'})

  async def ready(self, request: Request) -> Response:
    del request
    self._check_ready()
    step, digest = max(dict(self._service.engine.digests).items())
    return web.json_response(
        {'status': 'ok', 'weights_version': step, 'digest': digest}
    )

  async def metrics(self, request: Request) -> Response:
    del request
    text = self._service.metrics.text()
    return Response(text, media_type='text/plain; version=0.0.4')

  def _check_ready(self) -> None:
    if not (self._service.ready and self._service.engine.alive):
      raise ApiError(503, 'not ready: starting or shutting down', retry_after=5)

  def _is_admin(self, request: Request) -> bool:
    key = self._admin_key
    return key is not None and hmac.compare_digest(
        web.key_of(request).encode(), key.encode()
    )

  async def _session(
      self, request: Request, finished: bool = False
  ) -> session_lib.Session:
    """The rollout of the key; one that is finished only if that is asked."""
    key = web.key_of(request)
    session = await self._service.session(secret=key) if key else None
    if session is None:
      if self._is_admin(request):
        raise ApiError(403, 'the admin key opens rollouts; use the key of one')
      self._check_ready()  # a host that starts does not know all keys yet
      raise ApiError(
          401,
          'unknown API key; use that of an open rollout',
          code='invalid_api_key',
      )
    if session.closed or (session.finished.is_set() and not finished):
      raise _closed(session)
    return session


def _closed(session: session_lib.Session) -> ApiError:
  return ApiError(410, f'rollout {session.id}: is closed; open another one')


def _failure(work: session_lib.Work) -> ApiError | None:
  """Why an ended call has no reply."""
  if work.task.cancelled():
    return ApiError(410, 'the rollout was closed meanwhile')
  error = work.task.exception()
  if error is None or isinstance(error, ApiError):
    return error
  raise error


def _result(work: session_lib.Work) -> dict[str, Any]:
  if error := _failure(work):
    raise error
  return work.task.result()
