"""A whole run in seconds: the shipped experiment, made very small."""

import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
CACHE = pathlib.Path(__file__).parent / '.cache'

SMALL = (
    'model.layers=2',
    'model.embed=32',
    'model.q_heads=2',
    'model.kv_heads=1',
    'model.head_dim=16',
    'model.experts=4',
    'model.moe_ffn=32',
    'corpus.max_bytes=150000',
    'midtrain.steps=2',
    'midtrain.rows_per_step=4',
    'midtrain.tokens_per_row=128',
    'warmup.steps=40',
    'warmup.rows_per_step=24',
    'warmup.demo_fraction=0.9',
    'rollout.slots=32',
    'rollout.prefill_rows=4',
    'rl.steps=4',
    'rl.groups_per_step=2',
    'rl.rollouts_per_group=8',
    'rl.rows_per_step=8',
    'rl.workers=32',
    'rl.checkpoint_every_steps=1',
    'rl.eval_every_steps=2',
    'evaluation.tasks=8',
    'evaluation.showcase=2',
)


def command(binary, workdir, *edits, config='tiny'):
  return [
      sys.executable,
      '-m',
      f'experiments.{binary}',
      f'--workdir={workdir}',
      f'--config={config}',
      f'--compilation_cache={CACHE}',
      *(f'--set={e}' for e in (*SMALL, *edits)),
  ]


def environment(**extra):
  return {**os.environ, 'PYTHONPATH': str(ROOT), **extra}


def run(binary, workdir, *edits, config='tiny', cwd=None):
  """Runs a binary to its end; returns the finished process."""
  return subprocess.run(
      command(binary, workdir, *edits, config=config),
      capture_output=True,
      text=True,
      timeout=600,
      cwd=cwd or ROOT,
      env=environment(),
      check=False,
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
