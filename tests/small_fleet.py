"""A queue and hosts as processes of this machine, as users start them."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

from tests import nats_server
from tests import small_run

_UP = 'python3 -m experiments.rl'  # in what `up` prints


class Fleet:
  """`experiments.fleet up` and some hosts; all are gone at its end.

  Attributes:
    url: URL of the queue.
    trainer: flags of a trainer that uses it.
  """

  def __init__(self, folder):
    self.folder = pathlib.Path(folder)
    self.folder.mkdir(parents=True, exist_ok=True)
    self._port = nats_server.free_port()
    self.url = f'nats://127.0.0.1:{self._port}'
    self.trainer = (
        f'--queue={self.url}',
        f'--queue_key={self.folder / "trainer.nk"}',
    )
    self._running = []

  def __enter__(self):
    self.broker = self.up()
    return self

  def __exit__(self, *_):
    for process in reversed(self._running):
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
    self.kill_server()

  def kill_server(self):
    """Ends the server at once; what ends `up` does not, as it is on its own."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
      os.kill(int((self.folder / 'pid').read_text()), signal.SIGKILL)

  def start(self, binary, *flags):
    """Starts a binary; its words go to a file of its own."""
    log = self.folder / f'{len(self._running)}-{binary}.log'
    with log.open('wb') as out:
      process = subprocess.Popen(
          [sys.executable, '-m', f'experiments.{binary}', *flags],
          stdout=out,
          stderr=subprocess.STDOUT,
          cwd=small_run.ROOT,
          env=small_run.environment(PYTHONUNBUFFERED='1'),
          start_new_session=True,
      )
    process.log = log
    self._running.append(process)
    return process

  def up(self):
    process = self.start(
        'fleet', 'up', f'--dir={self.folder}', f'--port={self._port}'
    )
    wait_for(process, _UP)
    return process

  def host(self, *flags):
    return self.start(
        'rollout_host',
        f'--queue={self.url}',
        f'--queue_key={self.folder / "host.nk"}',
        '--play=16',
        f'--compilation_cache={small_run.CACHE}',
        *flags,
    )

  def ask(self, command, *flags):
    """Runs a command of `experiments.fleet` to its end."""
    return small_run.finished(
        [
            *(sys.executable, '-m', 'experiments.fleet', command),
            *self.trainer,
            *flags,
        ]
    )


def wait_for(process, text, seconds=600.0):
  """Waits until a process has said something."""
  end = time.monotonic() + seconds
  while text not in process.log.read_text():
    if process.poll() is not None or time.monotonic() > end:
      raise AssertionError(process.log.read_text())
    time.sleep(0.05)


def kill(process):
  """Ends a process and its children at once; it must not have ended before."""
  if process.poll() is not None:
    raise AssertionError(process.log.read_text())
  os.killpg(process.pid, signal.SIGKILL)
  process.wait()
