"""Encoded documents in files of any size, as `experiments.tokenize` makes them.

A folder holds `index.json`, `tokenizer.json` and numbered shards. A shard has, on
each side (train, heldout), raw little-endian arrays:

  NUMBER.SIDE.ids      uint16 or uint32 [N]
  NUMBER.SIDE.starts   int64 [D + 1], where each document begins, and N
  NUMBER.SIDE.bytes    int64 [D], UTF-8 size of what is trained of it
  NUMBER.SIDE.trained  uint8 [N], in folders of chats only

The index is replaced when all files of a shard are there: what it does not name
does not exist, and whatever kills a writer costs it one shard.
"""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import json
import pathlib
from typing import Any

import numpy as np

from composer_jax import atomic
from composer_jax import config
from composer_jax.data import stream

FORMAT = 'composer_jax tokens 1'
INDEX = 'index.json'
TOKENIZER = 'tokenizer.json'
TRAIN, HELDOUT = 'train', 'heldout'
_TYPES = {'ids': None, 'starts': '<i8', 'bytes': '<i8', 'trained': 'u1'}


def _dtype(kind: str, index: Mapping[str, Any]) -> np.dtype:
  return np.dtype(_TYPES[kind] or index['dtype']).newbyteorder('<')


def _read_index(folder: pathlib.Path) -> dict[str, Any]:
  """Raises ValueError if there is none, or it is not one."""
  try:
    index = json.loads((folder / INDEX).read_text(encoding='utf-8'))
    found = index['format']
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise ValueError(
        f'{folder}: holds no {INDEX} of shards; make it with'
        ' experiments.tokenize'
    ) from e
  if found != FORMAT:
    raise ValueError(f'{folder}: its format is {found!r}, want {FORMAT!r}')
  return index


class ShardWriter:
  """Appends shards to a folder, from where another writer stopped.

  Attributes:
    index: what is there already.
  """

  def __init__(
      self,
      folder: pathlib.Path,
      header: Mapping[str, Any],
      tokenizer: str,
  ):
    """Opens a folder; nothing is written before the first shard.

    Args:
      folder: new, empty, or of a writer with an equal header.
      header: JSON object that decides the contents; 'dtype' and 'masked' are
        used here.
      tokenizer: JSON text.

    Raises:
      ValueError: the folder holds something else.
    """
    self._folder, self._tokenizer = folder, tokenizer
    self._sides = {TRAIN: [], HELDOUT: []}
    header = {'format': FORMAT, **json.loads(json.dumps(header))}
    self.index = {**header, 'shards': [], 'complete': False}
    if not folder.is_dir() or not any(folder.iterdir()):
      return
    found = _read_index(folder)
    changed = [k for k in header if found.get(k) != header[k]]
    if changed:
      raise ValueError(
          f'{folder}: holds tokens of a build with another {changed[0]}; choose a new'
          ' --output'
      )
    self.index = found

  @property
  def position(self) -> Any:
    """What `flush` was last told; None at the beginning."""
    shards = self.index['shards']
    return shards[-1]['position'] if shards else None

  @property
  def tokens(self) -> int:
    """Tokens that wait for `flush`."""
    return sum(len(ids) for side in self._sides.values() for ids, _, _ in side)

  def add(
      self,
      side: str,
      ids: np.ndarray,
      trained: np.ndarray | None,
      utf8_bytes: int,
  ) -> None:
    """Adds a document to the next shard."""
    self._sides[side].append((ids, trained, utf8_bytes))

  def flush(self, position: Any, complete: bool = False) -> None:
    """Writes what was added as one shard, and where to go on after it."""
    number = len(self.index['shards'])
    self._folder.mkdir(parents=True, exist_ok=True)
    if not number:
      atomic.write(self._folder / TOKENIZER, self._tokenizer)
    shard: dict[str, Any] = {'position': position}
    for side, documents in self._sides.items():
      shard[side] = self._write_side(f'{number:05}.{side}', documents)
      documents.clear()
    self.index['shards'].append(shard)
    self.index['complete'] = complete
    text = json.dumps(self.index, indent=1) + '\n'
    atomic.write(self._folder / INDEX, text)

  def _write_side(self, name: str, documents) -> dict[str, Any]:
    ids = [np.zeros(0, np.uint32), *(ids for ids, _, _ in documents)]
    sizes = np.array([size for _, _, size in documents], np.int64)
    arrays = {
        'ids': np.concatenate(ids),
        'starts': np.cumsum([0, *map(len, ids[1:])], dtype=np.int64),
        'bytes': sizes,
    }
    if self.index['masked']:
      masks = [np.zeros(0, np.bool_), *(mask for _, mask, _ in documents)]
      arrays['trained'] = np.concatenate(masks)
    digest = hashlib.sha256()
    for kind, array in arrays.items():
      data = array.astype(_dtype(kind, self.index)).tobytes()
      digest.update(data)
      atomic.write(self._folder / f'{name}.{kind}', data)
    return {
        'documents': len(documents),
        'tokens': len(arrays['ids']),
        'utf8_bytes': int(sizes.sum()),
        'sha256': digest.hexdigest(),
    }


