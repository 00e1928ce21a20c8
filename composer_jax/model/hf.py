"""Models as they are published: a folder of safetensors and a config.json.

One tensor is in memory at a time besides our own. Everything is checked before
anything is read, and a folder is complete or not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import json
import os
import pathlib
import shutil
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from composer_jax import config
from composer_jax.model import families
from composer_jax.model import params as params_lib
from composer_jax.model import pieces as pieces_lib

CONFIG = 'config.json'
_INDEX = 'model.safetensors.index.json'
_SINGLE = 'model.safetensors'
_SHARD_BYTES = 4 * 1024**3
_NAMED = 4  # tensors that an error lists


def read_config(folder: pathlib.Path) -> dict[str, Any]:
  """Fields of a folder's config.json.

  Raises:
    ValueError: there is none, or it is no JSON object.
  """
  path = folder / CONFIG
  try:
    fields = json.loads(path.read_text(encoding='utf-8'))
  except OSError as e:
    raise ValueError(f'{path}: {e.strerror}; name a folder of a model') from e
  except ValueError as e:
    raise ValueError(f'{path}: no JSON: {e}') from e
  if not isinstance(fields, dict):
    raise ValueError(f'{path}: holds no JSON object')
  return fields


def load(
    folder: pathlib.Path,
    cfg: config.ModelConfig,
    dtype: Any = ml_dtypes.bfloat16,
    ended: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
  """Reads a model's tensors.

  Args:
    folder: of the model.
    cfg: from its config.
    dtype: of the result, but for what is published in f32.
    ended: called after every tensor that is read.

  Returns:
    Our names -> arrays, as `params.from_names` takes them.

  Raises:
    ValueError: files are missing or cut, or tensors missing, unexpected or of
      another shape; all that is wrong, in one line.
  """
  shapes = params_lib.names(params_lib.abstract(cfg))
  out = {
      name: np.empty(s.shape, np.float32 if name == params_lib.EXACT else dtype)
      for name, s in shapes.items()
  }
  pieces = {piece.published: piece for piece in pieces_lib.of(cfg)}
  with contextlib.ExitStack() as stack:
    where = _files(folder, stack)
    _check(folder, cfg, where, pieces, out)
    for name, piece in pieces.items():
      part = out[piece.name][piece.index]
      part[...] = piece.part(where[name].get_tensor(name), part.shape)
      ended()
  return out


def _files(folder: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Any]:
  """Tensor name -> the open file that holds it."""
  index = folder / _INDEX
  names = [_SINGLE]
  if index.is_file():
    weight_map = json.loads(index.read_text(encoding='utf-8'))['weight_map']
    names = sorted(set(weight_map.values()))
  found = {}
  for name in names:
    path = folder / name
    try:
      file = stack.enter_context(safetensors.safe_open(path, 'numpy'))
    except (OSError, safetensors.SafetensorError) as e:
      raise ValueError(f'{path}: missing or damaged: {e}') from e
    found.update(dict.fromkeys(file.keys(), file))
  return found


def _check(folder, cfg, where, pieces, ours) -> None:
  extra = {
      n for n in where.keys() - pieces.keys() if not pieces_lib.is_known(cfg, n)
  }
  shapes = {
      n: tuple(where[n].get_slice(n).get_shape()) for n in pieces if n in where
  }
  wrong = [
      f'{n} is {shape}, want {want}'
      for n, shape in shapes.items()
      if shape != (want := pieces[n].shape(_part(pieces[n], ours).shape))
  ]
  problems = [
      f'{kind} {len(names)}: {", ".join(sorted(names)[:_NAMED])}'
      for kind, names in (
          ('missing', pieces.keys() - where.keys()),
          ('unexpected', extra),
          ('of another shape', wrong),
      )
      if names
  ]
  if problems:
    raise ValueError(f'{folder}: tensors {"; ".join(problems)}')


def save(
    folder: pathlib.Path,
    cfg: config.ModelConfig,
    named: Mapping[str, np.ndarray],
    files: Mapping[str, str],
    context_tokens: int,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
  """Writes a model for other engines.

  Args:
    folder: to make; must not exist.
    cfg: the model.
    named: our names -> arrays.
    files: further files, such as the tokenizer's: name -> text.
    context_tokens: longest window, for the config.
    shard_bytes: most bytes of a file; a larger tensor has one of its own.

  Raises:
    ValueError: the folder exists, or no family can express the model.
  """
  fields = families.to_fields(cfg, context_tokens)
  if folder.exists():
    raise ValueError(f'{folder}: exists; name a new folder')
  folder.parent.mkdir(parents=True, exist_ok=True)
  scratch = folder.with_name(f'.{folder.name}-{os.getpid()}')
  scratch.mkdir()
  try:
    shards = list(_shards(cfg, named, shard_bytes))
    weight_map = {}
    for i, names in enumerate(shards, 1):
      name = _SINGLE
      if len(shards) > 1:
        name = f'model-{i:05}-of-{len(shards):05}.safetensors'
      tensors = {n: p.tensor(_part(p, named)) for n, p in names.items()}
      safetensors_numpy.save_file(tensors, scratch / name, {'format': 'pt'})
      weight_map |= dict.fromkeys(names, name)
    if len(shards) > 1:
      size = sum(a.nbytes for a in named.values())
      index = {'metadata': {'total_size': size}, 'weight_map': weight_map}
      files = {**files, _INDEX: json.dumps(index, indent=2)}
    for name, text in {**files, CONFIG: json.dumps(fields, indent=2)}.items():
      (scratch / name).write_text(text + '\n', encoding='utf-8')
    for name in set(weight_map.values()):  # safetensors keeps others out
      (scratch / name).chmod((scratch / CONFIG).stat().st_mode)
    os.rename(scratch, folder)
  except BaseException:
    shutil.rmtree(scratch, ignore_errors=True)
    raise


def _part(piece: pieces_lib.Piece, named) -> np.ndarray:
  return np.asarray(named[piece.name])[piece.index]


def _shards(cfg, named, most) -> Iterator[dict[str, pieces_lib.Piece]]:
  shard, size = {}, 0
  for piece in pieces_lib.of(cfg):
    part = _part(piece, named).nbytes
    if shard and size + part > most:
      yield shard
      shard, size = {}, 0
    shard[piece.published] = piece
    size += part
  yield shard
