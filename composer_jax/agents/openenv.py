"""Environments over a WebSocket, as OpenEnv speaks it; both sides.

Frames are JSON objects {"type": "reset" | "step" | "state" | "close", "data":
{...}} and are answered by {"type": "observation" | "state" | "error", "data":
{...}}, one session per connection to /ws. An observation comes with `reward`
and `done`.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncGenerator, Mapping, Sequence
import contextlib
import dataclasses
import http
import json
from typing import Any

from composer_jax import config
from composer_jax import trace
from composer_jax.agents import grading
from composer_jax.agents import harness
from composer_jax.agents import json_renderer
from composer_jax.agents import sandbox
from composer_jax.agents import tasks
from composer_jax.agents import tools
from websockets import exceptions
from websockets.asyncio import client as ws_client
from websockets.asyncio import server as ws_server

_FRAME_BYTES = 1 << 20
_CLOSE_SECONDS = 5.0


class FrameError(ValueError):
  """A frame that cannot be obeyed; (code, message) goes back to its sender."""


def _observation(
    text: str, reward: float | None, done: bool, **more: Any
) -> dict[str, Any]:
  data = {'observation': {'text': text, **more}, 'reward': reward, 'done': done}
  return {'type': 'observation', 'data': data}


def _read(frame: str | bytes) -> tuple[str, Mapping[str, Any]]:
  """Type and data of a frame.

  Raises:
    FrameError: it is no JSON object, or its data are none.
  """
  try:
    found = json.loads(frame)
  except (ValueError, RecursionError) as e:
    raise FrameError('INVALID_JSON', str(e)) from e
  if not isinstance(found, dict) or not isinstance(found.get('type'), str):
    raise FrameError('INVALID_JSON', 'a frame is an object with a type')
  data = found.get('data') or {}
  if not isinstance(data, dict):
    raise FrameError('VALIDATION_ERROR', 'data must be an object')
  return found['type'], data


class _Session:
  """One connection to the server: a task, played by whoever is there."""

  def __init__(self, server: Server, session: sandbox.Session):
    self._server = server
    self._session = session
    self._task: tasks.Task | None = None
    self._steps, self._done = 0, False

  async def answer(self, frame: str | bytes) -> dict[str, Any] | None:
    """The reply to a frame; None to end the connection."""
    try:
      kind, data = _read(frame)
      match kind:
        case 'reset':
          return await self._reset(data)
        case 'step':
          return await self._step(data)
        case 'state':
          episode = self._task.id if self._task else None
          state = {'episode_id': episode, 'step_count': self._steps}
          return {'type': 'state', 'data': state}
        case 'close':
          return None
      raise FrameError('UNKNOWN_TYPE', f'no such type: {kind[:80]}')
    except FrameError as e:
      code, message = e.args
    except sandbox.SandboxError as e:
      code, message = 'EXECUTION_ERROR', str(e)
    return {'type': 'error', 'data': {'message': message, 'code': code}}

  async def _reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
    index = data.get('index', self._server.next_index)
    if type(index) is not int or index < 0:
      raise FrameError('VALIDATION_ERROR', f'index={index!r}: want 0, 1, ...')
    try:
      task = self._server.source.task(index, self._server.split)
    except IndexError as e:
      raise FrameError('VALIDATION_ERROR', str(e)) from e
    self._server.next_index = index + 1
    await self._session.release()  # nothing of the episode before is left
    self._task, self._steps, self._done = task, 0, False
    self._files: Mapping[str, str] = dict(task.files)
    self._loop = harness.ToolLoop(self._session, self._server.cfg)
    return _observation(
        task.instruction, None, False, id=task.id, files=dict(task.files)
    )

  async def _step(self, data: Mapping[str, Any]) -> dict[str, Any]:
    task = self._task
    if task is None or self._done:
      raise FrameError('SESSION_ERROR', 'no episode is running; send reset')
    self._steps += 1
    try:
      call = json_renderer.call_of(json.dumps(data))
      self._files, text, done = await self._loop.execute(
          task, self._files, [call]
      )
    except tools.ParseError as e:  # the policy's mistake, which costs a step
      text, done = str(e), False
    if not done and self._steps < self._server.cfg.max_turns:
      return _observation(text, None, False)
    self._done = True
    grade = await self._server.grader(task, self._files)
    if not grade.valid:  # no verdict is no reward, and no zero either
      raise FrameError('EXECUTION_ERROR', grade.reason)
    return _observation(text, float(grade.solved), True)


class Server:
  """Offers the tasks of a source.

  Hidden tests stay here: a client sees what a policy sees.

  Attributes:
    source: of the tasks.
    split: that is offered.
    grader: of what was handed in; with sandboxes of its own.
    cfg: `max_turns`, `tool_seconds` and `tool_output_bytes` bound an episode.
    next_index: of the task that the next reset gets, unless it names one.
  """

  def __init__(
      self,
      source: tasks.TaskSource,
      split: str,
      pool: sandbox.Pool,
      grader: grading.Grader,
      cfg: config.HarnessConfig,
      idle_seconds: float = 600.0,
  ):
    """Describes the server.

    Args:
      source: see the attributes, as for split, grader and cfg.
      split: of the source.
      pool: of sandboxes for tools.
      grader: of submissions.
      cfg: budgets.
      idle_seconds: without a frame, after which a session is over.
    """
    self.source, self.split = source, split
    self.grader, self.cfg = grader, cfg
    self.next_index = 0
    self._pool, self._idle_seconds = pool, idle_seconds

  async def _serve(self, connection: ws_server.ServerConnection) -> None:
    with contextlib.suppress(exceptions.ConnectionClosed, TimeoutError):
      async with self._pool.session() as session:
        mine = _Session(self, session)
        while True:
          async with asyncio.timeout(self._idle_seconds):
            frame = await connection.recv()
          reply = await mine.answer(frame)
          if reply is None:
            return
          await connection.send(json.dumps(reply))

  @contextlib.asynccontextmanager
  async def listen(
      self, host: str = '127.0.0.1', port: int = 0
  ) -> AsyncGenerator[str]:
    """Serves while inside; yields the URL for clients."""

    def only_ws(connection, request):
      if request.path.partition('?')[0] != '/ws':
        return connection.respond(http.HTTPStatus.NOT_FOUND, 'try /ws\n')
      return None

    async with ws_server.serve(
        self._serve,
        host,
        port,
        max_size=_FRAME_BYTES,
        process_request=only_ws,
        close_timeout=_CLOSE_SECONDS,
    ) as server:
      address = next(iter(server.sockets)).getsockname()
      yield f'ws://{address[0]}:{address[1]}/ws'


class Client:
  """One session with an environment; a context.

  Whatever the other side does is a ConnectionError or a TimeoutError, both
  failures of infrastructure, except that it does not like an action.
  """

  def __init__(self, url: str, seconds: float = 60.0):
    """Describes the session.

    Args:
      url: of the environment, such as ws://host:8000/ws.
      seconds: until a request must have been answered.
    """
    self._url, self._seconds = url, seconds
    self._socket: ws_client.ClientConnection | None = None

  async def __aenter__(self) -> Client:
    try:
      self._socket = await ws_client.connect(
          self._url,
          max_size=_FRAME_BYTES,
          open_timeout=self._seconds,
          close_timeout=_CLOSE_SECONDS,
      )
    except (exceptions.WebSocketException, OSError) as e:
      raise ConnectionError(f'{self._url}: {e}') from e
    return self

  async def __aexit__(self, *unused) -> None:
    assert self._socket is not None
    with contextlib.suppress(exceptions.ConnectionClosed):
      await self._socket.send(json.dumps({'type': 'close'}))
    await self._socket.close()

  async def request(self, kind: str, **data: Any) -> Mapping[str, Any]:
    """Sends a frame; returns the data of the answer.

    Raises:
      FrameError: the environment refused what was sent.
      ConnectionError: it is gone, failed, or talks nonsense.
      TimeoutError: it does not answer.
    """
    assert self._socket is not None
    try:
      async with asyncio.timeout(self._seconds):
        await self._socket.send(json.dumps({'type': kind, 'data': data}))
        frame = await self._socket.recv()
      found, data = _read(frame)
    except exceptions.ConnectionClosed as e:  # a frame too large ends here, too
      raise ConnectionError(f'{self._url}: {e}') from e
    except FrameError as e:
      raise ConnectionError(f'{self._url}: bad frame: {e.args[1]}') from e
    if found == 'error':
      code, message = str(data.get('code')), str(data.get('message'))
      if code == 'VALIDATION_ERROR':
        raise FrameError(code, message)
      raise ConnectionError(f'{self._url}: {code}: {message}')
    if found != ('state' if kind == 'state' else 'observation'):
      raise ConnectionError(f'{self._url}: {found!r} answers {kind!r}')
    return data


class RemoteLoop:
  """Tools of a remote environment; a `harness.Loop`.

  Attributes:
    counts: of the episode.
    log: of the episode.
    exhausted: never; the environment has limits of its own.
    reward: the last one that it gave; None before.
  """

  exhausted = False

  def __init__(self, client: Client, cfg: config.HarnessConfig):
    self._client, self._cfg = client, cfg
    self.counts: collections.Counter[str] = collections.Counter()
    self.log: list[str] = []
    self.reward: float | None = None

  async def step(self, call: tools.ToolCall) -> tuple[str, bool]:
    """Carries out a call; returns what the environment shows, and if it ends.

    Raises:
      ConnectionError, TimeoutError: as `Client.request`.
    """
    try:
      data = await self._client.request(
          'step', **json.loads(json_renderer.line_of(call))
      )
    except FrameError as e:
      self.counts['failed_calls'] += 1
      return e.args[1], False
    reward, seen = data.get('reward'), data.get('observation')
    if isinstance(reward, int | float):
      self.reward = float(reward)
    return _text(seen), data.get('done') is True

  async def execute(
      self,
      task: tasks.Task,
      files: Mapping[str, str],
      calls: Sequence[tools.ToolCall],
  ) -> tuple[Mapping[str, str], str, bool]:
    shown, done = [], False
    for call in calls:
      self.counts[type(call).__name__.lower() + 's'] += 1
      text, done = await self.step(call)
      self.log.append(f'{call}\n{text}')
      shown.append(text)
      if done:
        break
    text = tools.truncate('\n'.join(shown), self._cfg.tool_output_bytes)
    return files, text, done


def _text(seen: Any) -> str:
  """An observation in words: its text, or all of it."""
  text = seen.get('text') if isinstance(seen, dict) else seen
  return text if isinstance(text, str) else json.dumps(seen)


def _task(data: Mapping[str, Any]) -> tasks.Task:
  """What a reset shows, as a task."""
  seen = data.get('observation')
  facts = seen if isinstance(seen, dict) else {}
  files = facts.get('files')
  files = files if isinstance(files, dict) else {}
  files = {k: v for k, v in files.items() if isinstance(v, str)}
  return tasks.Task(str(facts.get('id', 'remote')), _text(seen), files, ())


async def play(
    url: str,
    policy: harness.Policy,
    renderer: harness.Renderer,
    *,
    cfg: config.HarnessConfig,
    seed: int,
    index: int | None = None,
    temperature: float = 1.0,
    seconds: float = 60.0,
) -> harness.Episode:
  """Plays an episode in a remote environment, whose reward is its grade.

  Args:
    url: of the environment.
    policy: samples the turns.
    renderer: between tokens and calls.
    cfg: budgets.
    seed: of the episode.
    index: of the task, where the environment lets us choose.
    temperature: see `harness.run`.
    seconds: until every request must have been answered.

  Returns:
    A graded episode, solved from a reward of 1 on. INFRA_ERROR if the
    environment failed in any way.

  Raises:
    ValueError: as `harness.run`; or there is no such task.
  """
  choice = {} if index is None else {'index': index}
  try:
    async with Client(url, seconds) as client:
      task = _task(await client.request('reset', **choice))
      loop = RemoteLoop(client, cfg)
      episode = await harness.run(
          task,
          loop,
          policy,
          renderer,
          cfg=cfg,
          seed=seed,
          temperature=temperature,
      )
      if episode.submission is not None and loop.reward is None:
        await loop.step(tools.Done())  # our budget ended it: grade it all the same
  except (ConnectionError, TimeoutError) as e:
    stop = trace.StopReason.INFRA_ERROR
    return harness.Episode((), stop, None, meta={'failure': repr(e)})
  if episode.submission is None or loop.reward is None:
    return episode
  return dataclasses.replace(
      episode,
      grade=grading.Grade((loop.reward >= 1,)),
      meta={**episode.meta, 'reward': str(loop.reward)},
  )
