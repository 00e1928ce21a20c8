"""Offers our tasks to whoever speaks OpenEnv; `openenv` has the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
import contextlib
import http
import json
from typing import Any

from composer_jax import config
from composer_jax import task as task_lib
from composer_jax.agents import openenv
from composer_jax.agents import tool_loop
from composer_jax.agents import tools
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool as pool_lib
from websockets import exceptions
from websockets.asyncio import server as ws_server


def observation(
    text: str, reward: float | None, done: bool, **more: Any
) -> dict[str, Any]:
  data = {'observation': {'text': text, **more}, 'reward': reward, 'done': done}
  return {'type': 'observation', 'data': data}


class _Session:
  """One connection to the server: a task, played by whoever is there."""

  def __init__(self, server: Server, session: pool_lib.Session):
    self._server = server
    self._session = session
    self._task: task_lib.Task | None = None
    self._steps, self._done = 0, False

  async def answer(self, frame: str | bytes) -> dict[str, Any] | None:
    """The reply to a frame; None to end the connection."""
    try:
      kind, data = openenv.read_frame(frame)
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
      raise openenv.FrameError('UNKNOWN_TYPE', f'no such type: {kind[:80]}')
    except openenv.FrameError as e:
      code, message = e.args
    except pool_lib.SandboxError as e:
      code, message = 'EXECUTION_ERROR', str(e)
    return {'type': 'error', 'data': {'message': message, 'code': code}}

  async def _reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
    index = data.get('index', self._server.next_index)
    if type(index) is not int or index < 0:
      raise openenv.FrameError(
          'VALIDATION_ERROR', f'index={index!r}: want 0, 1, ...'
      )
    try:
      task = self._server.source.task(index, self._server.split)
    except IndexError as e:
      raise openenv.FrameError('VALIDATION_ERROR', str(e)) from e
    self._server.next_index = index + 1
    await self._session.release()  # nothing of the episode before is left
    self._task, self._steps, self._done = task, 0, False
    self._files: Mapping[str, str] = dict(task.files)
    self._loop = tool_loop.ToolLoop(self._session, self._server.cfg)
    return observation(
        task.instruction, None, False, id=task.id, files=dict(task.files)
    )

  async def _step(self, data: Mapping[str, Any]) -> dict[str, Any]:
    task = self._task
    if task is None or self._done:
      raise openenv.FrameError(
          'SESSION_ERROR', 'no episode is running; send reset'
      )
    self._steps += 1
    try:
      arguments = dict(data)
      call = tools.call_of(str(arguments.pop('tool', None)), arguments)
      self._files, text, done = await self._loop.execute(
          task, self._files, [call]
      )
    except tools.ParseError as e:  # the policy's mistake, which costs a step
      text, done = str(e), False
    if not done and self._steps < self._server.cfg.max_turns:
      return observation(text, None, False)
    self._done = True
    grade = await self._server.grader(task, self._files)
    if not grade.valid:  # no verdict is no reward, and no zero either
      raise openenv.FrameError('EXECUTION_ERROR', grade.reason)
    return observation(text, float(grade.solved), True)


class Server:
  """Offers the tasks of a source.

  Hidden tests stay here: a client sees what a policy sees.

  Attributes:
    source: source of the tasks.
    split: split of the source that is offered.
    grader: judge of what was handed in; with sandboxes of its own.
    cfg: `max_turns`, `tool_seconds` and `tool_output_bytes` bound an episode.
    next_index: task that the next reset gets, unless it names one.
  """

  def __init__(
      self,
      source: task_lib.TaskSource,
      split: str,
      pool: pool_lib.Pool,
      grader: grading.Grader,
      cfg: config.HarnessConfig,
      idle_seconds: float = 600.0,
  ):
    """Describes the server.

    Args:
      source: source of the tasks.
      split: split of the source.
      pool: sandboxes for tools.
      grader: judge of submissions.
      cfg: budgets.
      idle_seconds: time without a frame after which a session is over.
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
        max_size=openenv.FRAME_BYTES,
        process_request=only_ws,
        close_timeout=openenv.CLOSE_SECONDS,
    ) as server:
      address = next(iter(server.sockets)).getsockname()
      yield f'ws://{address[0]}:{address[1]}/ws'
