"""The resolved plan of a run as text: what it will do, in which units.

A function of the experiment and, for a mesh that is not here, of what was found
out about its programs; nothing is allocated or compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import functools
import math

import jax

from composer_jax import config
from composer_jax.model import decode
from composer_jax.model import params as params_lib
from composer_jax.model import sharding
from composer_jax.rollout import device
from composer_jax.runs import footprint
from kernels_triton import contract


def check(cfg: config.Experiment) -> None:
  """Refuses what cannot be split or cut, too few rows, clocks at odds.

  Raises:
    ValueError: names the field, its value and what it must be.
  """
  harness = cfg.harness
  tools = harness.max_turns * harness.tool_seconds
  if harness.episode_seconds <= tools:
    raise ValueError(
        f'harness.episode_seconds={harness.episode_seconds}: must be above'
        f' {tools:g}, max_turns * tool_seconds; an episode that uses its tools'
        ' to the full would fail'
    )
  if cfg.rl.lease_seconds > harness.episode_seconds:
    raise ValueError(
        f'rl.lease_seconds={cfg.rl.lease_seconds}: must be at most'
        f' harness.episode_seconds={harness.episode_seconds}; it is how soon a'
        ' dead worker is noticed, not how long an episode may take'
    )
  mesh = dataclasses.asdict(cfg.mesh)
  params_lib.check_split(cfg.model, sharding.RULES, mesh)
  for name, (rows, tokens) in _shapes(cfg).items():
    field = 'rows_per_batch' if name == 'rl' else 'rows_per_step'
    name = name if name == 'rl' else f'phases.{name}'
    if rows < 1 or rows % cfg.mesh.row_shards:
      raise ValueError(
          f'{name}.{field}={rows}: must be a positive multiple of'
          f' {cfg.mesh.row_shards}, the parts that {cfg.mesh.text()} splits rows'
          ' into'
      )
    if tokens < 1 or tokens % contract.KEY_BLOCK:
      raise ValueError(
          f'{name}.tokens_per_row={tokens}: must be a positive multiple of'
          f' {contract.KEY_BLOCK}, the attention key block'
      )
  # All windows of a rollout go into one batch: a loss may reduce over them.
  aligned = -(-cfg.harness.max_context_tokens // contract.KEY_BLOCK)
  per_row = max(1, cfg.rl.tokens_per_row // (aligned * contract.KEY_BLOCK))
  if cfg.rl.rows_per_batch * per_row < _windows(cfg):
    raise ValueError(
        f'rl.rows_per_batch={cfg.rl.rows_per_batch}: a rollout of up to'
        f' {_windows(cfg)} windows, {per_row} in a row, is never split over'
        ' batches; raise it'
    )


def _windows(cfg: config.Experiment) -> int:
  """Most windows of a rollout: a turn comes before every summary."""
  summing = cfg.harness.summary_trigger_tokens is not None
  return cfg.harness.max_turns if summing else 1


def text(cfg: config.Experiment, found: footprint.Shapes | None = None) -> str:
  """Returns the plan: work, batch arithmetic, memory, shapes to compile.

  Args:
    cfg: the experiment.
    found: sizes of its steps; they take the place of an estimate.

  Raises:
    ValueError: as `check`.
  """
  check(cfg)
  sections = (
      ('Model', _model(cfg)),
      ('Work', _work(cfg)),
      ('RL step', _rl_step(cfg)),
      *(
          footprint.sections(found, cfg)
          if found
          else [('Memory, estimated', _memory(cfg))]
      ),
      ('Programs to compile', _programs(cfg)),
  )
  lines = [f'Experiment {cfg.name}, seed {cfg.seed}']
  for title, rows in sections:
    lines += ['', title]
    lines += [f'  {name:<26} {value}' for name, value in rows]
  return '\n'.join(lines)


_Rows = Iterable[tuple[str, str]]


def _model(cfg: config.Experiment) -> _Rows:
  m = cfg.model
  total, active = params_lib.count(m)
  yield 'parameters', f'{total:,} ({active:,} active per token)'
  dense = f', {m.dense_layers} dense at first' if m.dense_layers else ''
  yield 'layers', f'{m.layers} of width {m.embed}{dense}, activations {m.dtype}'
  shared = f' and {m.shared_experts} shared' if m.shared_experts else ''
  yield 'experts', f'{m.experts} per layer, {m.top_k} per token{shared}'
  yield 'mesh', f'{cfg.mesh.devices} devices, {cfg.mesh.text()}'
  yield 'loss', repr(cfg.loss)


def _work(cfg: config.Experiment) -> _Rows:
  for p in cfg.phases:
    tokens = p.rows_per_step * p.tokens_per_row
    total = sum(weight for _, weight in p.mix)
    mix = ', '.join(f'{weight / total:.0%} {name}' for name, weight in p.mix)
    yield p.name, (
        f'{p.steps:,} steps x {p.rows_per_step} rows x {p.tokens_per_row}'
        f' tokens = {p.steps * tokens:,} tokens ({tokens:,} per step): {mix}'
    )
  rl = cfg.rl
  per_step = rl.groups_per_step * rl.rollouts_per_group
  yield 'rl', (
      f'{rl.steps:,} steps x {per_step} rollouts ='
      f' {rl.steps * per_step:,} rollouts'
  )
  times = 2 + max(0, (rl.steps - 1) // rl.eval_every_steps)
  yield 'evaluation', (
      f'{cfg.evaluation.tasks} tasks, {times} times: before, every'
      f' {rl.eval_every_steps} RL steps, and at the end'
  )


def _rl_step(cfg: config.Experiment) -> _Rows:
  rl, rollout = cfg.rl, cfg.rollout
  rollouts = rl.groups_per_step * rl.rollouts_per_group
  capacity = rl.rows_per_batch * rl.tokens_per_row
  windows = rollouts * _windows(cfg)
  most = windows * rollout.context_tokens
  yield 'batch', (
      f'{rl.groups_per_step} prompts x {rl.rollouts_per_group} rollouts ='
      f' {rollouts} rollouts'
  )
  yield 'tasks', (
      f'a prompt plays one of {rl.candidates_per_prompt}, rather not of a kind'
      ' that is always solved; none is played twice'
  )
  yield 'capacity', (
      f'{rl.rows_per_batch} rows x {rl.tokens_per_row} tokens ='
      f' {capacity:,} tokens per program call'
  )
  yield 'at most', (
      f'{windows} windows x {rollout.context_tokens} tokens = {most:,} tokens'
      f' = {math.ceil(most / capacity)} calls'
  )
  yield 'denominator Z', (
      f'{rollouts} rollouts x norm_tokens {rl.norm_tokens} ='
      f' {rollouts * rl.norm_tokens:,}'
  )
  yield 'in flight', f'{rl.workers} rollouts on {rollout.slots} decode slots'
  yield 'staleness', (
      f'at most {rl.max_staleness_versions} versions when admitted; tokens'
      f' older than {rl.withhold_staleness_versions} versions are not trained'
  )


def memory(cfg: config.Experiment) -> dict[str, int]:
  """Estimated bytes of a run by what they hold, programs and libraries apart."""
  masters = params_lib.abstract(cfg.model)
  moments = jax.eval_shape(cfg.rl_optimizer.build().init, masters)
  cache = jax.eval_shape(
      functools.partial(
          decode.init_pages,
          cfg.model,
          device.page_count(cfg.rollout),
      )
  )
  return {
      'masters (f32)': footprint.held(masters),
      'gradients (f32)': footprint.held(masters),
      'optimizer state': footprint.held(moments),
      'decode weights': footprint.held(masters),
      'KV cache': footprint.held(cache),
      'activations, about': _activation_bytes(cfg),
  }


def _memory(cfg: config.Experiment) -> _Rows:
  sizes = memory(cfg)
  for name, size in sizes.items():
    yield name, _mib(size)
  yield 'sum', f'{_mib(sum(sizes.values()))}, programs and libraries apart'


def _activation_bytes(cfg: config.Experiment) -> int:
  """What the backward pass of the largest micro-batch keeps, roughly."""
  m = cfg.model
  rows = max(rows * tokens for rows, tokens in _shapes(cfg).values())
  head = m.kv_latent + m.rope_dim if m.kv_latent else m.head_dim
  width = 6 * m.embed + 4 * m.q_heads * head + m.experts
  width += 4 * (m.top_k + m.shared_experts) * m.moe_ffn
  return 4 * rows * m.layers * width


def _programs(cfg: config.Experiment) -> _Rows:
  for name, (rows, tokens) in _shapes(cfg).items():
    yield f'{name} step', f'tokens [{rows} {tokens}]'
  r = cfg.rollout
  yield 'prefill', f'up to {r.prefill_tokens} tokens, in a few sizes'
  yield 'decode', (
      f'up to {r.slots} slots x {r.steps_per_sync} steps, in a few sizes'
  )


def _shapes(cfg: config.Experiment) -> dict[str, tuple[int, int]]:
  """(rows, tokens per row) that each phase compiles its step for."""
  phases = {p.name: (p.rows_per_step, p.tokens_per_row) for p in cfg.phases}
  return phases | {'rl': (cfg.rl.rows_per_batch, cfg.rl.tokens_per_row)}


def _mib(size: int) -> str:
  return f'{size / 2**20:,.1f} MiB'
