"""Runs the binaries on `tests.small_config`, to their end or to a kill."""

import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
CACHE = pathlib.Path(__file__).parent / '.cache'


def command(binary, workdir, *edits, config='tests.small_config', cache=CACHE):
  """Arguments that start a binary; cache='' compiles every program anew."""
  return [
      sys.executable,
      '-m',
      f'experiments.{binary}',
      f'--workdir={workdir}',
      f'--config={config}',
      f'--compilation_cache={cache}',
      *(f'--set={e}' for e in edits),
  ]


def environment(**extra):
  return {**os.environ, 'PYTHONPATH': str(ROOT), **extra}


def run(binary, workdir, *edits, **kwargs):
  """Runs a binary to its end; returns the finished process."""
  return finished(command(binary, workdir, *edits, **kwargs))


def finished(arguments, **extra):
  """Runs a command, with more environment, to its end."""
  return subprocess.run(
      arguments,
      capture_output=True,
      text=True,
      timeout=600,
      cwd=ROOT,
      env=environment(**extra),
      check=False,
  )


def replay(workdir):
  """Replays a run from its ledger."""
  cache = f'--compilation_cache={CACHE}'
  return finished(
      [*command('replay', workdir)[:3], f'--workdir={workdir}', cache]
  )


def kill_after(seconds, binary, workdir, *edits):
  """Starts a binary and kills it -9; returns True if it was still running."""
  with subprocess.Popen(
      command(binary, workdir, *edits),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      cwd=ROOT,
      env=environment(),
      start_new_session=True,
  ) as process:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
      time.sleep(0.02)
    running = process.poll() is None
    if running:
      os.killpg(process.pid, signal.SIGKILL)
  return running
