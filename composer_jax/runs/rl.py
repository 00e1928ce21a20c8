"""Asynchronous on-policy RL: one loop, synchronous with S = 0.

The host's event loop dispatches prompts through the admission gate, plays
them and files results; the trainer's thread takes batches, steps, hands the
new weights to the publisher and goes on. Nothing but trajectories and weight
versions passes between the two. With S = 0 the gate opens only when the
step's weights are published, so the same code is fully on-policy.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
import contextlib
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.fleet import dispatcher
from composer_jax.fleet import history as history_lib
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.learner import advantages
from composer_jax.learner import batch as batch_lib
from composer_jax.learner import items
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.model import params as params_lib
from composer_jax.rewards import signals
from composer_jax.rollout import engine as engine_lib
from composer_jax.runs import player
from composer_jax.runs import progress
from composer_jax.runs import rollouts as rollouts_lib
from composer_jax.runs import step_record
from composer_jax.runs import writer as writer_lib
from composer_jax.weights import checkpoint
from composer_jax.weights import publish
from kernels_triton import contract


class Outbox:
  """Sends weights to the publisher and books what each version cost.

  The train step never waits for a publish: `send` hands the arrays over, and
  `settle`, one step later, finds the future done.

  Attributes:
    digests: version step -> root digest of what is in the store.
  """

  def __init__(
      self,
      publisher: publish.Publisher,
      version: trace.WeightVersion,
      writer: writer_lib.Writer,
  ):
    self._background = publish.BackgroundPublisher(publisher)
    self._writer = writer
    self._pending: tuple[futures.Future[publish.Published], int] | None = None
    self.digests = {version.step: version.digest}

  @property
  def newest(self) -> int:
    return max(self.digests)

  def send(self, step: int, version: int, params: params_lib.Params, then):
    """Publishes params after RL step `step`; calls then(future) at the end."""
    future = self._background.submit(version, published_arrays(params))
    future.add_done_callback(then)
    self._pending = future, step

  def settle(self) -> None:
    """Waits until what was sent is in the store; records its cost."""
    if self._pending is None:
      return
    (future, step), self._pending = self._pending, None
    result = future.result()
    self.digests[result.version.step] = result.version.digest
    cost = {
        'version': result.version.step,
        'delta_bytes': result.bytes,
        'base_bytes': result.base_bytes,
        'changed_values': result.changed,
        'changed_fraction': result.changed_fraction,
        'bits_per_changed': result.bits_per_changed,
        'ratio': result.ratio,
        'publish_seconds': result.seconds,
    }
    self._writer.write('rl', step, {f'weights/{k}': v for k, v in cost.items()})

  def close(self) -> None:
    self._background.close()


class Meter:
  """Time and token counts of one step, from totals of the rollout side."""

  def __init__(self, host: player.Player):
    self._host = host
    self._stats = host.engine.stats()
    self._environment = host.environment.seconds
    self._mismatches = host.feed.digest_mismatches
    self._programs = engine_lib.compilations() + step.compilations()
    self._began = time.perf_counter()

  def read(
      self, taken: float, trained: float, settled: float, tokens: int
  ) -> dict[str, float]:
    """Figures since the last reading; the arguments are moments in between.

    Args:
      taken: when the batch had arrived.
      trained: when the optimizer step was over.
      settled: when the weights before were known to be in the store.
      tokens: trained on.
    """
    now, stats = time.perf_counter(), self._host.engine.stats()
    environment = self._host.environment.seconds
    mismatches = self._host.feed.digest_mismatches
    programs = engine_lib.compilations() + step.compilations()
    busy = stats.busy_seconds - self._stats.busy_seconds
    decoded = stats.decoded_tokens - self._stats.decoded_tokens
    figures = {
        'time/step': now - self._began,
        'time/wait_batch': taken - self._began,
        'time/train': trained - taken,
        'time/wait_weights': settled - trained,
        'time/rollout': busy,
        'time/environment': environment - self._environment,
        'tokens/decode_per_second': decoded / busy if busy else 0.0,
        'tokens/train_per_second': tokens / (trained - taken),
        'weights/swap_seconds': stats.swap_seconds - self._stats.swap_seconds,
        'weights/follower_mismatches': mismatches - self._mismatches,
        'recompilations': programs - self._programs,
    }
    self._stats, self._environment = stats, environment
    self._began, self._programs = now, programs
    self._mismatches = mismatches
    return figures


def published_arrays(params: params_lib.Params) -> dict[str, np.ndarray]:
  """bf16 arrays by name, on the host: what a version consists of."""
  params = params_lib.without_mtp(params)
  tree = jax.device_get(_publish_dtype(params))
  return params_lib.names(tree)


_publish_dtype = jax.jit(params_lib.publish_dtype)


def _items(
    cfg: config.Experiment, batch: dispatcher.Step
) -> tuple[list[items.Item], int]:
  """Segments to train with their advantages, and the number of rollouts."""
  rollouts, weights = [], []
  for group in batch.consumed.groups:
    members = batch.rollouts(group)
    a = advantages.group_advantages(members, cfg.advantage)
    if a is not None:
      rollouts += members
      weights += a.tolist()
  return items.from_trajectories(rollouts, weights), len(rollouts)


def train(
    cfg: config.Experiment,
    state: batch_lib.TrainState,
    batch: dispatcher.Step,
    *,
    tx: Any,
    mesh: jax.sharding.Mesh,
    reference: params_lib.Params | None,
    on_nonfinite: Callable[[batch_lib.Batch], str] | None = None,
) -> tuple[batch_lib.TrainState, dict[str, Any], int]:
  """The optimizer step of a batch; none if there is nothing to learn.

  Returns:
    (state, figures, tokens trained on).
  """
  segments, count = _items(cfg, batch)
  if not segments:
    return state, {'tokens/trained': 0}, 0
  batches, packed = packing.pack_all(
      segments,
      _shape(cfg),
      now=batch.consumed.version,
      replay=cfg.model,
      withhold_staleness_versions=cfg.rl.withhold_staleness_versions,
  )
  state, figures = step.train_step(
      state,
      batches,
      float(count * cfg.rl.norm_tokens),
      cfg=cfg.model,
      loss=cfg.loss,
      tx=tx,
      mesh=mesh,
      reference=reference,
      on_nonfinite=on_nonfinite,
  )
  figures |= step_record.staleness(packed, segments, batch.consumed.version)
  return state, figures, packed.tokens


def _shape(cfg: config.Experiment) -> packing.Shape:
  return packing.Shape(
      cfg.rl.rows_per_batch, cfg.rl.tokens_per_row, contract.KEY_BLOCK
  )


def _due(done: int, every: int, steps: int) -> bool:
  """Says whether something is done after this step; it is at both ends."""
  return done == steps or done % every == 0


def run(
    cfg: config.Experiment,
    state: batch_lib.TrainState,
    host: player.Player,
    publisher: publish.Publisher,
    *,
    run_id: str,
    version: trace.WeightVersion,
    ledger: ledger_lib.Ledger,
    saver: checkpoint.Checkpointer,
    tx: Any,
    mesh: jax.sharding.Mesh,
    reference: params_lib.Params | None,
    workdir: pathlib.Path,
    writer: writer_lib.Writer,
    evaluate: Callable[[int, int], None],
    stop: Callable[[], bool],
    elsewhere: rollouts_lib.Elsewhere | None = None,
) -> tuple[batch_lib.TrainState, ledger_lib.Ledger, bool]:
  """Trains until `rl.steps` steps are in the ledger.

  Args:
    cfg: the experiment.
    state: masters and optimizer state that `ledger` belongs to.
    host: the rollout side, serving `version`.
    publisher: publisher of the weight store.
    run_id: first part of the rollouts' ids.
    version: the published version of `state`.
    ledger: what those weights have been trained on.
    saver: writer of checkpoints; the ledger is saved with the weights.
    tx: the optimizer, built once.
    mesh: the trainer's.
    reference: masters for a loss with `needs_reference`, else None.
    workdir: directory for trajectories and offending batches.
    writer: writer of metrics.
    evaluate: called as evaluate(step, version) at step 0, every
      `rl.eval_every_steps` and at the end, with rollouts going on.
    stop: asked after every step; True saves and returns early.
    elsewhere: see `rollouts.Rollouts`.

  Returns:
    (state, ledger, whether all steps are done).
  """
  rl = cfg.rl
  how = {'tx': tx, 'mesh': mesh, 'reference': reference}
  done = saved = ledger.done
  history = [r for r in writer.kept if 'reward/mean' in r]
  alarms: dict[str, tuple[float, float]] = {}

  def save_batch(batch: batch_lib.Batch) -> str:
    path = workdir / f'offending_batch_step{done:06d}.npz'
    np.savez(path, **{k: v for k, v in vars(batch).items() if v is not None})
    return str(path)

  with (
      contextlib.closing(Outbox(publisher, version, writer)) as outbox,
      contextlib.closing(
          rollouts_lib.Rollouts(
              cfg,
              host,
              ledger,
              version,
              run_id,
              history_lib.read(workdir, ledger),
              elsewhere,
          )
      ) as rollouts,
      progress.Progress(rl.steps, 'step', label='rl', start=done) as bar,
  ):
    # A kill may have come between a checkpoint and its evaluation.
    kept = {r['step'] for r in writer.kept if r['phase'] == 'eval'}
    if _due(done, rl.eval_every_steps, rl.steps) and done not in kept:
      evaluate(done, version.step)
    # Everything a step may need is compiled here, on a copy and on pads.
    pads, _ = packing.pack_all([], _shape(cfg), now=0, replay=cfg.model)
    step.train_step(
        jax.tree.map(jnp.copy, state),
        pads * 2,
        1.0,
        cfg=cfg.model,
        loss=cfg.loss,
        **how,
    )
    meter = Meter(host)
    while done < rl.steps and not stop():
      batch = rollouts.take()
      if batch is None:
        print(f'every task was played once: no step after {done}')
        break
      taken = time.perf_counter()
      state, trained, tokens = train(
          cfg, state, batch, on_nonfinite=save_batch, **how
      )
      consumed = batch.consumed
      figures = step_record.of_batch(consumed, cfg.harness) | trained
      stepped = time.perf_counter()
      outbox.settle()
      settled = time.perf_counter()
      ledger = ledger_lib.commit(
          ledger, consumed, outbox.digests.get(consumed.version, '')
      )
      done = ledger.done
      outbox.send(done, consumed.version + 1, state.params, rollouts.published)
      step_record.keep(batch, workdir / 'trajectories')
      figures |= meter.read(taken, stepped, settled, tokens)
      history.append(figures)
      alarms = signals.alarms(history)
      figures |= {signals.ALARM + k: now for k, (_, now) in alarms.items()}
      # Before the checkpoint: a record of what is not saved is dropped when the
      # run resumes, but nobody could write one of what is.
      writer.write('rl', done, figures)
      if _due(done, rl.checkpoint_every_steps, rl.steps):
        ledger = history_lib.append(workdir, ledger)
        saver.save(done, state, {'ledger': ledger_lib.to_json(ledger)})
        # The save before is on the disk by now; of this one nobody knows yet.
        rollouts.retire(saved)
        saved = done
        meter = Meter(host)
      bar.update(
          done,
          reward=figures['reward/mean'],
          staleness=figures.get('staleness/token_mean', 0.0),
          mismatch=(
              figures['mismatch/kl_same_version']
              if figures.get('mismatch/same_version_share')
              else '-'
          ),
          tokens_per_second=figures['tokens/decode_per_second'],
          alarms=', '.join(alarms) or 'none',
      )
      if signals.MISMATCH in alarms and rl.stop_on_mismatch:
        break
      if _due(done, rl.eval_every_steps, rl.steps):
        outbox.settle()
        evaluate(done, outbox.newest)
        meter = Meter(host)
    outbox.settle()
    if saved < done:
      ledger = history_lib.append(workdir, ledger)
      saver.save(done, state, {'ledger': ledger_lib.to_json(ledger)})
  if signals.MISMATCH in alarms and rl.stop_on_mismatch:
    saver.close()
    raise FloatingPointError(
        f'step {done}: with equal weights, log-probs of decoder and trainer'
        f' differ by up to {alarms[signals.MISMATCH][1]:.3g}; the run is saved,'
        ' and goes on with --set=rl.stop_on_mismatch=false'
    )
  return state, ledger, done == rl.steps
