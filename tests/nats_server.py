"""A real NATS server on this machine, which can be killed."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

PROGRAM = pathlib.Path(sys.executable).with_name('nats-server')


def free_port():
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


class Server:
  """A server with JetStream in a folder; `kill` and `start` at any time."""

  def __init__(self, folder):
    self.folder = pathlib.Path(folder)
    self.port = free_port()
    self.url = f'nats://127.0.0.1:{self.port}'
    self.start()

  def start(self):
    config = self.folder / 'server.conf'
    config.write_text(
        f'listen: 127.0.0.1:{self.port}\n'
        f'log_file: "{self.folder}/log"\n'
        f'jetstream {{ store_dir: "{self.folder}", sync_interval: always }}\n'
    )
    self._process = subprocess.Popen([PROGRAM, '-c', config])
    end = time.monotonic() + 120
    while time.monotonic() < end:
      try:
        socket.create_connection(('127.0.0.1', self.port), 1).close()
        return
      except OSError:
        time.sleep(0.02)
    raise TimeoutError((self.folder / 'log').read_text())

  def kill(self):
    os.kill(self._process.pid, signal.SIGKILL)
    self._process.wait()
