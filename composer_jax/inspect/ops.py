"""What every op computes: in the trainer, in the decoder, in a training step.

The programs that run are left alone. The model's values are taken from a second
program, the first one with the named values among its outputs
(`named_values`). That a forward's bits do not depend on what else a program
computes is the numeric contract itself; `tests/ops_test.py` holds both to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import functools
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.inspect import divergence
from composer_jax.inspect import named_values
from composer_jax.learner import batch as batch_lib
from composer_jax.learner import items
from composer_jax.learner import loss_inputs
from composer_jax.learner import packing
from composer_jax.learner import step as step_lib
from composer_jax.model import decode
from composer_jax.model import params as params_lib
from composer_jax.model import sharding
from composer_jax.runs import feed
from composer_jax.runs import run_digest
from kernels_triton import contract

Record = divergence.Record
_LOGP = 'log-prob'
_ROLLOUTS = 7  # of a run that are looked at
_CHUNK = 7  # tokens prefilled together there; no multiple of any tile


@functools.partial(jax.jit, static_argnames='cfg')
def _score(params, batch, *, cfg):
  run = lambda params, batch: step_lib.target_stats(params, batch, cfg)[0]
  return named_values.capture(run)(params, batch)


@functools.partial(jax.jit, static_argnames='cfg')
def _prefill(params, pages, tokens, positions, table, *, cfg):
  run = functools.partial(decode.prefill, cfg=cfg)
  return named_values.capture(run)(params, pages, tokens, positions, table)


@functools.partial(jax.jit, static_argnames='cfg')
def _step(params, pages, tokens, positions, table, *, cfg):
  run = functools.partial(decode.step, cfg=cfg)
  return named_values.capture(run)(params, pages, tokens, positions, table)


def _by_layer(values: named_values.Named) -> dict[str, np.ndarray]:
  """name -> [L n ...] becomes 'layer l, name' -> [n ...], layer by layer.

  What the first layers do not have, since they are dense, has a smaller L.
  """
  values = jax.device_get(values)
  layers = max(map(len, values.values()))
  return {
      f'layer {layer}, {name}': x[layer - layers]
      for layer in range(layers)
      for name, x in values.items()
      if layer >= layers - len(x)
  }


def trainer(
    params: params_lib.Params,
    texts: Sequence[np.ndarray],
    prompt: int,
    *,
    cfg: config.ModelConfig,
    shape: packing.Shape,
) -> list[Record]:
  """Every op of the trainer's forward on packed texts, routing live.

  Args:
    params: weights as published.
    texts: i32 [T] each; all fit into one batch.
    prompt: tokens at the start whose log-probs are left out.
    cfg: the model.
    shape: shape of the batch.

  Returns:
    A record for each text.
  """
  packed = [
      items.Item(i, items.document(t), 0.0) for i, t in enumerate(texts, 1)
  ]
  batch, _ = packing.pack(packed, shape, now=0)
  logps, values = _score(params, batch, cfg=cfg)
  logps, ops = np.asarray(logps).reshape(-1), _by_layer(values)
  out = []
  for i, text in enumerate(texts, 1):
    start = np.flatnonzero(batch.rollouts.reshape(-1) == i)[0]
    span = slice(start, start + len(text))
    found = {name: x[span] for name, x in ops.items()}
    out.append(Record(found | {_LOGP: logps[span][prompt:]}))
  return out


def decoder(
    params: params_lib.Params,
    texts: Sequence[np.ndarray],
    prompt: int,
    *,
    cfg: config.ModelConfig,
    chunk: int,
    seed: int = 0,
) -> list[Record]:
  """Every op of the decoder that is fed the texts, all of them side by side.

  Args:
    params: weights as published.
    texts: i32 [T] each, longer than the prompt.
    prompt: tokens at the start that are prefilled, but for the last of them.
    cfg: the model.
    chunk: tokens of a sequence that are prefilled together.
    seed: seed of the order in which pages are handed out.

  Returns:
    A record for each text, comparable with those of `trainer`.
  """
  count, ends = len(texts), np.array([len(t) for t in texts])
  padded = np.zeros((count, ends.max() + 1), np.int32)
  for row, text in zip(padded, texts, strict=True):
    row[: len(text)] = text
  width = -(-ends.max() // contract.KEY_BLOCK)
  order = np.random.default_rng(seed).permutation(count * width)
  table = order.reshape(count, width).astype(np.int32)
  pages = decode.init_pages(cfg, order.size)
  found: dict[str, np.ndarray] = {}
  logps = np.zeros(padded.shape, np.float32)  # of the token after

  def keep(values, rows, at):
    rows, at, real = rows[at >= 0], at[at >= 0], np.flatnonzero(at >= 0)
    for name, x in _by_layer(values).items():
      blank = np.zeros((*padded.shape, *x.shape[1:]), x.dtype)
      found.setdefault(name, blank)[rows, at] = x[real]

  for tiles in _chunks(prompt - 1, chunk):
    rows = np.repeat(np.arange(count), len(tiles))
    at = np.tile(tiles, (count, 1))
    tokens = padded[rows[:, None], at]
    (pages, _), values = _prefill(
        params, pages, tokens, at, table[rows], cfg=cfg
    )
    keep(values, np.repeat(rows, at.shape[1]), at.reshape(-1))
  rows = np.arange(count)
  for now in range(prompt - 1, ends.max()):
    at = np.where(now < ends, now, -1).astype(np.int32)
    (out, pages, _), values = _step(
        params, pages, padded[:, now], at, table, cfg=cfg
    )
    keep(values, rows, at)
    logps[:, now] = np.asarray(out)[rows, padded[:, now + 1]]
  return [
      Record(
          {name: x[i, :end] for name, x in found.items()}
          | {_LOGP: logps[i, prompt - 1 : end - 1]}
      )
      for i, end in enumerate(ends)
  ]


def _chunks(tokens: int, size: int) -> Iterator[np.ndarray]:
  """Positions of each chunk in tiles, i32 [tiles QUERY_ROWS], -1 for padding."""
  rows = contract.QUERY_ROWS
  for start in range(0, tokens, size):
    at = np.full(-(-size // rows) * rows, -1, np.int32)
    count = min(size, tokens - start)
    at[:count] = np.arange(start, start + count)
    yield at.reshape(-1, rows)


def train_step(
    state: batch_lib.TrainState,
    batch: batch_lib.Batch,
    denominator: float,
    *,
    cfg: config.ModelConfig,
    loss: batch_lib.Loss,
    tx: Any,
    mesh: jax.sharding.Mesh,
) -> Record:
  """Every op of a step's forward, then its metrics, gradients and new state.

  The leaves come from the very programs that train, in the order in which
  backpropagation makes them: from the head down, layer by layer.

  Args:
    state: state before the step; it is left alone.
    batch: the step's only one.
    denominator: Z of the step.
    cfg: the model.
    loss: what to minimise; a reference is the state itself.
    tx: the optimizer.
    mesh: the trainer's.
  """
  params = jax.device_get(jax.jit(step_lib.rounded)(state.params))
  _, values = _score(params, batch, cfg=cfg)
  rows = jax.NamedSharding(mesh, jax.P(sharding.ROWS))
  grads, metrics = step_lib.gradients(
      state.params,
      jax.device_put(batch, rows),
      jnp.asarray(denominator, jnp.float32),
      cfg=cfg,
      loss=loss,
      mesh=mesh,
      reference=state.params if loss_inputs.needs_reference(loss) else None,
  )
  after = step_lib.apply_gradients(jax.tree.map(jnp.copy, state), grads, tx=tx)
  leaves = {f'metric {k}': m for k, m in _leaves(dict(metrics))}
  leaves |= {f'gradient of {k}': g for k, g in _backward(grads, cfg)}
  leaves |= {f'new {k}': x for k, x in _leaves(after)}
  return Record(_by_layer(values), leaves)


def of_run(
    cfg: config.Experiment, workdir: pathlib.Path, mesh: jax.sharding.Mesh
) -> dict[str, Record]:
  """Records of a run's newest weights on some of its trajectories.

  Args:
    cfg: the run's experiment.
    workdir: directory of the run, which has a finished RL checkpoint.
    mesh: the trainer's.

  Returns:
    'decoder 0' and 'trainer 0', which must be equal, and so on for a few
    windows; 'train step' from the newest checkpoint, on the same windows.

  Raises:
    ValueError: the run has no trajectory, weights or checkpoint.
  """
  kept = sorted((workdir / 'trajectories').glob('[0-9]*/*.traj'))
  if not kept:
    raise ValueError(f'{workdir}: holds no trajectory of a training step')
  rollouts = [trace.from_bytes(p.read_bytes()) for p in kept[-_ROLLOUTS:]]
  texts = [s.tokens for r in rollouts for s in r.segments]
  prompt = min(s.sampled.argmax() for r in rollouts for s in r.segments)
  shape = packing.Shape(
      cfg.rl.rows_per_batch, cfg.rl.tokens_per_row, contract.KEY_BLOCK
  )
  url = f'file://{(workdir / "weights").resolve()}/'
  version, params = feed.FixedFeed(url).first
  both = {
      'trainer': trainer(params, texts, prompt, cfg=cfg.model, shape=shape),
      'decoder': decoder(params, texts, prompt, cfg=cfg.model, chunk=_CHUNK),
  }
  signs = [1.0 - 2.0 * (i % 2) for i in range(len(rollouts))]
  batch, _ = packing.pack(
      items.from_trajectories(rollouts, signs),
      shape,
      now=version.step,
      replay=cfg.model,
  )
  step = train_step(
      run_digest.restored(cfg, workdir, 'rl', mesh),
      batch,
      float(len(rollouts) * cfg.rl.norm_tokens),
      cfg=cfg.model,
      loss=cfg.loss,
      tx=cfg.rl_optimizer.build(),
      mesh=mesh,
  )
  numbered = {
      f'{role} {i}': record
      for role, found in both.items()
      for i, record in enumerate(found)
  }
  return numbered | {'train step': step}


def _leaves(tree: Any) -> Iterator[tuple[str, np.ndarray]]:
  for path, x in jax.tree_util.tree_leaves_with_path(jax.device_get(tree)):
    yield jax.tree_util.keystr(path, simple=True, separator='/'), np.asarray(x)


def _backward(
    grads: params_lib.Params, cfg: config.ModelConfig
) -> Iterator[tuple[str, np.ndarray]]:
  """Leaves in the order of backpropagation, those of each layer apart."""
  first = {'layers': cfg.dense_layers, 'dense_layers': 0}
  leaves = list(_leaves(grads))[::-1]
  for stack, group in itertools.groupby(
      leaves, lambda leaf: leaf[0].partition('/')[0]
  ):
    if stack not in first:
      yield from group
      continue
    stacked = list(group)
    for i in reversed(range(len(stacked[0][1]))):
      for name, x in stacked:
        yield f'{name}, layer {first[stack] + i}', x[i]
