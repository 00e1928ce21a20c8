"""What a folder of a published model holds, and what it would take to run it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import functools
import math
import pathlib

import jax
from rich import console
from rich import filesize
import tokenizers

from composer_jax import config
from composer_jax.chat import chat_renderer
from composer_jax.inspect import tables
from composer_jax.learner import optimizer
from composer_jax.learner import step
from composer_jax.model import decode
from composer_jax.model import families
from composer_jax.model import flops
from composer_jax.model import hf
from composer_jax.model import params as params_lib
from composer_jax.model import sharding
from composer_jax.runs import conversion
from composer_jax.runs import footprint
from composer_jax.runs import progress
from composer_jax.runs import stored_model
from kernels_triton import contract

_SAMPLE = 'def add(a, b):\n    """Returns a + b."""\n    return a + b\n'


def of_folder(
    folder: pathlib.Path, mesh: config.MeshConfig
) -> Iterator[console.RenderableType]:
  """Everything about a model; its files are opened and checked first.

  Args:
    folder: folder of the model.
    mesh: mesh of the trainer whose memory is worked out.

  Raises:
    ValueError: a file is missing or damaged, the family is unknown, or the mesh
      does not divide the model.
  """
  fields = hf.read_config(folder)
  cfg = families.to_config(fields)
  with hf.Reader(folder, cfg) as reader:
    files = reader.files
  params_lib.check_split(cfg, sharding.RULES, vars(mesh))
  stored = conversion.model_of(folder, folder.name)
  total, active = params_lib.count(cfg)
  size = sum(file.stat().st_size for file in files)
  yield _table(
      'architecture',
      {
          'family': fields['model_type'],
          'parameters': f'{total:,}, {active:,} active per token',
          'files': (
              f'{len(files)}, {filesize.decimal(size)}, every tensor is there'
          ),
          **_architecture(cfg),
          'context': f'{stored.context_tokens:,} tokens',
      },
  )
  yield _parts(cfg)
  yield _table(f'memory of a device, {mesh.text()}', _memory(cfg, mesh))
  yield _table('tokenizer', _tokenizer(cfg, stored))


def _table(title: str, rows: Mapping[str, str]) -> console.RenderableType:
  out = tables.grid(title)
  out.add_column()
  for row in rows.items():
    out.add_row(*row)
  return out


def _architecture(cfg: config.ModelConfig) -> dict[str, str]:
  """Fields of the config that differ from what every model has."""
  yes = [n for n in ('qkv_bias', 'qk_norm', 'tied') if getattr(cfg, n)]
  out = {
      'layers': f'{cfg.layers} of width {cfg.embed}',
      'attention': (
          f'{cfg.q_heads} heads of {cfg.head_dim} on a latent of'
          f' {cfg.kv_latent}, {cfg.rope_dim} more rotate'
          if cfg.kv_latent
          else f'{cfg.q_heads} query, {cfg.kv_heads} key heads of {cfg.head_dim}'
      ),
      'positions': f'rope theta {cfg.rope_theta:g}, {_scaling(cfg)}',
  }
  if cfg.experts:
    gates = 'renormalised' if cfg.renormalize else 'as they are'
    shared = f', {cfg.shared_experts} shared' if cfg.shared_experts else ''
    out['experts'] = (
        f'{cfg.experts} of width {cfg.moe_ffn}, {cfg.top_k} per token{shared}'
    )
    out['router'] = f'{cfg.router}, gates {gates} x {cfg.routed_scale:g}'
    if cfg.dense_layers:
      out['first layers'] = (
          f'{cfg.dense_layers} dense, of width {cfg.dense_ffn}'
      )
  if yes:
    out['besides'] = ', '.join(yes)
  return out


def _scaling(cfg: config.ModelConfig) -> str:
  scaling = cfg.rope_scaling
  if scaling is None:
    return 'not scaled'
  kind = type(scaling).__name__
  return f'{kind} x {scaling.factor:g} of {scaling.original_tokens:,} tokens'


def _parts(cfg: config.ModelConfig) -> console.RenderableType:
  """Parameters by part."""
  out = tables.grid('parameters', 'tensor', 'shape', 'number', 'of all')
  total = params_lib.count(cfg)[0]
  for name, leaf in params_lib.names(params_lib.abstract(cfg)).items():
    size = math.prod(leaf.shape)
    shape = ' x '.join(map(str, leaf.shape))
    out.add_row(name, shape, progress.figure(size), f'{size / total:.1%}')
  return out


def _memory(cfg: config.ModelConfig, mesh: config.MeshConfig) -> dict[str, str]:
  """What one device of the trainer, and a rollout host, would hold."""
  devices = step.abstract_mesh(mesh)
  state = step.abstract_state(cfg, optimizer.AdamW().build(), devices)
  masters = footprint.held(state.params)
  moments = footprint.held(state.opt_state)
  pages = jax.eval_shape(functools.partial(decode.init_pages, cfg, 1))
  cache = footprint.held(pages) / contract.KEY_BLOCK
  return {
      'masters, f32': filesize.decimal(masters),
      'gradients, f32': filesize.decimal(masters),
      'AdamW': filesize.decimal(moments),
      'all three': filesize.decimal(2 * masters + moments),
      'a rollout host, bf16': filesize.decimal(2 * params_lib.count(cfg)[0]),
      'its cache': f'{cache:,.0f} bytes per token',
      'training': f'{flops.train(cfg, 4096) / 1e9:,.3g} GFLOP per token (4096)',
      'decoding': f'{flops.forward(cfg, 4096) / 1e9:,.3g} GFLOP per token',
  }


def _tokenizer(
    cfg: config.ModelConfig, stored: stored_model.StoredModel
) -> dict[str, str]:
  tokenizer = tokenizers.Tokenizer.from_str(stored.tokenizer)
  ids = tokenizer.encode(_SAMPLE, add_special_tokens=False).ids
  added = tokenizer.get_added_tokens_decoder().values()
  try:
    chat_renderer.ChatRenderer(stored.chat_format())
    tools = 'tasks can be played in its own format'
  except ValueError as e:
    tools = str(e)
  return {
      'entries': f'{tokenizer.get_vocab_size():,}; the model has {cfg.vocab:,}',
      'special tokens': str(sum(t.special for t in added)),
      'ends of a reply': ', '.join(stored.stop),
      'bytes per token': (
          f'{len(_SAMPLE) / len(ids):.2f} of a Python function,'
          + (
              ' lossless'
              if tokenizer.decode(ids) == _SAMPLE
              else ' NOT lossless'
          )
      ),
      'tools': tools,
  }
