"""What a step takes of each device of a mesh, from its shapes alone.

The train step and the decode step are traced and lowered on abstract arrays,
the train step is compiled too: no weight is ever made, so a model of any size
can be looked at on a small machine that pretends to have the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import dataclasses
import functools
import math
from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import jax.numpy as jnp
from rich import filesize

from composer_jax import config
from composer_jax import trace
from composer_jax.learner import batch as batch_lib
from composer_jax.learner import loss_inputs
from composer_jax.learner import step
from composer_jax.model import decode
from composer_jax.model import flops
from composer_jax.model import params as params_lib
from composer_jax.model import sharding
from composer_jax.rollout import device
from kernels_triton import contract
from kernels_triton import launch

# Primitive -> what it is called elsewhere.
_KINDS = {
    'psum': 'all-reduce',
    'all_gather': 'all-gather',
    'reduce_scatter': 'reduce-scatter',
    'all_to_all': 'all-to-all',
    'ppermute': 'permute',
}


@dataclasses.dataclass(frozen=True)
class Collective:
  """All collectives of one kind over the same mesh axes.

  Attributes:
    kind: name such as 'all-gather'.
    axes: mesh axes that its devices differ in.
    count: arrays that a device gives to it.
    bytes: bytes that a device sends, and receives, if each goes around a
      ring (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms").
  """

  kind: str
  axes: tuple[str, ...]
  count: int
  bytes: int


@dataclasses.dataclass(frozen=True)
class Shapes:
  """Sizes are bytes; all but those of the decoder are of one mesh device.

  Attributes:
    parameters: f32 masters, and those of a reference policy if there is one.
    gradients: f32, of one micro-batch; another set is held to add them up.
    optimizer: its state.
    batch: one micro-batch.
    backward: what forward and backward hold besides, at their peak.
    update: the same of the optimizer's update.
    collectives: those of forward and backward of one micro-batch.
    decoder: weights of a rollout device, which holds all of them.
    cache: keys and values of one token.
    train_flops: operations of a token's two passes in a full row.
    decode_flops: operations of a token that sees a full context.
  """

  parameters: int
  gradients: int
  optimizer: int
  batch: int
  backward: int
  update: int
  collectives: tuple[Collective, ...]
  decoder: int
  cache: int
  train_flops: float
  decode_flops: float

  @property
  def peak(self) -> int:
    """Bytes of a trainer that sums the gradients of several micro-batches."""
    state = self.parameters + self.optimizer + self.gradients
    return state + max(self.gradients + self.batch + self.backward, self.update)


def of(cfg: config.Experiment) -> Shapes:
  """Lowers the steps of RL; jax must have the devices of the mesh.

  Raises:
    ValueError: there are fewer devices, or they cannot split the model.
  """
  model = dataclasses.replace(cfg.model, kernels=launch.REFERENCE)
  mesh, tx = step.make_mesh(cfg.mesh), cfg.rl_optimizer.build()
  state = step.abstract_state(model, tx, mesh)
  rows, scalar = batch(cfg, mesh), jax.ShapeDtypeStruct((), jnp.float32)
  reference = loss_inputs.needs_reference(cfg.loss)
  traced = step.gradients.trace(
      state.params,
      rows,
      scalar,
      cfg=model,
      loss=cfg.loss,
      mesh=mesh,
      tokens=scalar,
      reference=state.params if reference else None,
  )
  update = step.apply_gradients.trace(state, state.params, tx=tx)
  backward, optimizer = (
      t.lower().compile().memory_analysis().temp_size_in_bytes
      for t in (traced, update)
  )
  weights, pages = _lower_decode(model, cfg.rollout)
  tokens = device.page_count(cfg.rollout) * contract.KEY_BLOCK
  return Shapes(
      parameters=held(state.params) * (1 + reference),
      gradients=held(state.params),
      optimizer=held(state.opt_state),
      batch=held(rows),
      backward=backward,
      update=optimizer,
      collectives=tuple(collectives(traced.jaxpr, mesh.shape)),
      decoder=held(weights),
      cache=held(pages) // tokens,
      train_flops=flops.train(model, cfg.rl.tokens_per_row),
      decode_flops=flops.forward(model, cfg.rollout.context_tokens),
  )


def held(tree: Any) -> int:
  """Bytes of abstract arrays on one device."""

  def size(x: jax.ShapeDtypeStruct) -> int:
    shape = x.sharding.shard_shape(x.shape) if x.sharding else x.shape
    return math.prod(shape) * x.dtype.itemsize

  return sum(map(size, jax.tree.leaves(tree)))


def batch(cfg: config.Experiment, mesh: jax.sharding.Mesh) -> batch_lib.Batch:
  """A micro-batch with recorded routes."""
  rows = NamedSharding(mesh, PartitionSpec(sharding.ROWS))
  shape, m = (cfg.rl.rows_per_batch, cfg.rl.tokens_per_row), cfg.model

  def array(dtype: Any, *more: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*shape, *more), dtype, sharding=rows)

  return batch_lib.Batch(
      tokens=array(jnp.int32),
      segments=array(jnp.int32),
      positions=array(jnp.int32),
      rollouts=array(jnp.int32),
      sampled=array(jnp.bool_),
      behaviour_logps=array(jnp.float32),
      advantages=array(jnp.float32),
      staleness=array(jnp.int32),
      routing=array(trace.route_dtype(m.experts), m.moe_layers, m.top_k),
  )


def _lower_decode(
    model: config.ModelConfig, rollout: config.RolloutConfig
) -> tuple[params_lib.Params, decode.Pages]:
  """Lowers a step of all slots; returns its abstract weights and pages."""
  weights = jax.eval_shape(
      params_lib.publish_dtype,
      params_lib.without_mtp(params_lib.abstract(model)),
  )
  pages = jax.eval_shape(
      functools.partial(decode.init_pages, model, device.page_count(rollout))
  )
  width = device.table_width(rollout)
  ids = jax.ShapeDtypeStruct((rollout.slots,), jnp.int32)
  table = jax.ShapeDtypeStruct((rollout.slots, width), jnp.int32)
  decode_step = functools.partial(decode.step, cfg=model)
  jax.jit(decode_step).lower(weights, pages, ids, ids, table)
  return weights, pages


def collectives(
    program: core.ClosedJaxpr, mesh: dict[str, int]
) -> Iterator[Collective]:
  """What the devices of a mesh say to each other, in a traced program.

  Args:
    program: traced `shard_map`; nothing is known of what a partitioner adds.
    mesh: axis -> its size.

  Raises:
    ValueError: one stands in a loop of unknown length.
  """
  sums: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
  for eqn, times in _equations(program.jaxpr, 1):
    kind = _KINDS[eqn.primitive.name]
    names = eqn.params.get('axes') or eqn.params['axis_name']
    names = (names,) if isinstance(names, str) else names
    axes = tuple(name for name in names if mesh[name] > 1)
    size = math.prod(mesh[name] for name in axes)
    if size == 1:
      continue
    arrays = eqn.outvars if kind == 'all-gather' else eqn.invars
    whole = sum(x.aval.size * x.aval.dtype.itemsize for x in arrays)
    moved = whole * (size - 1) // size * (2 if kind == 'all-reduce' else 1)
    count, total = sums.get((kind, axes), (0, 0))
    sums[kind, axes] = count + times * len(arrays), total + times * moved
  for (kind, axes), figures in sums.items():
    yield Collective(kind, axes, *figures)


def _equations(
    jaxpr: core.Jaxpr, times: int | None
) -> Iterator[tuple[core.JaxprEqn, int]]:
  """Collectives, and how often a loop of loops runs each."""
  for eqn in jaxpr.eqns:
    name, inner = eqn.primitive.name, times
    if name in _KINDS:
      if times is None:
        raise ValueError(f'{name}: in a loop of unknown length')
      yield eqn, times
    elif name == 'while':
      inner = None
    elif name == 'scan' and times is not None:
      inner = times * eqn.params['length']
    for part in core.jaxprs_in_params(eqn.params):
      yield from _equations(part, inner)


_Rows = Iterable[tuple[str, str]]


def sections(
    found: Shapes, cfg: config.Experiment
) -> Iterator[tuple[str, _Rows]]:
  """(title, rows) for people."""
  yield f'Memory of a device, of {cfg.mesh.devices}', _memory(found)
  yield 'Collectives of a micro-batch, per device', _collectives(found)
  yield 'Floating-point operations, by formula', _flops(found, cfg)
  yield 'Decoder, on one device', _decoder(found, cfg)
  yield 'How it was found', (
      ('train step', 'compiled, and the decode step lowered, on no weights'),
      (
          'kernels',
          'the reference, for a CPU: it multiplies in f32, and sums blocks of'
          f' {contract.ROWS} rows apart',
      ),
  )


def _memory(found: Shapes) -> _Rows:
  yield 'parameters (f32)', filesize.decimal(found.parameters)
  yield 'gradients (f32)', filesize.decimal(found.gradients)
  yield 'optimizer state', filesize.decimal(found.optimizer)
  yield 'a micro-batch', filesize.decimal(found.batch)
  yield 'activations and copies', (
      f'{filesize.decimal(found.backward)}, from the compiled step'
  )
  yield 'copies of an update', (
      f'{filesize.decimal(found.update)}, from the compiled update'
  )
  yield 'peak', (
      f'{filesize.decimal(found.peak)}, gradients twice to add them up'
  )


def _collectives(found: Shapes) -> _Rows:
  for c in found.collectives:
    yield f'{c.kind}, {" x ".join(c.axes)}', (
        f'{c.count:,} arrays, {filesize.decimal(c.bytes)} sent and received'
    )
  total = sum(c.bytes for c in found.collectives)
  yield 'sum', filesize.decimal(total)


def _flops(found: Shapes, cfg: config.Experiment) -> _Rows:
  rows, tokens = cfg.rl.rows_per_batch, cfg.rl.tokens_per_row
  each = found.train_flops * rows * tokens / cfg.mesh.devices
  yield 'training', (
      f'{found.train_flops / 1e9:,.4g} GFLOP per token of a row of {tokens:,};'
      f' {each / 1e12:,.4g} TFLOP per device and micro-batch'
  )
  yield 'decoding', (
      f'{found.decode_flops / 1e9:,.4g} GFLOP per token after'
      f' {cfg.rollout.context_tokens:,}'
  )


def _decoder(found: Shapes, cfg: config.Experiment) -> _Rows:
  pages = device.page_count(cfg.rollout) * contract.KEY_BLOCK
  yield 'weights', f'{filesize.decimal(found.decoder)}, not split'
  yield 'cache', (
      f'{found.cache:,} bytes per token x {pages:,} tokens ='
      f' {filesize.decimal(found.cache * pages)}'
  )
