"""Next-token phases: real code first, then code mixed with harness demos.

Both phases are one loop over a source of documents. A source is a pure
function of its cursor, and the cursor is saved with the weights, so a resumed
phase goes on with the very document that would have come next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent import futures
import dataclasses
import pathlib
import random
import time
from typing import Any, Protocol

import jax
import numpy as np

from composer_jax import config
from composer_jax.agents import tasks as tasks_lib
from composer_jax.learner import batch as batch_lib
from composer_jax.learner import corpus
from composer_jax.learner import losses
from composer_jax.learner import packing
from composer_jax.learner import processes
from composer_jax.learner import step
from composer_jax.runs import progress
from composer_jax.runs import writer as writer_lib
from composer_jax.weights import checkpoint
from kernels_triton import contract

_BALANCE = 0.01  # router balance term; Fedus et al., arXiv 2101.03961
_CHECKPOINT_SECONDS = 60.0
Cursor = Mapping[str, Any]
Documents = tuple[list[np.ndarray], list[np.ndarray | None]]


class Source(Protocol):
  """Documents of one optimizer step, and the cursor behind them."""

  def __call__(self, cursor: Cursor) -> tuple[Documents, Cursor]:
    """Returns ((tokens of each document, trained mask or None), cursor)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Code:
  """Chunks of a code corpus."""

  stream: corpus.Stream

  def __call__(self, cursor: Cursor) -> tuple[Documents, Cursor]:
    at = corpus.Cursor(**cursor.get('code', {}))
    chunks, at = self.stream.next(at)
    new = {**cursor, 'code': dataclasses.asdict(at)}
    return (chunks, [None] * len(chunks)), new


@dataclasses.dataclass(frozen=True, eq=False)
class Demos:
  """Rendered tasks with format-only demonstrations, filling the rows of `shape`.

  Only the demonstration is trained; the prompt is context. Demonstrations are
  random legal actions, never right answers (`MicroRepair.demo`), on the first
  turn of an episode unless the source has others (`tasks.DemoWindows`).
  """

  tasks: Any
  renderer: Any
  shape: packing.Shape
  seed: int

  def _document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
    task = self.tasks.task(index, 'warmup')
    rng = random.Random(f'{self.seed}/demo/{index}')
    if isinstance(self.tasks, tasks_lib.DemoWindows):
      pieces = self.tasks.demo_window(task, rng, self.renderer)
    else:
      turn = self.renderer.encode_turn(self.tasks.demo(task, rng))
      pieces = [(self.renderer.encode_task(task), False), (turn, True)]
    ids = np.concatenate([np.array(piece, np.int32) for piece, _ in pieces])
    masks = [np.full(len(piece), trained) for piece, trained in pieces]
    return ids, np.concatenate(masks)

  def __call__(self, cursor: Cursor) -> tuple[Documents, Cursor]:
    index = cursor.get('demo', 0)
    documents, masks = [], []
    free = [self.shape.tokens_per_row] * self.shape.rows
    block = self.shape.key_block
    while True:
      ids, mask = self._document(index)
      row = next((r for r, f in enumerate(free) if f >= len(ids)), None)
      if row is None:
        return (documents, masks), {**cursor, 'demo': index}
      free[row] -= -(-len(ids) // block) * block
      documents.append(ids)
      masks.append(mask)
      index += 1


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
  """Documents of two sources side by side."""

  first: Source
  second: Source

  def __call__(self, cursor: Cursor) -> tuple[Documents, Cursor]:
    (a, a_masks), cursor = self.first(cursor)
    (b, b_masks), cursor = self.second(cursor)
    return (a + b, a_masks + b_masks), cursor


def heldout_bits_per_byte(
    state: batch_lib.TrainState,
    tokens: corpus.Tokens,
    shape: packing.Shape,
    *,
    cfg: config.ModelConfig,
    mesh: jax.sharding.Mesh,
) -> float:
  """Compression of code that was never trained on, under published weights."""
  nll = 0.0
  published = step.rounded(state.params)
  for chunks in corpus.batches(tokens, shape):
    batch, _ = packing.pack_documents(chunks, shape)
    rows = processes.place(batch, mesh)
    logps, _ = step.score(published, rows, cfg=cfg, mesh=mesh)
    logps = np.asarray(processes.whole(logps), np.float64)
    nll -= float(logps[batch.sampled].sum())
  return corpus.bits_per_byte(nll, tokens.utf8_bytes)


def run(
    phase: str,
    cfg: config.PhaseConfig,
    source: Source,
    state: batch_lib.TrainState,
    *,
    model: config.ModelConfig,
    optimizer: Any,
    mesh: jax.sharding.Mesh,
    heldout: corpus.Tokens,
    checkpoints: pathlib.Path,
    writer: writer_lib.Writer,
    stop: Callable[[], bool],
) -> tuple[batch_lib.TrainState, bool]:
  """Trains one phase, from its checkpoint if there is one.

  Args:
    phase: 'midtrain' or 'warmup'; names metrics and checkpoints.
    cfg: steps and shapes.
    source: what to train on.
    state: to start from; its optimizer state is started afresh.
    model: the model.
    optimizer: object with `build()`.
    mesh: the trainer's.
    heldout: code for bits per byte.
    checkpoints: directory of this phase's checkpoints.
    writer: of metrics.
    stop: asked after every step; True in any process saves and returns early.

  Returns:
    (state, whether the phase is complete).
  """
  tx = optimizer.build()
  state = step.restart(state.params, tx, mesh)
  shape = packing.Shape(
      cfg.rows_per_step, cfg.tokens_per_row, contract.KEY_BLOCK
  )
  saver = checkpoint.Checkpointer(checkpoints)
  cursor: Cursor = {}
  done = 0
  if restored := saver.restore(state):
    done, state, extra = restored
    cursor = extra['cursor']

  def save():
    saver.save(done, state, {'cursor': dict(cursor)})

  def heldout_figure():
    return heldout_bits_per_byte(state, heldout, shape, cfg=model, mesh=mesh)

  if not done:
    writer.write(phase, 0, {'bits_per_byte': heldout_figure()})
  saved = time.monotonic()
  complete = done >= cfg.steps
  (stopped,) = processes.agree(stop())
  with (
      progress.Progress(cfg.steps, 'step', label=phase, start=done) as bar,
      futures.ThreadPoolExecutor(1) as ahead,
  ):
    # The next documents are made while the device works on these.
    coming = ahead.submit(source, cursor)
    while not (complete or stopped):
      began = time.monotonic()
      (documents, masks), cursor = coming.result()
      coming = ahead.submit(source, cursor)
      batch, packed = packing.pack_documents(documents, shape, masks)
      state, figures = step.train_step(
          state,
          [batch],
          float(packed.sampled_tokens),
          cfg=model,
          loss=losses.NextToken(),
          tx=tx,
          mesh=mesh,
          balance=_BALANCE,
      )
      done += 1
      complete = done >= cfg.steps
      seconds = time.monotonic() - began
      kept = {k: figures[k] for k in ('loss', 'grad_norm', 'routing/balance')}
      kept['tokens_per_second'] = packed.tokens / seconds
      if complete:
        kept['bits_per_byte'] = heldout_figure()
      writer.write(phase, done, kept)
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
