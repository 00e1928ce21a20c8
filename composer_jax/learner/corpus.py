"""Real code as training data: read, split, encoded, and cut into chunks.

Host side only. Every choice here (which files, which are held out, the order
of chunks in an epoch) is a hash of a name or a counter, so that it is the same
on every machine and does not move when unrelated files appear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import hashlib
import math
import os
import pathlib
import sysconfig

import numpy as np
import tokenizers

from composer_jax import config
from composer_jax.learner import packing

# Parts of the standard library that are tests, other people's code, or tables
# (character maps, help texts) rather than code.
_NOT_LIBRARY_CODE = frozenset(
    {
        'dist-packages',
        'encodings',
        'idle_test',
        'idlelib',
        'pydoc_data',
        'site-packages',
        'test',
        'tests',
        'turtledemo',
    }
)


@dataclasses.dataclass(frozen=True)
class Document:
  name: str  # path below the corpus directory, with '/' on every platform
  text: str


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Documents in order of name; a document is on one side only.

  Attributes:
    train: documents to learn from (the tokenizer included).
    heldout: documents never trained on; at least one.
    skipped: files that could not be read as UTF-8 text.
  """

  train: tuple[Document, ...]
  heldout: tuple[Document, ...]
  skipped: int


def load(cfg: config.CorpusConfig) -> Corpus:
  """Reads a directory of source files, or the interpreter's own library.

  Files are taken in the order of a hash of their name until `max_bytes` are
  read, so a cap keeps a cross-section and not the start of the alphabet.

  Raises:
    ValueError: no such directory, fewer than two usable files, or a value of
      `cfg` out of range.
  """
  if not 0 <= cfg.heldout_fraction < 1:
    raise ValueError(
        f'CorpusConfig.heldout_fraction={cfg.heldout_fraction}: must be in'
        ' [0, 1)'
    )
  root = pathlib.Path(cfg.path or sysconfig.get_path('stdlib'))
  excluded = frozenset() if cfg.path else _NOT_LIBRARY_CODE
  if not root.is_dir():
    raise ValueError(
        f'CorpusConfig.path={str(root)!r}: no such directory; set it to a'
        f' directory of {cfg.suffix} files'
    )
  documents, size, skipped = [], 0, 0
  for name in sorted(_names(root, cfg.suffix, excluded), key=_order_key):
    path = root / name
    try:
      if size + path.stat().st_size > cfg.max_bytes:
        continue
      text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
      skipped += 1
      continue
    if text:
      documents.append(Document(name, text))
      size += len(text.encode())
  if len(documents) < 2:
    raise ValueError(
        f'CorpusConfig.path={str(root)!r}: {len(documents)} readable'
        f' {cfg.suffix} files within max_bytes={cfg.max_bytes}; at least 2 are'
        ' needed (one is held out), so set another path, suffix or max_bytes'
    )
  heldout = {
      d.name
      for d in documents
      if _split_key(d.name) < cfg.heldout_fraction * 2**64
  }
  by_split = sorted((d.name for d in documents), key=_split_key)
  if not heldout:
    heldout = {by_split[0]}
  elif len(heldout) == len(documents):
    heldout.remove(by_split[-1])
  documents.sort(key=lambda d: d.name)
  return Corpus(
      tuple(d for d in documents if d.name not in heldout),
      tuple(d for d in documents if d.name in heldout),
      skipped,
  )


def _names(
    root: pathlib.Path, suffix: str, excluded: frozenset[str]
) -> Iterator[str]:
  for folder, folders, files in os.walk(root):
    folders[:] = [
        f for f in folders if f not in excluded and not f.startswith('.')
    ]
    for file in files:
      path = pathlib.Path(folder, file)
      if file.endswith(suffix) and path.is_file():
        yield path.relative_to(root).as_posix()


def _split_key(name: str) -> int:
  return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


def _order_key(name: str) -> bytes:
  # Other bytes than the split uses: the cap must not favor one side.
  return hashlib.sha256(name.encode()).digest()[8:]


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
  """Encoded documents, end to end.

  Attributes:
    ids: int32 [N]; each document is the start token, then its text.
    starts: int64 [D + 1], where each document begins, and N.
    utf8_bytes: size of the text. Every token but the start tokens is a target
      exactly once, so this is what their summed log-probs pay for.
  """

  ids: np.ndarray
  starts: np.ndarray
  utf8_bytes: int


def encode(
    documents: Sequence[Document],
    tokenizer: tokenizers.Tokenizer,
    *,
    start: int,
) -> Tokens:
  """Encodes documents, each behind the token `start`."""
  # A source that spells a special token must not become one.
  tokenizer.encode_special_tokens = True
  texts = [d.text for d in documents]
  encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
  parts = [np.array([start, *e.ids], np.int32) for e in encodings]
  starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
  size = sum(len(t.encode()) for t in texts)
  return Tokens(np.concatenate(parts), starts, size)


