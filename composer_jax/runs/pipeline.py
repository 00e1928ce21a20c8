"""The stages of a run in one work directory: data, next-token phases, RL.

Every stage looks for its own checkpoint first, so calling the stages again on
the same directory continues where they stopped, whatever stopped them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import pathlib
import shutil
import time
from typing import Any
import uuid

import jax
import jax.numpy as jnp
import numpy as np
import optax

from composer_jax import atomic
from composer_jax import config
from composer_jax import config_text
from composer_jax import trace
from composer_jax.data import sources
from composer_jax.fleet import history
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.learner import batch as batch_lib
from composer_jax.learner import loss_inputs
from composer_jax.learner import processes
from composer_jax.learner import step
from composer_jax.runs import base_model
from composer_jax.runs import evaluate
from composer_jax.runs import fleet as fleet_lib
from composer_jax.runs import manifest
from composer_jax.runs import midtrain
from composer_jax.runs import player
from composer_jax.runs import preflight
from composer_jax.runs import rl
from composer_jax.runs import rollouts
from composer_jax.runs import run_digest
from composer_jax.runs import stored_model
from composer_jax.runs import writer as writer_lib
from composer_jax.weights import checkpoint
from composer_jax.weights import publish


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
  """What the stages share.

  Attributes:
    cfg: the resolved experiment.
    run_id: id that no other run has.
    workdir: directory of the run.
    mesh: the trainer's.
    decoder: device of the decode engine.
    model: what a store says of it.
    texts: sources of text, by name.
    writer: writer of metrics.
    stop: True once the user has asked to stop.
    fleet: where tasks are played; None for here.
  """

  cfg: config.Experiment
  run_id: str
  workdir: pathlib.Path
  mesh: jax.sharding.Mesh
  decoder: jax.Device
  model: stored_model.StoredModel
  texts: Mapping[str, sources.Text]
  writer: writer_lib.Writer
  stop: Callable[[], bool]
  fleet: rollouts.Elsewhere | None = None

  @functools.cached_property
  def renderer(self) -> Any:
    """Translates tasks; ValueError for a tokenizer of other texts."""
    return base_model.renderer(self.cfg, self.model)

  @property
  def store(self) -> str:
    return fleet_lib.weights(self.workdir)


def open_run(
    cfg: config.Experiment,
    workdir: pathlib.Path,
    *,
    run_id: str,
    mesh: jax.sharding.Mesh,
    decoder: jax.Device,
    stop: Callable[[], bool],
) -> Run:
  """Opens the sources of text, the tokenizer and the metrics.

  Raises:
    ValueError: As `sources.open_texts`.
  """
  path = workdir / stored_model.TOKENIZER
  model = base_model.published(cfg)
  if model is not None:
    atomic.write(path, model.tokenizer)
  texts = sources.open_texts(cfg, path, model.names if model else {})
  if model is None:
    model = stored_model.trained_here(cfg, path.read_text(encoding='utf-8'))
  steps = {
      name: _newest(workdir, name)
      for name in (*(phase.name for phase in cfg.phases), 'rl')
  }
  return Run(
      cfg=cfg,
      run_id=run_id,
      workdir=workdir,
      mesh=mesh,
      decoder=decoder,
      model=model,
      texts=texts,
      writer=(
          writer_lib.Writer(workdir, {**steps, 'eval': steps['rl']})
          if processes.first()
          else writer_lib.Silent()
      ),
      stop=stop,
  )


def steps_done(workdir: pathlib.Path) -> int:
  """RL steps in the newest finished checkpoint of a run."""
  return _newest(workdir, 'rl')


def finished(
    cfg: config.Experiment, workdir: pathlib.Path, leaves: Sequence[str]
) -> bool:
  """Says whether a run has nothing left to do.

  Args:
    cfg: The experiment, perhaps with other numbers of steps than were done.
    workdir: Directory of the run, if there is one yet.
    leaves: Files that it makes at its end.

  Raises:
    ValueError: The run was started with another config.
  """
  done = steps_done(workdir)
  if not done or done < cfg.rl.steps:
    return False
  stored = (workdir / manifest.CONFIG_FILE).read_text()
  config_text.check_resume(stored, cfg)
  records = writer_lib.read(workdir)
  measured = any((r['phase'], r['step']) == ('eval', done) for r in records)
  # Fewer steps than were done are no reason to measure those anew.
  there = all((workdir / name).exists() for name in leaves)
  return done > cfg.rl.steps or (measured and there)


def _newest(workdir: pathlib.Path, phase: str) -> int:
  """Step of a phase's newest finished checkpoint; 0 without one."""
  folder = workdir / 'checkpoints' / phase
  steps = [int(p.name) for p in folder.glob('*') if p.name.isdigit()]
  return max(steps, default=0)


def next_token_phases(run: Run) -> tuple[batch_lib.TrainState, bool]:
  """All phases before RL, in order, each from the weights of the one before.

  Returns:
    (state, whether they are complete).
  """
  cfg = run.cfg
  state = _initial(cfg, run.workdir, run.mesh)
  for phase in cfg.phases:
    state, complete = midtrain.run(
        phase,
        sources.mixed(cfg, phase, run.texts, lambda: run.renderer),
        state,
        model=cfg.model,
        mesh=run.mesh,
        heldout={name: text.heldout for name, text in run.texts.items()},
        checkpoints=run.workdir / 'checkpoints' / phase.name,
        writer=run.writer,
        stop=run.stop,
    )
    if not complete:
      return state, False
  return state, True


