"""Jobs of several processes on this machine, two devices each."""

import json
import socket
import subprocess
import time

import jax
import numpy as np
from tests import small_run

from composer_jax.learner import step as step_lib
from composer_jax.runs import pipeline
from composer_jax.runs import run_digest

EDITS = (
    'mesh.data=2',
    'mesh.fsdp=2',
    'phases.midtrain.steps=2',
    'phases.warmup.steps=4',
)
STEPS = 2 + 4  # of both phases
GONE = 'another process of the job is gone'
_FIGURES = ('loss', 'grad_norm')


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
      env=small_run.environment(**extra),
  )


def ended(job, timeout=600):
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


def wait_for(workdir, step, job, seconds=600):
  """Waits until the warm-up has done a step."""
  end = time.monotonic() + seconds
  while step not in records(workdir):
    if time.monotonic() > end or any(p.poll() is not None for p in job):
      for p in job:
        p.kill()
      raise AssertionError([p.communicate()[1][-2000:] for p in job])
    time.sleep(0.02)


def figures(workdir):
  """Step of the warm-up -> loss and norm, without the one before any step."""
  return {
      at: [r[f] for f in _FIGURES]
      for at, r in records(workdir).items()
      if 'loss' in r
  }


def one_process(workdir, cfg):
  """Runs, or goes on with, the phases in this process and its four devices."""
  run = pipeline.open_run(
      cfg,
      workdir,
      run_id='job',
      mesh=step_lib.make_mesh(cfg.mesh),
      decoder=jax.devices()[0],
      stop=lambda: False,
  )
  with run.writer:
    state, complete = pipeline.next_token_phases(run)
  assert complete
  return state


def assert_close(state, workdir, cfg):
  """Compares parameters with those of a finished warm-up."""
  got = run_digest.restored(
      cfg, workdir, 'warmup', step_lib.make_mesh(cfg.mesh)
  )
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5),
      jax.device_get(state.params),
      jax.device_get(got.params),
  )
