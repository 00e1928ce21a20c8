"""Plays environments over a WebSocket, as OpenEnv speaks it.

Frames are JSON objects {"type": "reset" | "step" | "state" | "close", "data":
{...}} and are answered by {"type": "observation" | "state" | "error", "data":
{...}}, one session per connection to /ws. An observation comes with `reward`
and `done`. The other side is `openenv_server`, or anybody's.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import json
from typing import Any

from composer_jax import config
from composer_jax import task as task_lib
from composer_jax import trace
from composer_jax.agents import harness
from composer_jax.agents import tools
from composer_jax.sandbox import grading
from websockets import exceptions
from websockets.asyncio import client as ws_client

FRAME_BYTES = 1 << 20  # of the largest frame; a larger one ends the session
CLOSE_SECONDS = 5.0


class FrameError(ValueError):
  """A frame that cannot be obeyed; (code, message) goes back to its sender."""


def read_frame(frame: str | bytes) -> tuple[str, Mapping[str, Any]]:
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


class Client:
  """One session with an environment; a context.

  Whatever the other side does is a ConnectionError or a TimeoutError, both
  failures of infrastructure, except that it does not like an action.
  """

  def __init__(self, url: str, seconds: float = 60.0):
    """Describes the session.

    Args:
      url: URL of the environment, such as ws://host:8000/ws.
      seconds: until a request must have been answered.
    """
    self._url, self._seconds = url, seconds
    self._socket: ws_client.ClientConnection | None = None

  async def __aenter__(self) -> Client:
    try:
      self._socket = await ws_client.connect(
          self._url,
          max_size=FRAME_BYTES,
          open_timeout=self._seconds,
          close_timeout=CLOSE_SECONDS,
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
      found, data = read_frame(frame)
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
  """Tools of a remote environment; a `tool_loop.Loop`.

  Attributes:
    counts: calls of the episode by kind, and those that failed.
    log: calls of the episode with their observations.
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
          'step', tool=tools.name_of(call), **vars(call)
      )
    except FrameError as e:
      self.counts['failed_calls'] += 1
      return tools.legible(e.args[1]), False
    reward, seen = data.get('reward'), data.get('observation')
    if isinstance(reward, int | float):
      self.reward = float(reward)
    return _text(seen), data.get('done') is True

  async def execute(
      self,
      task: task_lib.Task,
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
  return tools.legible(text if isinstance(text, str) else json.dumps(seen))


def _task(data: Mapping[str, Any]) -> task_lib.Task:
  """What a reset shows, as a task."""
  seen = data.get('observation')
  facts = seen if isinstance(seen, dict) else {}
  files = facts.get('files')
  files = files if isinstance(files, dict) else {}
  files = {k: v for k, v in files.items() if isinstance(v, str)}
  return task_lib.Task(str(facts.get('id', 'remote')), _text(seen), files, ())


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
    url: URL of the environment.
    policy: samples the turns.
    renderer: between tokens and calls.
    cfg: budgets.
    seed: seed of the episode.
    index: number of the task, where the environment lets us choose.
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
        await loop.step(
            tools.Done()
        )  # our budget ended it: grade it all the same
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
