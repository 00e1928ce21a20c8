"""Encoded documents cut into chunks, in an endless shuffled order.

Host side only. The order is a hash of counters, so that it is the same on every
machine, and does not depend on how many machines read it. Ids may lie in files
of any size: a chunk is read when its batch is made, and nothing else ever is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import hashlib
import math

import numpy as np

from composer_jax import trace
from composer_jax.learner import items
from composer_jax.learner import packing


class Joined:
  """Arrays end to end, none of which a slice may cross."""

  def __init__(self, parts: Sequence[np.ndarray]):
    self._parts = parts
    self._starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)

  def __getitem__(self, span: slice) -> np.ndarray:
    i = int(np.searchsorted(self._starts, span.start, side='right')) - 1
    at = int(self._starts[i])
    return self._parts[i][span.start - at : span.stop - at]


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
  """Encoded documents, end to end.

  Attributes:
    ids: integers [N]; the first token of a document is no target.
    starts: int64 [D + 1], where each document begins, and N.
    utf8_bytes: size of the text that is trained. Every token of it is a target
      exactly once, so this is what their summed log-probs pay for.
    trained: bool [N], targets to keep; None for all.
    identity: names the contents, where hashing them would take too long.
  """

  ids: np.ndarray | Joined
  starts: np.ndarray
  utf8_bytes: int
  trained: np.ndarray | Joined | None = None
  identity: str | None = None

  def document(self, begin: int, end: int) -> trace.TokenTrace:
    """A part of one document, read now."""
    ids = np.array(self.ids[begin:end], np.int32)
    if self.trained is None:
      return items.document(ids)
    return items.document(ids, np.array(self.trained[begin:end], np.bool_))

  @functools.cached_property
  def digest(self) -> str:
    """sha256 of the contents, or of their identity."""
    if self.identity is not None:
      return hashlib.sha256(self.identity.encode()).hexdigest()
    h = hashlib.sha256(self.starts.tobytes())
    h.update(np.asarray(self.ids).tobytes())
    return h.hexdigest()


class _Chunks:
  """Parts of documents of at most `tokens_per_row` tokens, by number.

  Neighbors share one token: the last target of a chunk is the first input of
  the next one, and no token is a target twice or never.
  """

  def __init__(self, starts: np.ndarray, tokens_per_row: int):
    self._starts, self._stride = starts, tokens_per_row - 1
    counts = -(-(np.diff(starts) - 1) // self._stride)
    self._first = np.concatenate([[0], np.cumsum(counts)])

  def __len__(self) -> int:
    return int(self._first[-1])

  def spans(self, numbers: np.ndarray) -> np.ndarray:
    """(begin, end) of each, int64 [C 2]."""
    document = np.searchsorted(self._first, numbers, side='right') - 1
    inside = numbers - self._first[document]
    begin = self._starts[document] + self._stride * inside
    end = np.minimum(begin + self._stride + 1, self._starts[document + 1])
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


def _shuffle(seed: int, count: int, epoch: int) -> np.ndarray:
  # Raw Philox words are stable between numpy releases; `permutation` is not.
  words = np.random.Philox(key=seed + (epoch << 64)).random_raw(count)
  return np.argsort(words, kind='stable')


@dataclasses.dataclass(frozen=True)
class Cursor:
  """Where a source stands; plain values, for a checkpoint.

  Attributes:
    epoch: passes over everything completed.
    chunk: chunks (or documents) of this epoch already handed out.
    rows: rows of batches that it has filled.
    stream: `Stream.digest` of the stream that it counts in; '' at the start.
  """

  epoch: int = 0
  chunk: int = 0
  rows: int = 0
  stream: str = ''


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
  """Endless shuffled chunks of documents; what comes depends on the cursor.

  Chunks are shuffled and not documents: a batch of one long file is a poor
  estimate of the gradient.

  Attributes:
    tokens: what to read.
    tokens_per_row: longest chunk.
    key_block: multiple that a chunk starts at in its row.
    seed: seed of the order, together with the epoch.
  """

  tokens: Tokens
  tokens_per_row: int
  key_block: int
  seed: int

  def __post_init__(self):
    if self.tokens_per_row < 2:
      raise ValueError(
          f'Stream.tokens_per_row={self.tokens_per_row}: must be at least 2'
      )
    if not len(self):
      raise ValueError('Stream.tokens: no text in any document')

  @functools.cached_property
  def _chunks(self) -> _Chunks:
    return _Chunks(self.tokens.starts, self.tokens_per_row)

  @functools.cached_property
  def _order(self):
    """Epoch -> its order; a batch may end one epoch and begin the next."""
    shuffle = functools.partial(_shuffle, self.seed, len(self))
    return functools.lru_cache(maxsize=2)(shuffle)

  @functools.cached_property
  def digest(self) -> str:
    """Identity of the order: tokens, row length and seed."""
    text = f'{self.tokens_per_row} {self.seed} {self.tokens.digest}'
    return hashlib.sha256(text.encode()).hexdigest()[:16]

  def __len__(self) -> int:
    """Chunks in one epoch."""
    return len(self._chunks)

  def next(
      self, cursor: Cursor, rows: int
  ) -> tuple[list[trace.TokenTrace], Cursor]:
    """The chunks of one batch.

    Args:
      cursor: where to go on; `Cursor()` is the beginning.
      rows: rows of the batch.

    Returns:
      Chunks that fit into the rows, and the cursor behind them.

    Raises:
      ValueError: the cursor counts in another stream.
    """
    if cursor.stream not in ('', self.digest):
      raise ValueError(
          f'Cursor.stream={cursor.stream!r}: counts in another corpus,'
          f' tokenizer, row length or seed than {self.digest!r}; restore the'
          ' old setting or start from Cursor()'
      )
    shape = packing.Shape(rows, self.tokens_per_row, self.key_block)
    most = rows * -(-self.tokens_per_row // self.key_block)  # ever fit
    at = cursor.chunk + np.arange(most)
    passes, at = np.divmod(at, len(self))
    numbers = [
        self._order(cursor.epoch + i)[at[passes == i]]
        for i in range(passes[-1] + 1)
    ]
    spans = self._chunks.spans(np.concatenate(numbers))
    count = _fitting(spans, shape)
    passed, chunk = divmod(cursor.chunk + count, len(self))
    chunks = [self.tokens.document(b, e) for b, e in spans[:count].tolist()]
    behind = Cursor(
        cursor.epoch + passed, chunk, cursor.rows + rows, self.digest
    )
    return chunks, behind


def batches(
    tokens: Tokens, shape: packing.Shape
) -> Iterator[list[trace.TokenTrace]]:
  """Everything once, in order: the chunks of one batch after the other."""
  chunks = _Chunks(tokens.starts, shape.tokens_per_row)
  spans = chunks.spans(np.arange(len(chunks)))
  while len(spans):
    count = _fitting(spans, shape)
    yield [tokens.document(b, e) for b, e in spans[:count].tolist()]
    spans = spans[count:]


def bits_per_byte(total_nll_nats: float, total_utf8_bytes: int) -> float:
  """Compression of text: comparable between tokenizers, unlike nats/token."""
  return total_nll_nats / (math.log(2) * total_utf8_bytes)
