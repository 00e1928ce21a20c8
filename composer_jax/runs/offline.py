"""Offline RL: one loop, synchronous (S = 0) or asynchronous (S > 0).

The host's event loop dispatches prompts through the admission gate, plays
them and files results; the trainer's thread takes batches, steps, hands the
new weights to the publisher and goes on. Nothing but trajectories and weight
versions passes between the two. With S = 0 the gate opens only when the
step's weights are published, so the same code is fully on-policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent import futures
import itertools
import pathlib
import time
from typing import Any

import jax
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.fleet import admission
from composer_jax.fleet import gate as gate_lib
from composer_jax.fleet import ingest
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.fleet import queue as queue_lib
from composer_jax.learner import advantages
from composer_jax.learner import batch as batch_lib
from composer_jax.learner import items
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.model import params as params_lib
from composer_jax.runs import host as host_lib
from composer_jax.runs import progress
from composer_jax.runs import writer as writer_lib
from composer_jax.weights import checkpoint
from composer_jax.weights import publish
from kernels_triton import contract

RUN = 'offline'
_KEPT_PER_STEP = 16  # trajectories written to disk per step, for people


class Rollouts:
  """Dispatcher, workers and collector on the host's event loop.

  Attributes:
    gate: admission.
    queue: tasks and results.
  """

  def __init__(
      self,
      cfg: config.Experiment,
      host: host_lib.RolloutHost,
      ledger: ledger_lib.Ledger,
      version: trace.WeightVersion,
  ):
    self._cfg = cfg
    self._host = host
    self._ledger = ledger
    state = ledger_lib.resume(ledger, admission.Pacing.of(cfg.rl), version)
    self.gate = gate_lib.Gate(state, routing_required=True)
    self.queue = queue_lib.InProcessQueue(
        self.gate, lease_seconds=cfg.rl.lease_seconds, cursor=ledger.cursor
    )
    self._blobs = queue_lib.Blobs()
    self._failed: futures.Future[None] = futures.Future()
    self._tasks: list[asyncio.Task] = []
    host.call(self._start(version))

  async def _start(self, version: trace.WeightVersion) -> None:
    await self.queue.publish_version(version, '')
    works = [self._work() for _ in range(self._cfg.rl.workers)]
    for coroutine in (self._dispatch(), self._collect(), *works):
      task = asyncio.create_task(coroutine)
      task.add_done_callback(self._done)
      self._tasks.append(task)

  def _done(self, task: asyncio.Task) -> None:
    # A coroutine here never returns: its error must reach the trainer.
    if not task.cancelled() and task.exception() and not self._failed.done():
      self._failed.set_exception(task.exception())

  async def _dispatch(self) -> None:
    rl = self._cfg.rl
    again = [prompt for prompt, _ in self._ledger.in_flight]
    fresh = itertools.count(self._ledger.next_prompt)
    for prompt in itertools.chain(again, fresh):
      for member in range(rl.rollouts_per_group):
        seed = admission.rollout_seed(self._cfg.seed, prompt, member)
        task_id = admission.task_id(RUN, prompt, member)
        await self.queue.offer(task_id, {'prompt': prompt, 'seed': seed})

  async def _work(self) -> None:
    while True:
      lease = await self.queue.lease('rollout', timeout=3600.0)
      if lease is not None:
        await self._roll(lease)

  async def _roll(self, lease: queue_lib.Lease) -> None:
    rl = self._cfg.rl
    task = self._cfg.tasks.task(lease.spec['prompt'], 'train')
    try:
      # The deadline of the lease bounds the work: a hung environment loses
      # it, and the task is played again.
      async with asyncio.timeout(rl.lease_seconds):
        trajectory = await self._host.rollout(
            task,
            lease.id,
            seed=lease.spec['seed'],
            oldest_version=max(lease.version - rl.max_staleness_versions, 0),
        )
    except TimeoutError:
      await self.queue.release(lease, retry=True)
      return
    if trajectory.stop is trace.StopReason.INFRA_ERROR and lease.attempt < 3:
      await self.queue.release(lease, retry=True)
      return
    ref = await self._blobs.put(lease, trace.to_bytes(trajectory))
    if await self.queue.complete(lease, ref) == 'duplicate':
      await self._blobs.delete(ref)

  async def _collect(self) -> None:
    async for cursor, ref in self.queue.results(self._ledger.cursor):
      trajectory = None
      if not ref.lost:
        trajectory = trace.from_bytes(await self._blobs.get(ref))
        await self._blobs.delete(ref)
      prompt, member = admission.parse_task_id(ref.task_id)
      self.gate.add(
          cursor,
          ref.task_id,
          trajectory,
          seed=admission.rollout_seed(self._cfg.seed, prompt, member),
          sha256=ref.sha256,
      )

  def take(self) -> admission.Batch | None:
    """The next batch; raises what a coroutine of the rollout side raised."""
    batch = asyncio.run_coroutine_threadsafe(self.gate.take(), self._host.loop)
    futures.wait([batch, self._failed], return_when=futures.FIRST_COMPLETED)
    if self._failed.done():
      batch.cancel()
      self._failed.result()
    return batch.result()

  def published(self, future: futures.Future[publish.Published]) -> None:
    """Opens the gate for a version that is in the store; any thread.

    A publish that failed opens nothing: the trainer raises its error.
    """
    if future.exception() is None:
      version = future.result().version
      asyncio.run_coroutine_threadsafe(
          self.queue.publish_version(version, ''), self._host.loop
      )

  async def _stop(self) -> None:
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)

  def close(self) -> None:
    """Stops what runs; its rollouts will be offered again on resume."""
    self._host.call(self._stop())


def published_arrays(params: params_lib.Params) -> dict[str, np.ndarray]:
  """bf16 arrays by name, on the host: what a version consists of."""
  tree = jax.device_get(_publish_dtype(params))
  return params_lib.names(tree)


_publish_dtype = jax.jit(params_lib.publish_dtype)


def _items(
    cfg: config.Experiment, batch: admission.Batch
) -> tuple[list[items.Item], int]:
  """Segments to train with their advantages, and the number of rollouts."""
  rollouts, weights = [], []
  for group in batch.groups:
    members = group.rollouts
    a = advantages.group_advantages(members, cfg.advantage)
    if a is not None:
      rollouts += members
      weights += a.tolist()
  return items.from_trajectories(rollouts, weights), len(rollouts)


def _keep(batch: admission.Batch, folder: pathlib.Path) -> None:
  """Writes a few trajectories of the step, evenly over its groups."""
  folder = folder / f'{batch.step:06d}'
  folder.mkdir(parents=True, exist_ok=True)
  every = [t for g in batch.groups for t in g.rollouts]
  for t in every[:: max(1, len(every) // _KEPT_PER_STEP)][:_KEPT_PER_STEP]:
    path = folder / (t.task_id.replace('/', '-') + '.traj')
    path.write_bytes(trace.to_bytes(t))


def _rewards(batch: admission.Batch) -> dict[str, float]:
  groups = batch.groups + batch.untrained
  rewards = [[t.reward for t in g.rollouts] for g in groups]
  rewards = [r for r in rewards if r]
  flat = [r for group in rewards for r in group]
  lag = ingest.metrics(batch)
  return {
      'reward/mean': float(np.mean(flat)) if flat else 0.0,
      'reward/best_of_group': (
          float(np.mean([max(r) for r in rewards])) if rewards else 0.0
      ),
      'group/zero_variance_fraction': lag['groups/zero_variance_fraction'],
      'group/invalid': lag['groups/too_few'],
      'lost_rollouts': lag['rollouts/lost'] + lag['rollouts/refused'],
      'staleness/submit_lag_mean': lag.get('lag/submit_mean', 0.0),
      **{k: v for k, v in lag.items() if k.startswith(('rollouts/', 'length/'))},
  }


def _staleness(
    packed: packing.PackStats, segments: list[items.Item], now: int
) -> dict[str, Any]:
  ages = [now - i.trace.versions[i.trace.sampled] for i in segments]
  counts = np.bincount(np.concatenate([*ages, np.zeros(0, np.int32)]))
  return {
      'staleness/token_p95': packed.age_p95,
      'staleness/token_max': packed.age_max,
      'staleness/spanning_fraction': packed.mixed_version_fraction,
      'staleness/histogram': counts.tolist(),
      'tokens/withheld': packed.withheld_tokens,
      'tokens/packed_fraction': packed.fill_fraction,
  }


def run(
    cfg: config.Experiment,
    state: batch_lib.TrainState,
    host: host_lib.RolloutHost,
    publisher: publish.Publisher,
    *,
    version: trace.WeightVersion,
    ledger: ledger_lib.Ledger,
    saver: checkpoint.Checkpointer,
    tx: Any,
    mesh: jax.sharding.Mesh,
    workdir: pathlib.Path,
    writer: writer_lib.Writer,
    evaluate: Callable[[int, int], None],
    stop: Callable[[], bool],
) -> tuple[batch_lib.TrainState, ledger_lib.Ledger, bool]:
  """Trains until `rl.steps` steps are in the ledger.

  Args:
    cfg: the experiment.
    state: masters and optimizer state that `ledger` belongs to.
    host: the rollout side, serving `version`.
    publisher: of the weight store.
    version: the published version of `state`.
    ledger: what those weights have been trained on.
    saver: of checkpoints; the ledger is saved with the weights.
    tx: the optimizer, built once.
    mesh: the trainer's.
    workdir: for trajectories and offending batches.
    writer: of metrics.
    evaluate: called as evaluate(step, version) at step 0, every
      `rl.eval_every_steps` and at the end, with rollouts going on.
    stop: asked after every step; True saves and returns early.

  Returns:
    (state, ledger, whether all steps are done).
  """
  background = publish.BackgroundPublisher(publisher)
  rollouts = Rollouts(cfg, host, ledger, version)
  try:
    return _loop(
        cfg,
        state,
        host,
        background,
        rollouts,
        version=version,
        ledger=ledger,
        saver=saver,
        tx=tx,
        mesh=mesh,
        workdir=workdir,
        writer=writer,
        evaluate=evaluate,
        stop=stop,
    )
  finally:
    rollouts.close()
    background.close()


def _loop(
    cfg,
    state,
    host,
    background,
    rollouts,
    *,
    version,
    ledger,
    saver,
    tx,
    mesh,
    workdir,
    writer,
    evaluate,
    stop,
):
  rl = cfg.rl
  shape = packing.Shape(
      rl.micro_rows or rl.rows_per_step, rl.tokens_per_row, contract.KEY_BLOCK
  )
  done = len(ledger.steps)
  digests = {version.step: version.digest}
  pending: tuple[futures.Future, int] | None = None

  def save():
    extra = {'ledger': ledger_lib.to_json(ledger)}
    saver.save(len(ledger.steps), state, extra)

  def save_batch(batch):
    path = workdir / f'offending_batch_step{done:06d}.npz'
    fields = {k: v for k, v in vars(batch).items() if v is not None}
    np.savez(path, **fields)
    return str(path)

  def settle() -> None:
    """Waits for the last version to be in the store and records its cost."""
    nonlocal pending
    if pending is None:
      return
    result, at = pending[0].result(), pending[1]
    pending = None
    digests[result.version.step] = result.version.digest
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
    writer.write('rl', at, {f'weights/{k}': v for k, v in cost.items()})

  def send() -> None:
    """Hands the new weights to the publisher; the gate opens when it is done."""
    nonlocal pending
    future = background.submit(
        batch.version + 1, published_arrays(state.params)
    )
    future.add_done_callback(rollouts.published)
    pending = future, done

  if not done:
    evaluate(0, version.step)
  complete = done >= rl.steps
  before = host.engine.stats()
  environment = host.environment.seconds
  with progress.Progress(rl.steps, 'step', label='rl', start=done) as bar:
    while not complete and not stop():
      began = time.perf_counter()
      batch = rollouts.take()
      taken = time.perf_counter()
      segments, count = _items(cfg, batch)
      figures: dict[str, Any] = _rewards(batch)
      if segments:
        packed_batches, packed = packing.pack_all(
            segments,
            shape,
            now=batch.version,
            replay=cfg.model,
            withhold_staleness_versions=rl.withhold_staleness_versions,
        )
        state, trained = step.train_step(
            state,
            packed_batches,
            float(count * rl.norm_tokens),
            cfg=cfg.model,
            loss=cfg.loss,
            tx=tx,
            mesh=mesh,
            on_nonfinite=save_batch,
        )
        figures |= trained | _staleness(packed, segments, batch.version)
      stepped = time.perf_counter()
      settle()
      waited = time.perf_counter()
      ledger = ledger_lib.commit(ledger, batch, digests.get(batch.version, ''))
      done = len(ledger.steps)
      send()
      _keep(batch, workdir / 'trajectories')
      complete = done >= rl.steps
      stats = host.engine.stats()
      seconds = time.perf_counter() - began
      train_seconds = stepped - taken
      decoded = stats.decoded_tokens - before.decoded_tokens
      busy = stats.busy_seconds - before.busy_seconds
      figures |= {
          'time/step': seconds,
          'time/train': train_seconds,
          'time/wait_batch': taken - began,
          'time/wait_weights': waited - stepped,
          'time/rollout': busy,
          'time/environment': host.environment.seconds - environment,
          'tokens/decode_per_second': decoded / busy if busy else 0.0,
          'tokens/train_per_second': (
              packed.tokens / train_seconds if segments else 0.0
          ),
          'weights/swap_seconds': stats.swap_seconds - before.swap_seconds,
      }
      before, environment = stats, host.environment.seconds
      writer.write('rl', done, figures)
      bar.update(
          done,
          reward=figures['reward/mean'],
          staleness=figures.get('staleness/token_mean', 0.0),
          mismatch=figures.get('mismatch/kl_same_version', 0.0),
          tokens_per_second=figures['tokens/decode_per_second'],
      )
      if complete or done % rl.checkpoint_every_steps == 0:
        settle()
        save()
      if complete or done % rl.eval_every_steps == 0:
        settle()
        evaluate(done, max(digests))
  if not complete:
    settle()
    if len(ledger.steps) and done % rl.checkpoint_every_steps:
      save()
  return state, ledger, complete
