"""Digests of a finished run: what two runs must share to be the same run."""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import json
import pathlib
from typing import Any

import jax
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.learner import batch as batch_lib
from composer_jax.learner import step
from composer_jax.weights import checkpoint

# Figures that tell how fast or in how many pieces, not what was computed.
_TIMING = ('time/', 'tokens', 'weights/', 'seconds', 'recompilations')


def _sha(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()


def of_state(state: batch_lib.TrainState) -> dict[str, str]:
  """sha256 of every leaf: parameters, optimizer state, step."""
  leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(state))
  return {
      jax.tree_util.keystr(path, simple=True, separator='/'): _sha(
          np.ascontiguousarray(leaf).tobytes()
      )
      for path, leaf in leaves
  }


def of_trajectory(trajectory: trace.Trajectory) -> str:
  """sha256 of what was sampled.

  The run's id is left out, and so are version NUMBERS, which may differ after a
  resume.
  """
  which = trajectory.task_id.partition('/')[2]
  h = hashlib.sha256(f'{which} {trajectory.reward}'.encode())
  for s in trajectory.segments:
    arrays = [s.tokens, s.sampled, s.logps]
    arrays += [] if s.routing is None else [s.routing.experts]
    for a in arrays:
      h.update(np.ascontiguousarray(a).tobytes())
  return h.hexdigest()


def _metrics(path: pathlib.Path) -> str:
  rows: dict[tuple[str, int], dict[str, Any]] = {}
  for line in path.read_text().splitlines():
    record = json.loads(line)
    key = record['phase'], record['step']
    kept = {
        k: v
        for k, v in record.items()
        if not k.startswith(_TIMING) and k != 'eval/version'
    }
    rows.setdefault(key, {}).update(kept)
  return _sha(json.dumps(sorted(rows.items()), sort_keys=True).encode())


def restored(
    cfg: config.Experiment,
    workdir: pathlib.Path,
    phase: str,
    mesh: jax.sharding.Mesh,
) -> batch_lib.TrainState:
  """State of a phase's newest finished checkpoint.

  Args:
    cfg: the run's experiment.
    workdir: directory of the run.
    phase: 'rl', or the name of one before it.
    mesh: mesh to restore to.

  Raises:
    ValueError: there is none.
  """
  optimizers = {p.name: p.optimizer for p in cfg.phases}
  tx = (optimizers | {'rl': cfg.rl_optimizer})[phase].build()
  folder = workdir / 'checkpoints' / phase
  saver = checkpoint.Checkpointer(folder)
  found = saver.restore(step.abstract_state(cfg.model, tx, mesh))
  saver.close()
  if found is None:
    raise ValueError(f'{folder}: no finished checkpoint')
  return found[1]


def of_run(cfg: config.Experiment, workdir: pathlib.Path) -> Mapping[str, str]:
  """Digests of a finished run: every leaf, metric and trajectory.

  Args:
    cfg: the run's experiment.
    workdir: directory of the run.

  Raises:
    ValueError: a phase has no checkpoint.
  """
  mesh = step.make_mesh(cfg.mesh)
  out = {
      f'{phase}/{name}': digest
      for phase in (*(p.name for p in cfg.phases), 'rl')
      for name, digest in of_state(restored(cfg, workdir, phase, mesh)).items()
  }
  out['metrics'] = _metrics(workdir / 'metrics.jsonl')
  for path in sorted((workdir / 'trajectories').rglob('*.traj')):
    name = path.relative_to(workdir).as_posix()
    out[name] = of_trajectory(trace.from_bytes(path.read_bytes()))
  return out