def _spans(tokens: Tokens, tokens_per_row: int) -> np.ndarray:
  """Chunks of at most tokens_per_row as int64 [C 2] (begin, end).

  Neighbors share one token: the last target of a chunk is the first input of
  the next one, and no token is a target twice or never.
  """
  stride = tokens_per_row - 1
  lengths = np.diff(tokens.starts)
  counts = -(-(lengths - 1) // stride)
  document = np.repeat(np.arange(len(lengths)), counts)
  first = np.repeat(np.cumsum(counts) - counts, counts)
  begin = tokens.starts[document] + stride * (np.arange(len(first)) - first)
  end = np.minimum(begin + tokens_per_row, tokens.starts[document + 1])
  return np.stack([begin, end], axis=1)


def _placed(lengths: Sequence[int], shape: packing.Shape) -> int:
  """How many leading chunks go first-fit into rows with aligned starts."""
  free = [shape.tokens_per_row] * shape.rows
  for count, length in enumerate(lengths):
    row = next((r for r, f in enumerate(free) if f >= length), None)
    if row is None:
      return count
    free[row] -= -(-length // shape.key_block) * shape.key_block
  return len(lengths)


def _fitting(spans: np.ndarray, shape: packing.Shape) -> int:
  """How many leading chunks `packing` can pack, which sorts longest first.

  That order is rarely, but sometimes, worse than the order of arrival.
  """
  lengths = np.diff(spans)[:, 0].tolist()
  count = _placed(lengths, shape)
  while _placed(sorted(lengths[:count], reverse=True), shape) < count:
    count -= 1
  return count


@functools.lru_cache(maxsize=2)
def _shuffle(seed: int, epoch: int, count: int) -> np.ndarray:
  # Raw Philox words are stable between numpy releases; `permutation` is not.
  words = np.random.Philox(key=seed + (epoch << 64)).random_raw(count)
  return np.argsort(words, kind='stable')


@dataclasses.dataclass(frozen=True)
class Cursor:
  """Where a stream stands; plain values, for a checkpoint.

  Attributes:
    epoch: passes over all chunks completed.
    chunk: chunks of this epoch's order already handed out.
    stream: `Stream.digest` of the stream that it counts in; '' at the start.
  """

  epoch: int = 0
  chunk: int = 0
  stream: str = ''


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
  """Endless shuffled chunks of documents; what comes depends on the cursor.

  Chunks are shuffled and not documents: a batch of one long file is a poor
  estimate of the gradient.

  Attributes:
    tokens: what to read.
    shape: of the batches; a chunk is at most one row.
    seed: of the order, together with the epoch.
  """

  tokens: Tokens
  shape: packing.Shape
  seed: int

  def __post_init__(self):
    if self.shape.tokens_per_row < 2:
      raise ValueError(
          f'Stream.shape={self.shape}: tokens_per_row must be at least 2'
      )
    if not len(self):
      raise ValueError('Stream.tokens: no text in any document')

  @functools.cached_property
  def _table(self) -> np.ndarray:
    return _spans(self.tokens, self.shape.tokens_per_row)

  @functools.cached_property
  def digest(self) -> str:
    """Identity of the order: tokens, row length and seed."""
    h = hashlib.sha256(f'{self.shape.tokens_per_row} {self.seed} '.encode())
    h.update(self.tokens.starts.tobytes())
    h.update(self.tokens.ids.tobytes())
    return h.hexdigest()[:16]

  def __len__(self) -> int:
    """Chunks in one epoch."""
    return len(self._table)

  def next(self, cursor: Cursor) -> tuple[list[np.ndarray], Cursor]:
    """The chunks of one batch.

    Args:
      cursor: where to go on; `Cursor()` is the beginning.

    Returns:
      Chunks, int32 [<= tokens_per_row] each, for `packing.pack_documents`,
      and the cursor behind them.

    Raises:
      ValueError: the cursor counts in another stream.
    """
    if cursor.stream not in ('', self.digest):
      raise ValueError(
          f'Cursor.stream={cursor.stream!r}: counts in another corpus,'
          f' tokenizer, row length or seed than {self.digest!r}; restore the'
          ' old setting or start from Cursor()'
      )
    blocks = -(-self.shape.tokens_per_row // self.shape.key_block)
    at = cursor.chunk + np.arange(self.shape.rows * blocks)  # more never fit
    epochs = range(cursor.epoch, cursor.epoch + int(at[-1]) // len(self) + 1)
    order = [_shuffle(self.seed, epoch, len(self)) for epoch in epochs]
    spans = self._table[np.concatenate(order)[at]]
    count = _fitting(spans, self.shape)
    passed, chunk = divmod(cursor.chunk + count, len(self))
    chunks = [self.tokens.ids[b:e] for b, e in spans[:count]]
    return chunks, Cursor(cursor.epoch + passed, chunk, self.digest)


def batches(tokens: Tokens, shape: packing.Shape) -> Iterator[list[np.ndarray]]:
  """Everything once, in order: the chunks of one batch after the other."""
  spans = _spans(tokens, shape.tokens_per_row)
  while len(spans):
    count = _fitting(spans, shape)
    yield [tokens.ids[b:e] for b, e in spans[:count]]
    spans = spans[count:]


def bits_per_byte(total_nll_nats: float, total_utf8_bytes: int) -> float:
  """Compression of text: comparable between tokenizers, unlike nats/token."""
  return total_nll_nats / (math.log(2) * total_utf8_bytes)
