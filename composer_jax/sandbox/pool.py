"""Sandboxes for code a model wrote.

A `Pool` keeps warm sandboxes; a `Session` borrows one at its first command and
gives it back wiped, so that thousands of episodes share a few of them.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
import contextlib
import json

from composer_jax.sandbox import box

SandboxError = box.SandboxError
SandboxDied = box.SandboxDied
describe = box.describe


def _bytes(content: str | bytes) -> bytes:
  """Content of a file; text that has no encoding becomes a file that has none."""
  if isinstance(content, str):
    return content.encode(errors='surrogatepass')
  return content


class Session:
  """One episode's view of a sandbox, borrowed at the first command.

  Attributes:
    died: the sandbox ended, or fell silent, while it worked for this session.
  """

  def __init__(self, pool: Pool):
    self.died = False
    self._pool = pool
    self._box: box.Box | None = None

  async def open(self) -> box.Box:
    """Waits for a sandbox, which the first command would do otherwise."""
    if self._box is None:
      self._box = await self._pool.take()
    return self._box

  async def _request(self, body, *, cpu, wall, capacity=1 << 16) -> box.Result:
    mine = await self.open()
    try:
      return await mine.request(
          {**body, 'cpu': cpu}, wall=wall, capacity=capacity
      )
    except box.SandboxDied:
      self.died = True
      raise

  async def exec(
      self,
      command: str,
      *,
      cpu_seconds: float = 10.0,
      wall_seconds: float = 20.0,
      output_bytes: int = 1 << 16,
  ) -> box.Result:
    """Runs a shell command in /box; whatever it leaves running is killed."""
    return await self._request(
        {'op': 'shell', 'command': command},
        cpu=cpu_seconds,
        wall=wall_seconds,
        capacity=output_bytes,
    )

  async def python(
      self,
      source: str,
      *,
      cpu_seconds: float = 10.0,
      wall_seconds: float = 20.0,
      output_bytes: int = 1 << 16,
  ) -> box.Result:
    """Runs a python program in a fork of the runner: about a millisecond."""
    return await self._request(
        {'op': 'python', 'source': source},
        cpu=cpu_seconds,
        wall=wall_seconds,
        capacity=output_bytes,
    )

  async def call(
      self,
      source: str,
      entry: str,
      inputs: Sequence[str],
      *,
      cpu_seconds: float,
      wall_seconds: float,
      output_bytes: int = 1 << 16,
  ) -> box.Result:
    """Calls a function; see `child` for the lines of the output.

    Args:
      source: defines the function.
      entry: its name.
      inputs: JSON list of arguments for each call.
      cpu_seconds: time of all the calls together.
      wall_seconds: time of all the calls together.
      output_bytes: bytes kept of the output.
    """
    body = {'op': 'call', 'source': source, 'entry': entry}
    return await self._request(
        {**body, 'inputs': list(inputs)},
        cpu=cpu_seconds,
        wall=wall_seconds,
        capacity=output_bytes,
    )

  async def put(self, files: Mapping[str, str | bytes]) -> box.Result:
    """Writes files under /box; not `ok` if the disk is full, say."""
    encoded = {
        path: base64.b64encode(_bytes(c)).decode() for path, c in files.items()
    }
    return await self._request(
        {'op': 'put', 'files': encoded}, cpu=5.0, wall=20.0
    )

  async def get(
      self, paths: Iterable[str], limit_bytes: int = 1 << 16
  ) -> dict[str, bytes]:
    """Reads regular files of /box; links, devices, big files are left out."""
    result = await self._request(
        {'op': 'get', 'paths': list(paths), 'limit': limit_bytes},
        cpu=5.0,
        wall=20.0,
        capacity=8 * limit_bytes,
    )
    if not result.ok or result.dropped:
      return {}
    files = json.loads(result.output)
    return {path: base64.b64decode(c) for path, c in files.items()}

  async def snapshot(self, limit_bytes: int = 4 << 20) -> bytes | None:
    """Everything under /box, for `restore`; None if it cannot be taken.

    The policy wrote it: it may be larger than the limit or unreadable, and
    nothing but another sandbox may unpack it.
    """
    result = await self._request(
        {'op': 'snapshot'}, cpu=5.0, wall=20.0, capacity=limit_bytes
    )
    return result.output if result.ok and not result.dropped else None

  async def restore(self, snapshot: bytes) -> box.Result:
    """Adds what a snapshot holds to /box; in a new session, that is a fork."""
    content = base64.b64encode(snapshot).decode()
    return await self._request(
        {'op': 'restore', 'content': content}, cpu=5.0, wall=20.0
    )

  async def reset(self) -> bool:
    """Wipes every writable directory; False if it could not be verified."""
    if self._box is None:
      return True
    if not self._box.clean:
      await self._request({'op': 'reset'}, cpu=5.0, wall=20.0)
    return self._box.clean

  async def release(self) -> None:
    """Gives the sandbox back: wiped, or closed if that cannot be verified."""
    if self._box is None:
      return
    clean = False
    try:
      with contextlib.suppress(box.SandboxError):
        clean = self._box.alive and await self.reset()
    finally:
      mine, self._box = self._box, None
      await self._pool.give(mine, clean)


class Pool:
  """A number of sandboxes, at most `size`, kept warm between sessions.

  A session that never runs anything costs nothing, so there may be many more
  of them than sandboxes; one that needs a sandbox waits for a free one.
  """

  def __init__(
      self,
      size: int,
      caps: box.Caps | None = None,
      level: box.Level | None = None,
  ):
    """Sets the size.

    Args:
      size: sandboxes at one time.
      caps: bounds of each.
      level: isolation to use; None for the best that this machine has.
    """
    if size < 1:
      raise ValueError(f'Pool.size={size}: must be at least 1')
    self._caps = caps or box.Caps()
    self._idle: list[box.Box] = []
    self._free = asyncio.Semaphore(size)
    self._size = size
    self._level = level
    self._open = True

  async def __aenter__(self) -> Pool:
    if self._level is None:
      self._level = await asyncio.to_thread(box.describe)
    if self._level.name == 'none':
      raise box.SandboxError(
          f'no isolation on this machine: {self._level.reason}'
      )
    sessions = [Session(self) for _ in range(self._size)]
    await asyncio.gather(*(s.python('') for s in sessions))  # starts them
    await asyncio.gather(*(s.release() for s in sessions))
    return self

  async def __aexit__(self, *unused) -> None:
    self._open = False
    boxes, self._idle = self._idle, []
    await asyncio.gather(*(b.close() for b in boxes))

  @contextlib.asynccontextmanager
  async def session(self) -> AsyncGenerator[Session]:
    session = Session(self)
    try:
      yield session
    finally:
      await session.release()

  async def take(self) -> box.Box:
    """Waits for a sandbox; starts one if none is idle."""
    await self._free.acquire()
    try:
      while self._idle:
        warm = self._idle.pop()
        if warm.alive and warm.running:
          return warm
        await warm.close()
      return box.Box(self._caps, self._level)
    except OSError as e:
      self._free.release()
      raise box.SandboxError(f'cannot start a sandbox: {e}') from e
    except BaseException:
      self._free.release()
      raise

  async def give(self, used: box.Box, clean: bool) -> None:
    """Takes a sandbox back."""
    self._free.release()
    if clean and self._open:
      self._idle.append(used)
    else:
      await used.close()