def _initial(
    cfg: config.Experiment, workdir: pathlib.Path, mesh: jax.sharding.Mesh
) -> batch_lib.TrainState:
  """Parameters of the base, or random ones; every phase makes an optimizer."""
  tx, phases = optax.identity(), cfg.phases
  # What the first phase restores anyway is not read.
  resumed = bool(phases) and _newest(workdir, phases[0].name) > 0
  if cfg.base and not resumed:
    return step.restart(base_model.weights(cfg, mesh), tx, mesh)
  return step.init_state(cfg.model, tx, cfg.seed, mesh)


def warm_state(
    cfg: config.Experiment, workdir: pathlib.Path, mesh: jax.sharding.Mesh
) -> batch_lib.TrainState:
  """State whose parameters RL started from, with phases before it or not."""
  if cfg.phases:
    return run_digest.restored(cfg, workdir, cfg.phases[-1].name, mesh)
  return _initial(cfg, workdir, mesh)


def warm_arrays(run: Run) -> dict[str, np.ndarray]:
  """The arrays that RL started from, as they were published."""
  state = warm_state(run.cfg, run.workdir, run.mesh)
  return rl.published_arrays(state.params)


def _cut_back(folder: pathlib.Path, steps: int) -> None:
  """Removes rollouts of steps that a kill undid, as `Writer` does metrics."""
  for path in folder.glob('[0-9]*'):
    if int(path.name) >= steps:
      shutil.rmtree(path, ignore_errors=True)


def reinforcement(
    run: Run, state: batch_lib.TrainState
) -> tuple[batch_lib.TrainState, bool]:
  """RL from the warm-started state, or from its own checkpoint.

  Args:
    run: the run.
    state: state of the warm-up; only its parameters are used.

  Returns:
    (state, whether all RL steps are done).
  """
  cfg = run.cfg
  if found := preflight.prompts(cfg, run.renderer):
    print(found)
  tx = cfg.rl_optimizer.build()
  # The policy that RL started from; a copy, because steps donate their state.
  reference = (
      jax.tree.map(jnp.copy, state.params)
      if loss_inputs.needs_reference(cfg.loss)
      else None
  )
  state = step.restart(state.params, tx, run.mesh)
  saver = checkpoint.Checkpointer(
      run.workdir / 'checkpoints' / 'rl', writes=True
  )
  ledger = ledger_lib.Ledger()
  if restored := saver.restore(state):
    _, state, extra = restored
    ledger = ledger_lib.from_json(extra['ledger'])
  _cut_back(run.workdir / 'trajectories', ledger.done)
  history.cut_back(run.workdir, ledger.done)
  stored_model.write(run.store, run.model)
  publisher = publish.Publisher(run.store, cfg.weights, uuid.uuid4().hex[:12])
  version = publisher.resume(rl.published_arrays(state.params), ledger.done)
  host = player.Player(cfg, run.store, run.renderer, device=run.decoder)
  with host:
    print('compiling the decode programs; later runs find them cached')
    host.engine.warmup()
    state, _, complete = rl.run(
        cfg,
        state,
        host,
        publisher,
        run_id=run.run_id,
        version=version,
        ledger=ledger,
        saver=saver,
        tx=tx,
        mesh=run.mesh,
        reference=reference,
        workdir=run.workdir,
        writer=run.writer,
        evaluate=lambda at, served: measure(run, host, at, served),
        stop=run.stop,
        elsewhere=run.fleet,
    )
  saver.close()
  if complete and run.fleet:
    asyncio.run(run.fleet.clear(cfg, run.run_id))
  return state, complete


def measure(run: Run, host: player.Player, at: int, version: int) -> None:
  """Evaluates a version and records it; keeps the showcase at both ends."""
  began = time.perf_counter()
  scores = evaluate.evaluate(run.cfg, host, version)
  figures = evaluate.figures(scores)
  figures['eval/invalid'] = sum(s.invalid for s in scores.values())
  figures['eval/version'] = version
  if at in (0, run.cfg.rl.steps):
    folder = showcase_folder(run.workdir, at)
    folder.mkdir(parents=True, exist_ok=True)
    episodes = evaluate.showcase(run.cfg, host, version)
    for i, trajectory in enumerate(episodes):
      (folder / f'{i}.traj').write_bytes(trace.to_bytes(trajectory))
  figures['time/eval'] = time.perf_counter() - began
  run.writer.write('eval', at, figures)


def showcase_folder(workdir: pathlib.Path, at: int) -> pathlib.Path:
  side = 'after' if at else 'before'
  return workdir / 'trajectories' / 'showcase' / side


def load_showcase(workdir: pathlib.Path, at: int) -> list[trace.Trajectory]:
  """The episodes that `measure` kept, in task order."""
  paths = showcase_folder(workdir, at).glob('*.traj')
  ordered = sorted(paths, key=lambda p: int(p.stem))
  return [trace.from_bytes(p.read_bytes()) for p in ordered]


def seen(run: Run) -> dict[str, Sequence[int]]:
  """Task indices that demonstrations and RL have drawn, from their cursors."""

  def extra(phase):
    return checkpoint.read_extra(run.workdir / 'checkpoints' / phase)

  demos = [
      extra(phase.name)['cursors']['demos']['chunk']
      for phase in run.cfg.phases
      if 'demos' in dict(phase.mix)
  ]
  ledger = ledger_lib.from_json(extra('rl')['ledger'])
  return {
      'warmup': range(max(demos, default=0)),
      'train': ledger_lib.played(ledger),
  }