class Shards:
  """A folder of shards; ids stay in their files until they are needed."""

  def __init__(self, cfg: config.ShardsConfig):
    """Opens a folder.

    Raises:
      ValueError: it holds no shards, or they are incomplete or damaged.
    """
    self._cfg, self._folder = cfg, pathlib.Path(cfg.path)
    self._index = _read_index(self._folder)
    if not self._index['complete']:
      raise ValueError(
          f'{cfg.path}: incomplete; run experiments.tokenize again with the'
          ' same flags'
      )
    for path, want in self._files():
      have = path.stat().st_size if path.is_file() else None
      if have != want:
        state = 'missing' if have is None else f'has {have} bytes, want {want}'
        raise ValueError(f'{path}: {state}; make the folder anew')
    self.tokenizer = (self._folder / TOKENIZER).read_text(encoding='utf-8')
    if _sha(self.tokenizer) != self._index['tokenizer']:
      raise ValueError(
          f'{self._folder / TOKENIZER}: is not the tokenizer that the shards'
          ' were made with'
      )

  def check(self, path: pathlib.Path) -> None:
    """Raises ValueError unless the tokenizer at `path` is that of the shards."""
    if _sha(path.read_text(encoding='utf-8')) != self._index['tokenizer']:
      raise ValueError(
          f'shards.{self._cfg.name}.path={self._cfg.path}: made with another'
          f' tokenizer than {path}; tokenize with that one'
      )

  def train(self) -> stream.Tokens:
    """Everything to learn from."""
    return self._tokens(TRAIN, None)

  def heldout(self) -> stream.Tokens:
    """The first held-out documents, as many as `heldout_bytes` allows."""
    return self._tokens(HELDOUT, self._cfg.heldout_bytes)

  def _files(self):
    """(path, size in bytes) of every file that the index implies."""
    kinds = [k for k in _TYPES if k != 'trained' or self._index['masked']]
    for number, shard in enumerate(self._index['shards']):
      for side in (TRAIN, HELDOUT):
        counts = {
            'starts': shard[side]['documents'] + 1,
            'bytes': shard[side]['documents'],
        }
        for kind in kinds:
          count = counts.get(kind, shard[side]['tokens'])
          size = count * _dtype(kind, self._index).itemsize
          yield self._path(number, side, kind), size

  def _path(self, number: int, side: str, kind: str) -> pathlib.Path:
    return self._folder / f'{number:05}.{side}.{kind}'

  def _tokens(self, side: str, most_bytes: int | None) -> stream.Tokens:
    shards = {
        i: s[side]
        for i, s in enumerate(self._index['shards'])
        if s[side]['tokens']
    }

    def load(kind: str) -> list[np.ndarray]:
      dtype = _dtype(kind, self._index)
      paths = [self._path(i, side, kind) for i in shards]
      return [np.fromfile(path, dtype) for path in paths]

    def mapped(kind: str) -> stream.Joined:
      dtype = _dtype(kind, self._index)
      paths = [self._path(i, side, kind) for i in shards]
      return stream.Joined([np.memmap(path, dtype, 'r') for path in paths])

    lengths = [np.zeros(0, np.int64), *map(np.diff, load('starts'))]
    starts = np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64)
    sizes = np.concatenate([np.zeros(0, np.int64), *load('bytes')])
    if most_bytes is not None:
      kept = int(np.searchsorted(np.cumsum(sizes), most_bytes, side='right'))
      starts, sizes = starts[: kept + 1], sizes[:kept]
    digests = [s['sha256'] for s in shards.values()]
    return stream.Tokens(
        mapped('ids'),
        starts,
        int(sizes.sum()),
        mapped('trained') if self._index['masked'] else None,
        f'{side} {" ".join(digests)}',
    )


def _sha(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()
