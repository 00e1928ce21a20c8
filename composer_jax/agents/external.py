"""Episodes in somebody else's harness: a program, or a service.

Such a harness talks to the policy through an OpenAI-compatible endpoint, whose
gateway keeps the tokens; what it did in between is its own affair. An episode
lasts no longer than its deadline, and what was done until then is graded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import stat
import tempfile
from typing import Protocol
import urllib.request

from composer_jax import task as task_lib
from composer_jax import trace
from composer_jax.agents import harness

_KILL_SECONDS = 5.0
_POST_SECONDS = 30.0
_CLOSE_SECONDS = 30.0  # of the endpoint, to hand over what it kept


@dataclasses.dataclass(frozen=True)
class Access:
  """How one rollout reaches the policy; the key is its right to do so."""

  base_url: str
  api_key: str
  model: str


@dataclasses.dataclass(frozen=True)
class Finish:
  """What a service said at the end.

  Attributes:
    submission: path -> text; None if it failed, or has graded its work itself.
    status: free text.
    reward: its own grade; rewards find it in the episode's meta.
  """

  submission: Mapping[str, str] | None
  status: str = ''
  reward: float | None = None


class Gateway(Protocol):
  """The policy's endpoint, as harnesses see it."""

  async def open(self, rollout_id: str, seed: int) -> Access:
    """Admits a rollout."""

  async def finished(self, rollout_id: str) -> Finish:
    """Waits until the service declares the rollout finished."""

  async def close(self, rollout_id: str) -> tuple[trace.TokenTrace, ...]:
    """Admits no further call; returns the windows that were sampled.

    Raises:
      ConnectionError: a call was lost, so they are not all of them.
    """


def _collect(root: pathlib.Path, limit_bytes: int) -> dict[str, str]:
  """Texts of the regular files below a directory that fit, together.

  No link is followed.
  """
  out = {}
  for folder, _, names in os.walk(root):  # which follows no link either
    for name in names:
      path = pathlib.Path(folder, name)
      flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
      try:
        with open(os.open(path, flags), 'rb') as f:
          if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
            continue
          data = f.read(limit_bytes + 1)
        if len(data) <= limit_bytes:
          key = os.fsencode(path.relative_to(root)).decode()
          out[key] = data.decode()
          limit_bytes -= len(data)
      except (OSError, UnicodeDecodeError):
        continue  # a link, a device, not readable, no text
  return out


async def _episode(
    gateway: Gateway, rollout_id: str, submission, stop, meta
) -> harness.Episode:
  """Adds what the gateway has kept; incomplete means infrastructure failed."""
  segments: tuple[trace.TokenTrace, ...] = ()
  try:
    async with asyncio.timeout(_CLOSE_SECONDS):
      segments = await gateway.close(rollout_id)
  except (ConnectionError, TimeoutError) as e:
    stop, meta = trace.StopReason.INFRA_ERROR, {**meta, 'failure': repr(e)}
  if stop is trace.StopReason.INFRA_ERROR:
    submission = None
  elif not segments:  # it never asked the policy
    stop = trace.StopReason.POLICY_FAILURE
  return harness.Episode(segments, stop, submission, meta=meta)


@dataclasses.dataclass(frozen=True)
class SubprocessHarness:
  """Runs a program in a directory with the task's files.

  It finds the policy as OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and
  what to do in TASK_INSTRUCTION. It runs as the user of this process: what it
  executes for the model, it has to isolate itself.

  Attributes:
    command: program and arguments.
    seconds: until it and all that it started are killed.
    kept_bytes: bytes kept of the files at the end, together.
  """

  command: tuple[str, ...]
  seconds: float = 600.0
  kept_bytes: int = 4 << 20

  async def run(
      self, task: task_lib.Task, rollout_id: str, gateway: Gateway, seed: int
  ) -> harness.Episode:
    """Plays one episode; never raises for what the program does."""
    access = await gateway.open(rollout_id, seed)
    with tempfile.TemporaryDirectory(
        prefix='episode-', ignore_cleanup_errors=True
    ) as folder:
      root = pathlib.Path(folder)
      for path, text in task.files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
      stop, meta = await self._play(root, access, task)
      submission = _collect(root, self.kept_bytes)
    return await _episode(gateway, rollout_id, submission, stop, meta)

  async def _play(self, root, access: Access, task: task_lib.Task):
    environment = {
        'PATH': os.defpath,
        'HOME': str(root),
        'OPENAI_BASE_URL': access.base_url,
        'OPENAI_API_KEY': access.api_key,
        'OPENAI_MODEL': access.model,
        'TASK_INSTRUCTION': task.instruction,
    }
    try:
      process = await asyncio.create_subprocess_exec(
          *self.command,
          cwd=root,
          env=environment,
          stdin=asyncio.subprocess.DEVNULL,
          stdout=asyncio.subprocess.DEVNULL,
          stderr=asyncio.subprocess.DEVNULL,
          start_new_session=True,
      )
    except OSError as e:
      return trace.StopReason.INFRA_ERROR, {'failure': repr(e)}
    stop = trace.StopReason.FINISHED
    try:
      async with asyncio.timeout(self.seconds):
        await process.wait()
    except TimeoutError:
      stop = trace.StopReason.TIMEOUT
    finally:  # also when we are cancelled, and for what it left running
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      async with asyncio.timeout(_KILL_SECONDS):
        await process.wait()
    return stop, {'code': str(process.returncode)}


@dataclasses.dataclass(frozen=True)
class ExternalHarness:
  """Hands a task to a service and waits for its answer.

  The service gets one POST with rollout_id, instruction, files, base_url,
  api_key, model and seconds, works, and posts its files to the endpoint's
  /rollouts/{id}/finish.

  Attributes:
    url: where tasks are posted.
    seconds: until the rollout is over, whatever the service does.
  """

  url: str
  seconds: float = 600.0

  async def run(
      self, task: task_lib.Task, rollout_id: str, gateway: Gateway, seed: int
  ) -> harness.Episode:
    """Plays one episode; never raises for what the service does."""
    access = await gateway.open(rollout_id, seed)
    body = {
        'rollout_id': rollout_id,
        'instruction': task.instruction,
        'files': dict(task.files),
        'seconds': self.seconds,
        **vars(access),
    }
    finish, stop = Finish(None), trace.StopReason.FINISHED
    meta: dict[str, str] = {}
    try:
      async with asyncio.timeout(self.seconds):
        await asyncio.to_thread(self._post, json.dumps(body).encode())
        finish = await gateway.finished(rollout_id)
      meta = {'status': finish.status}
      if finish.reward is not None:
        meta['reward'] = str(finish.reward)
      elif finish.submission is None:
        stop = trace.StopReason.POLICY_FAILURE
    except TimeoutError:
      stop = trace.StopReason.TIMEOUT
    except OSError as e:  # it could not even be asked
      stop, meta = trace.StopReason.INFRA_ERROR, {'failure': repr(e)}
    submission = finish.submission
    if submission is None and stop is not trace.StopReason.INFRA_ERROR:
      submission = dict(task.files)  # nothing was done
    return await _episode(gateway, rollout_id, submission, stop, meta)

  def _post(self, body: bytes) -> None:
    request = urllib.request.Request(
        self.url, body, {'Content-Type': 'application/json'}
    )
    seconds = min(self.seconds, _POST_SECONDS)
    with urllib.request.urlopen(request, timeout=seconds):
      pass
