"""Next-token phases: one loop over the documents of a mixture.

A source is a pure function of its cursor, and the cursors are saved with the
weights, so a resumed phase goes on with the very document that would have come
next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import dataclasses
import pathlib
import time

import jax
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.data import mixture
from composer_jax.data import stream
from composer_jax.learner import batch as batch_lib
from composer_jax.learner import items
from composer_jax.learner import losses
from composer_jax.learner import packing
from composer_jax.learner import processes
from composer_jax.learner import step
from composer_jax.runs import progress
from composer_jax.runs import writer as writer_lib
from composer_jax.weights import checkpoint
from kernels_triton import contract

_CHECKPOINT_SECONDS = 60.0
_KEPT = (
    *('loss', 'loss/mtp', 'grad_norm'),
    *('routing/balance', 'routing/z', 'routing/max_load'),
)


def _packed(
    documents: Sequence[trace.TokenTrace], shape: packing.Shape
) -> tuple[list[batch_lib.Batch], packing.PackStats]:
  """Batches of documents, each on its own; nearly always a single one."""
  packed = [items.Item(i, d, 1.0) for i, d in enumerate(documents, 1)]
  return packing.pack_all(packed, shape, now=0)


def heldout_figures(
    state: batch_lib.TrainState,
    texts: Mapping[str, stream.Tokens],
    shape: packing.Shape,
    *,
    cfg: config.ModelConfig,
    mesh: jax.sharding.Mesh,
) -> dict[str, float]:
  """Compression of text that was never trained on, under published weights.

  Args:
    state: state of training.
    texts: texts by source; those without a document are left out.
    shape: shape of the batches.
    cfg: the model.
    mesh: the trainer's.

  Returns:
    `bits_per_byte/SOURCE` for each, and `bits_per_byte` of all together.
  """
  published = step.rounded(state.params)
  nats, size = {}, {}
  for name, tokens in texts.items():
    if not tokens.utf8_bytes:
      continue
    nats[name], size[name] = 0.0, tokens.utf8_bytes
    for documents in stream.batches(tokens, shape):
      for batch in _packed(documents, shape)[0]:
        rows = processes.place(batch, mesh)
        logps, _ = step.score(published, rows, cfg=cfg, mesh=mesh)
        logps = np.asarray(processes.whole(logps), np.float64)
        nats[name] -= float(logps[batch.sampled].sum())
  figures = {
      f'bits_per_byte/{name}': stream.bits_per_byte(nats[name], size[name])
      for name in nats
  }
  if nats:
    total = sum(nats.values()), sum(size.values())
    figures['bits_per_byte'] = stream.bits_per_byte(*total)
  return figures


def run(
    phase: config.PhaseConfig,
    source: mixture.Mixture,
    state: batch_lib.TrainState,
    *,
    model: config.ModelConfig,
    mesh: jax.sharding.Mesh,
    heldout: Mapping[str, stream.Tokens],
    checkpoints: pathlib.Path,
    writer: writer_lib.Writer,
    stop: Callable[[], bool],
) -> tuple[batch_lib.TrainState, bool]:
  """Trains one phase, from its checkpoint if there is one.

  Args:
    phase: steps, shapes, optimizer; its name is that of metrics.
    source: what to train on.
    state: state to start from; its optimizer state is started afresh.
    model: the model.
    mesh: the trainer's.
    heldout: texts for bits per byte, by source.
    checkpoints: directory of this phase's checkpoints.
    writer: writer of metrics.
    stop: asked after every step; True in any process saves and returns early.

  Returns:
    (state, whether the phase is complete).
  """
  tx = phase.optimizer.build()
  state = step.restart(state.params, tx, mesh)
  shape = packing.Shape(
      phase.rows_per_step, phase.tokens_per_row, contract.KEY_BLOCK
  )
  saver = checkpoint.Checkpointer(checkpoints, writes=True)
  cursors: mixture.Cursors = {}
  done = 0
  if restored := saver.restore(state):
    done, state, extra = restored
    cursors = {k: stream.Cursor(**c) for k, c in extra['cursors'].items()}

  def save():
    plain = {name: dataclasses.asdict(c) for name, c in cursors.items()}
    saver.save(done, state, {'cursors': plain})

  def measured():
    return heldout_figures(state, heldout, shape, cfg=model, mesh=mesh)

  if not done:
    writer.write(phase.name, 0, measured())
  saved = time.monotonic()
  complete = done >= phase.steps
  (stopped,) = processes.agree(stop())
  with (
      progress.Progress(
          phase.steps, 'step', label=phase.name, start=done
      ) as bar,
      futures.ThreadPoolExecutor(1) as ahead,
  ):
    # The next documents are made while the device works on these.
    coming = ahead.submit(source.next, cursors, shape.rows)
    while not (complete or stopped):
      began = time.monotonic()
      documents, cursors = coming.result()
      coming = ahead.submit(source.next, cursors, shape.rows)
      batches, packed = _packed(documents, shape)
      state, figures = step.train_step(
          state,
          batches,
          # A batch may hold nothing but prompts.
          float(max(packed.sampled_tokens, 1)),
          cfg=model,
          loss=losses.NextToken(),
          tx=tx,
          mesh=mesh,
          balancing=phase.balancing,
          mtp=phase.mtp,
      )
      done += 1
      complete = done >= phase.steps
      seconds = time.monotonic() - began
      kept = {k: figures[k] for k in _KEPT if k in figures}
      kept['tokens_per_second'] = packed.tokens / seconds
      every = phase.eval_every_steps
      if complete or (every and done % every == 0):
        kept |= measured()
      writer.write(phase.name, done, kept)
      bar.update(done, **kept)
      late = time.monotonic() - saved > _CHECKPOINT_SECONDS
      stopped, due = processes.agree(stop(), late)
      if complete or due:
        save()
        saved = time.monotonic()
  if not complete:
    save()
  saver.close()
  return state, complete
