"""Models as they are published: a folder of safetensors and a config.json.

One tensor is in memory at a time besides our own. Everything is checked before
anything is read, and a folder is complete or not there.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import json
import math
import pathlib
from typing import Any, Self

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from composer_jax import atomic
from composer_jax import config
from composer_jax.model import families
from composer_jax.model import hf_tensors
from composer_jax.model import params as params_lib

CONFIG = 'config.json'
_INDEX = 'model.safetensors.index.json'
_SINGLE = 'model.safetensors'
_SHARD_BYTES = 4 * 1024**3
_NAMED = 4  # tensors that an error lists
_EVERY = slice(None)


def read_config(folder: pathlib.Path) -> dict[str, Any]:
  """Fields of a folder's config.json.

  Raises:
    ValueError: there is none, or it is no JSON object.
  """
  path = folder / CONFIG
  try:
    fields = json.loads(path.read_text(encoding='utf-8-sig'))
  except OSError as e:
    raise ValueError(f'{path}: {e.strerror}; name a folder of a model') from e
  except (ValueError, RecursionError) as e:
    raise ValueError(f'{path}: no JSON: {e}') from e
  if not isinstance(fields, dict):
    raise ValueError(f'{path}: holds no JSON object')
  return fields


class Reader:
  """The tensors of a folder as parts of ours; a context manager.

  Everything is checked when it is opened. A part is read by the byte ranges of
  its files, so a process of a large job touches no more than its own shards.

  Attributes:
    files: those with weights.
    shapes: of our tensors.
  """

  def __init__(self, folder: pathlib.Path, cfg: config.ModelConfig):
    """Opens a model.

    Args:
      folder: of the model.
      cfg: from its config.

    Raises:
      ValueError: files are missing or cut, or tensors missing, unexpected or
        of another shape; all that is wrong, in one line.
    """
    self.shapes: Mapping[str, tuple[int, ...]] = {
        name: leaf.shape
        for name, leaf in params_lib.names(params_lib.abstract(cfg)).items()
    }
    self._pieces = collections.defaultdict(list)
    pieces = list(hf_tensors.of(cfg))
    for piece in pieces:
      self._pieces[piece.name].append(piece)
    self._folder = folder
    self.files = _shard_files(folder)
    with contextlib.ExitStack() as stack:
      self._where = _open(self.files, stack)
      _check(folder, cfg, self._where, pieces, self.shapes)
      self._stack = stack.pop_all()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    self._stack.close()

  def part(
      self, name: str, index: tuple[slice, ...] | None = None, dtype: Any = None
  ) -> np.ndarray:
    """Reads a part of one of our tensors.

    Args:
      name: of our tensor.
      index: a range without a step for every axis; None: all of it.
      dtype: of the result, but for what is published in f32; None: bf16.
    """
    shape = self.shapes[name]
    ranges = [
        range(*s.indices(n))
        for s, n in zip(index or [slice(None)] * len(shape), shape, strict=True)
    ]
    if name == params_lib.EXACT:
      dtype = np.float32
    out = np.empty([len(r) for r in ranges], dtype or ml_dtypes.bfloat16)
    for piece in self._pieces[name]:
      at = _index(piece, shape)
      held = [i == _EVERY or i in r for i, r in zip(at, ranges, strict=True)]
      if all(held):
        inside = tuple(
            i if i == _EVERY else i - r.start
            for i, r in zip(at, ranges, strict=True)
        )
        axes = [n for n, i in enumerate(at) if i == _EVERY]
        out[inside] = self._read(
            piece, [shape[n] for n in axes], [ranges[n] for n in axes]
        )
        if not np.isfinite(out[inside]).all():
          raise ValueError(
              f'{self._folder}: tensor {piece.published} holds NaN or infinity'
          )
    return out

  def _read(
      self, piece: hf_tensors.Piece, shape: list[int], ranges: list[range]
  ) -> np.ndarray:
    """Ranges of the axes that are left of a part of this shape."""
    file = self._where[piece.published].get_slice(piece.published)
    if piece.rows is None:
      if len(file.get_shape()) > 1:
        return file[tuple(_slice(r) for r in ranges)]
      return file[:].reshape(shape)[tuple(_slice(r) for r in ranges)]
    left = 1
    while math.prod(shape[:left]) < piece.rows:
      left += 1
    # The first axis of each side of the matrix is cut in the file, unless its
    # columns come in another order.
    cut = {0, left} - ({len(shape) - 1} if piece.turned else set())
    sizes = [len(r) if n in cut else shape[n] for n, r in enumerate(ranges)]
    cuts = []
    for first, end in ((0, left), (left, len(shape))):
      step = math.prod(shape[first + 1 : end])
      r = ranges[first] if first in cut else range(shape[first])
      cuts.append(slice(r.start * step, r.stop * step))
    part = piece.part(file[cuts[1], cuts[0]], tuple(sizes))
    return part[
        tuple(_EVERY if n in cut else _slice(r) for n, r in enumerate(ranges))
    ]


def _slice(r: range) -> slice:
  return slice(r.start, r.stop)


def load(
    folder: pathlib.Path,
    cfg: config.ModelConfig,
    dtype: Any = ml_dtypes.bfloat16,
    read: Callable[[int], None] = lambda count: None,
) -> dict[str, np.ndarray]:
  """Reads a whole model.

  Args:
    folder: of the model.
    cfg: from its config.
    dtype: of the result, but for what is published in f32.
    read: told how many parameters have been read, after every tensor of ours.

  Returns:
    Our names -> arrays, as `params.from_names` takes them.

  Raises:
    ValueError: see `Reader`.
  """
  out = {}
  with Reader(folder, cfg) as reader:
    for name in reader.shapes:
      out[name] = reader.part(name, dtype=dtype)
      read(out[name].size)
  return out


def load_sharded(
    folder: pathlib.Path,
    cfg: config.ModelConfig,
    shardings: params_lib.Params,
    dtype: Any = jnp.float32,
    read: Callable[[int], None] = lambda count: None,
) -> params_lib.Params:
  """Reads a model onto a mesh; every process reads its own shards only.

  Args:
    folder: of the model.
    cfg: from its config.
    shardings: of every tensor.
    dtype: of the result, such as f32 for masters.
    read: told how many parameters have been read, after every tensor of ours.

  Raises:
    ValueError: see `Reader`.
  """
  named = params_lib.names(shardings)
  out = {}
  with Reader(folder, cfg) as reader:
    for name, shape in reader.shapes.items():
      part = functools.partial(reader.part, name, dtype=dtype)
      out[name] = jax.make_array_from_callback(shape, named[name], part)
      read(out[name].size)
  return params_lib.from_names(out)


def _shard_files(folder: pathlib.Path) -> list[pathlib.Path]:
  index = folder / _INDEX
  names = {_SINGLE}
  if index.is_file():
    try:
      read = json.loads(index.read_text(encoding='utf-8-sig'))
      names = set(read['weight_map'].values())
    except (OSError, ValueError, RecursionError) as e:
      raise ValueError(f'{index}: no JSON: {e}') from e
    except (TypeError, KeyError, AttributeError) as e:
      raise ValueError(f'{index}: has no weight_map of file names') from e
    for name in names or ['']:
      if (
          not isinstance(name, str)
          or not name
          or pathlib.Path(name).name != name
      ):
        raise ValueError(f'{index}: weight_map: {name!r} is no file name')
  return [folder / name for name in sorted(names)]


def _open(
    files: Sequence[pathlib.Path], stack: contextlib.ExitStack
) -> dict[str, Any]:
  """Tensor name -> the open file that holds it."""
  found = {}
  for path in files:
    try:
      file = stack.enter_context(safetensors.safe_open(path, 'numpy'))
    except (OSError, safetensors.SafetensorError) as e:
      raise ValueError(f'{path}: missing or damaged: {e}') from e
    twice = sorted(found.keys() & file.keys())[:_NAMED]
    if twice:
      raise ValueError(f'{path}: another file has {", ".join(twice)} as well')
    found.update(dict.fromkeys(file.keys(), file))
  return found


def _index(piece: hf_tensors.Piece, shape: Sequence[int]) -> list[Any]:
  """Of a part, for all axes of all of our tensor."""
  return [*piece.index, *[_EVERY] * (len(shape) - len(piece.index))]


def _published_shape(piece: hf_tensors.Piece, shape: Sequence[int]):
  """Of a tensor, from the shape of all of ours that it is a part of."""
  at = _index(piece, shape)
  part = tuple(n for n, i in zip(shape, at, strict=True) if i == _EVERY)
  return piece.shape(part)


def _check(folder, cfg, where, every, ours) -> None:
  pieces = {piece.published: piece for piece in every}
  extra = {
      n
      for n in where.keys() - pieces.keys()
      if not hf_tensors.is_known(cfg, n, where)
  }
  shapes = {
      n: tuple(where[n].get_slice(n).get_shape()) for n in pieces if n in where
  }
  wrong = [
      f'{n} is {shape}, want {want}'
      for n, shape in shapes.items()
      if shape != (want := _published_shape(pieces[n], ours[pieces[n].name]))
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
  head, embedding = 'lm_head.weight', 'model.embed_tokens.weight'
  if cfg.tied and head in where:
    a, b = (where[n].get_tensor(n) for n in (head, embedding))
    if a.shape != b.shape or a.tobytes() != b.tobytes():
      raise ValueError(
          f'{folder}: tensor {head} is not {embedding}, though config.json has'
          ' tie_word_embeddings; set it to false'
      )


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
  with atomic.new_folder(folder) as scratch:
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


def _part(piece: hf_tensors.Piece, named) -> np.ndarray:
  return np.asarray(named[piece.name])[piece.index]


def _shards(cfg, named, most) -> Iterator[dict[str, hf_tensors.Piece]]:
  shard, size = {}, 0
  for piece in hf_tensors.of(cfg):
    part = _part(piece, named).nbytes
    if shard and size + part > most:
      yield shard
      shard, size = {}, 0
    shard[piece.published] = piece
    size += part
  yield shard
