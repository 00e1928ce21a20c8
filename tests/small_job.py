"""Jobs of several processes on this machine, two devices each."""

import json
import socket
import subprocess
import time

from tests import small_run

# Every process but the first compiles its programs anew: jax keeps none of
# theirs.
_QUICK = {'XLA_FLAGS': '--xla_backend_optimization_level=0'}
EDITS = ('mesh.data=2', 'mesh.fsdp=2', 'midtrain.steps=2', 'warmup.steps=24')


def free_port():
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def start(workdir, *edits, processes=2, flags=(), binary='midtrain'):
  """Starts all processes of a job."""
  where = f'--coordinator=127.0.0.1:{free_port()}'
  common = (where, f'--processes={processes}', '--heartbeat_seconds=10')
  return [
      launch(
          [
              *small_run.command(binary, workdir, *EDITS, *edits),
              *common,
              f'--process={i}',
              *flags,
          ]
      )
      for i in range(processes)
  ]


def launch(command, **extra):
  """Starts one process."""
  return subprocess.Popen(
      command,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=small_run.ROOT,
      env=small_run.environment(**_QUICK, **extra),
  )


def ended(job, timeout=200):
  """Waits for all processes; returns (exit code, output, errors) of each."""
  found = [p.communicate(timeout=timeout) for p in job]
  return [(p.returncode, *texts) for p, texts in zip(job, found, strict=True)]


def records(workdir, phase='warmup'):
  """Metrics of a phase by step; the latest if there are two."""
  path = workdir / 'metrics.jsonl'
  if not path.exists():
    return {}
  lines = path.read_text().splitlines(keepends=True)
  found = [json.loads(x) for x in lines if x.endswith('\n')]
  return {r['step']: r for r in found if r['phase'] == phase}


def wait_for(workdir, step, job, seconds=200):
  """Waits until the warm-up has done a step."""
  end = time.monotonic() + seconds
  while step not in records(workdir):
    if time.monotonic() > end or any(p.poll() is not None for p in job):
      for p in job:
        p.kill()
      raise AssertionError([p.communicate()[1][-2000:] for p in job])
    time.sleep(0.02)
