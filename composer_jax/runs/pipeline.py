"""The stages of a run in one work directory: data, next-token phases, RL.

Every stage looks for its own checkpoint first, so calling the stages again on
the same directory continues where they stopped, whatever stopped them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import json
import pathlib

import time
from typing import Any
import uuid

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from composer_jax import config
from composer_jax import trace
from composer_jax.agents import renderer as renderer_lib
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.learner import batch as batch_lib
from composer_jax.learner import corpus
from composer_jax.learner import packing
from composer_jax.learner import processes
from composer_jax.learner import step
from composer_jax.runs import evaluate
from composer_jax.runs import host as host_lib
from composer_jax.runs import midtrain
from composer_jax.runs import offline
from composer_jax.runs import plan
from composer_jax.runs import stored_model
from composer_jax.runs import writer as writer_lib
from composer_jax.weights import checkpoint
from composer_jax.weights import publish
from kernels_triton import contract

_TOKENIZER_TASKS = 4000  # rendered tasks the tokenizer is fitted on


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
  """What the stages share.

  Attributes:
    cfg: the resolved experiment.
    workdir: of the run.
    mesh: the trainer's.
    decoder: device of the decode engine.
    renderer: between tasks and tokens.
    train: corpus to learn from.
    heldout: corpus to measure on.
    writer: of metrics.
    stop: True once the user has asked to stop.
  """

  cfg: config.Experiment
  workdir: pathlib.Path
  mesh: jax.sharding.Mesh
  decoder: jax.Device
  renderer: renderer_lib.CompactRenderer
  train: corpus.Tokens
  heldout: corpus.Tokens
  writer: writer_lib.Writer
  stop: Callable[[], bool]

  @property
  def store(self) -> str:
    return f'file://{(self.workdir / "weights").resolve()}/'


def _tokenizer(
    cfg: config.Experiment, code: corpus.Corpus, path: pathlib.Path
) -> tokenizers.Tokenizer:
  """The run's tokenizer: read, or fitted to code and tasks and written."""
  if path.exists():
    return tokenizers.Tokenizer.from_file(str(path))

  def texts() -> Iterator[str]:
    for document in code.train:
      yield document.text
    for i in range(_TOKENIZER_TASKS):
      task = cfg.tasks.task(i, 'warmup')
      yield '\n'.join((*task.files.values(), task.instruction))

  fitted = renderer_lib.train_tokenizer(texts(), cfg.model.vocab)
  part = path.with_suffix('.part')
  fitted.save(str(part))
  part.replace(path)
  return fitted


def open_run(
    cfg: config.Experiment,
    workdir: pathlib.Path,
    *,
    mesh: jax.sharding.Mesh,
    decoder: jax.Device,
    stop: Callable[[], bool],
) -> Run:
  """Reads the corpus, fits or reads the tokenizer, opens the metrics.

  Raises:
    ValueError: no corpus, a loss that returns a wrong shape, or as
      `plan.check`.
  """
  step.check_loss(cfg.loss)
  plan.check(cfg)
  code = corpus.load(cfg.corpus)
  tokenizer = _tokenizer(cfg, code, workdir / 'tokenizer.json')
  renderer = renderer_lib.CompactRenderer(tokenizer)
  start = tokenizer.token_to_id(renderer_lib.BOS)
  steps = {
      phase: _newest(workdir, phase) for phase in ('midtrain', 'warmup', 'rl')
  }
  return Run(
      cfg=cfg,
      workdir=workdir,
      mesh=mesh,
      decoder=decoder,
      renderer=renderer,
      train=corpus.encode(code.train, tokenizer, start=start),
      heldout=corpus.encode(code.heldout, tokenizer, start=start),
      writer=(
          writer_lib.Writer(workdir, {**steps, 'eval': steps['rl']})
          if processes.first()
          else writer_lib.Silent()
      ),
      stop=stop,
  )


def _newest(workdir: pathlib.Path, phase: str) -> int:
  """Step of a phase's newest finished checkpoint; 0 without one."""
  folder = workdir / 'checkpoints' / phase
  steps = [int(p.name) for p in folder.glob('*') if p.name.isdigit()]
  return max(steps, default=0)


