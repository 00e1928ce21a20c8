"""An OpenAI-compatible judge on loopback that behaves as its model is called."""

from __future__ import annotations

import asyncio
import collections
import json
import re
import socket
import threading
import time
from typing import Self

from starlette import applications
from starlette import requests
from starlette import responses
from starlette import routing
import uvicorn

HANG_SECONDS = 30.0


def outside(messages: list[dict[str, str]]) -> str:
  """What a model sees of the user's message outside of the fence."""
  mark = re.search('begin with ([0-9a-f]{32})', messages[0]['content'])[1]
  text, out, inside = messages[1]['content'], [], False
  for line in text.split('\n'):
    if line.startswith(mark):
      inside = line.split(' ')[1] == 'begin'
    elif not inside:
      out.append(line)
  return '\n'.join(out)


class JudgeServer:
  """A thread with a server; a context.

  Attributes:
    calls: model -> number of its requests.
    bodies: of all requests, in order.
    keys: Authorization headers of all requests.
    url: for `base_url`.
  """

  def __init__(self):
    self.calls = collections.Counter()
    self.bodies, self.keys = [], []
    route = routing.Route('/v1/chat/completions', self._reply, methods=['POST'])
    self._socket = socket.create_server(('127.0.0.1', 0))
    self.url = f'http://127.0.0.1:{self._socket.getsockname()[1]}/v1'
    self._server = uvicorn.Server(
        uvicorn.Config(
            applications.Starlette(routes=[route]),
            log_level='critical',
            lifespan='off',
            ws='none',
            timeout_graceful_shutdown=0,
        )
    )
    self._thread = threading.Thread(
        target=self._server.run, kwargs={'sockets': [self._socket]}, daemon=True
    )

  def __enter__(self) -> Self:
    self._thread.start()
    while not self._server.started:
      time.sleep(0.01)
    return self

  def __exit__(self, *unused) -> None:
    self._server.should_exit = self._server.force_exit = True
    self._thread.join()
    self._socket.close()

  async def _reply(self, request: requests.Request) -> responses.Response:
    body = await request.json()
    model = body['model']
    self.calls[model] += 1
    self.bodies.append(body)
    self.keys.append(request.headers.get('authorization'))
    shown = outside(body['messages'])
    answers = json.loads(f'[{shown.rpartition("Answers: ")[2]}]')
    best, worst = answers[-1], answers[0]
    verdict = json.dumps({'reason': 'Because {of} it.', 'choice': best})
    first = self.calls[model] == 1
    text = verdict
    match model:
      case 'fenced':
        text = f'Sure! {{so}}\n```json\n{verdict}\n```\nDone.'
      case 'spelled':
        text = json.dumps({'reason': '', 'choice': f' {best.upper()}\n'})
      case 'changed-its-mind':
        text = json.dumps({'choice': worst}) + '\nNo, rather:\n' + verdict
      case 'malformed':
        text = '{"reason": "x", "choice": '
      case 'nested':
        text = '{"a":' * 8000
      case 'malformed-once':
        text = '{"choice": ' if first else verdict
      case 'wrong-choice':
        text = json.dumps({'reason': 'x', 'choice': 'excellent'})
      case 'refuses':
        text = 'I cannot help with that.'
      case 'empty':
        text = None
      case 'half':  # one item of the four is never answered
        text = '' if 'cause' in shown else verdict
      case 'most':  # as well, but a light one
        text = '' if 'maintainer' in shown else verdict
      case 'obeys':  # whatever stands outside of the fence
        choice = best if 'full marks' in shown else worst
        text = json.dumps({'reason': 'x', 'choice': choice})
      case 'moody':
        choice = answers[self.calls[model] % len(answers)]
        text = json.dumps({'reason': 'x', 'choice': choice})
      case 'not-json':
        return responses.PlainTextResponse('<html>hello</html>')
      case 'no-choices':
        return responses.JSONResponse({'choices': []})
      case 'busy-once' | 'broken-once' if first:
        code = 429 if model == 'busy-once' else 500
        return responses.JSONResponse({'error': 'later'}, code)
      case 'broken':
        return responses.JSONResponse({'error': 'no'}, 500)
      case 'unknown':
        return responses.JSONResponse({'error': 'no such model'}, 404)
      case 'hangs':
        await asyncio.sleep(HANG_SECONDS)
      case 'hangs-once' if first:
        await asyncio.sleep(HANG_SECONDS)
      case 'disconnects':
        request.scope['transport_of_test'] = None
        return _Cut()
    message = {'role': 'assistant', 'content': text}
    return responses.JSONResponse({'choices': [{'message': message}]})


class _Cut(responses.Response):
  """Promises a body and ends the connection in the middle of it."""

  async def __call__(self, scope, receive, send):
    headers = [(b'content-length', b'1000')]
    await send(
        {'type': 'http.response.start', 'status': 200, 'headers': headers}
    )
    await send({'type': 'http.response.body', 'body': b'{', 'more_body': True})
    raise ConnectionError('cut')