def _sources(run: Run) -> dict[str, midtrain.Source]:
  """Phase -> its documents: code, then demonstrations mixed with code."""
  cfg = run.cfg
  demo_rows = round(cfg.warmup.rows_per_step * cfg.warmup.demo_fraction)

  def shape(phase: config.PhaseConfig, rows: int) -> packing.Shape:
    return packing.Shape(rows, phase.tokens_per_row, contract.KEY_BLOCK)

  def code(phase: config.PhaseConfig, rows: int) -> midtrain.Source:
    stream = corpus.Stream(run.train, shape(phase, rows), cfg.seed)
    return midtrain.Code(stream)

  demos = midtrain.Demos(
      cfg.tasks, run.renderer, shape(cfg.warmup, demo_rows), cfg.seed
  )
  code_rows = cfg.warmup.rows_per_step - demo_rows
  return {
      'midtrain': code(cfg.midtrain, cfg.midtrain.rows_per_step),
      'warmup': midtrain.Mixture(demos, code(cfg.warmup, code_rows)),
  }


def next_token_phases(run: Run) -> tuple[batch_lib.TrainState, bool]:
  """Mid-training on code, then the warm-up on format-only demonstrations.

  Returns:
    (state, whether both phases are complete).
  """
  cfg = run.cfg
  sources = _sources(run)
  phases = (
      ('midtrain', cfg.midtrain, cfg.midtrain_optimizer),
      ('warmup', cfg.warmup, cfg.warmup_optimizer),
  )
  state = step.init_state(
      cfg.model, cfg.midtrain_optimizer.build(), cfg.seed, run.mesh
  )
  for name, phase, optimizer in phases:
    state, complete = midtrain.run(
        name,
        phase,
        sources[name],
        state,
        model=cfg.model,
        optimizer=optimizer,
        mesh=run.mesh,
        heldout=run.heldout,
        checkpoints=run.workdir / 'checkpoints' / name,
        writer=run.writer,
        stop=run.stop,
    )
    if not complete:
      return state, False
  return state, True


def warm_arrays(run: Run) -> dict[str, np.ndarray]:
  """The arrays that RL started from, as they were published."""
  tx = run.cfg.warmup_optimizer.build()
  blank = step.abstract_state(run.cfg.model, tx, run.mesh)
  saver = checkpoint.Checkpointer(run.workdir / 'checkpoints' / 'warmup')
  _, state, _ = saver.restore(blank)
  saver.close()
  return offline.published_arrays(state.params)


def reinforcement(
    run: Run, state: batch_lib.TrainState
) -> tuple[batch_lib.TrainState, bool]:
  """RL from the warm-started state, or from its own checkpoint.

  Args:
    run: the run.
    state: of the warm-up; only its parameters are used.

  Returns:
    (state, whether all RL steps are done).
  """
  cfg = run.cfg
  tx = cfg.rl_optimizer.build()
  # The policy that RL started from; a copy, because steps donate their state.
  reference = (
      jax.tree.map(jnp.copy, state.params)
      if step.needs_reference(cfg.loss)
      else None
  )
  state = step.restart(state.params, tx, run.mesh)
  saver = checkpoint.Checkpointer(run.workdir / 'checkpoints' / 'rl')
  ledger = ledger_lib.Ledger()
  if restored := saver.restore(state):
    _, state, extra = restored
    ledger = ledger_lib.from_json(extra['ledger'])
  tokenizer = (run.workdir / 'tokenizer.json').read_text()
  stored_model.write(run.store, stored_model.trained_here(cfg, tokenizer))
  publisher = publish.Publisher(run.store, cfg.weights, uuid.uuid4().hex[:12])
  version = publisher.resume(
      offline.published_arrays(state.params), len(ledger.steps)
  )
  host = host_lib.RolloutHost(cfg, run.store, run.renderer, device=run.decoder)
  with host:
    print('compiling the decode programs; later runs find them cached')
    host.engine.warmup()
    state, _, complete = offline.run(
        cfg,
        state,
        host,
        publisher,
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
    )
  saver.close()
  return state, complete


def measure(
    run: Run, host: host_lib.RolloutHost, at: int, version: int
) -> None:
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
  """Task indices that the warm-up and RL have drawn, from their cursors."""
  used = {}
  for phase, key in (('warmup', 'cursor'), ('rl', 'ledger')):
    extra = checkpoint.read_extra(run.workdir / 'checkpoints' / phase)
    if phase == 'warmup':
      used['warmup'] = range(extra[key].get('demo', 0))
    else:
      used['train'] = ledger_lib.played(ledger_lib.from_json(extra[key]))
  return used


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a json file that is there as a whole or not at all."""
  part = path.with_suffix('.part')
  part.write_text(json.dumps(value, indent=2) + '\n')
  part.replace(path)
