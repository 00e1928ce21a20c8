"""Real code as training data: read, split and encoded.

Host side only. Which files are read and which are held out are hashes of their
names, so they are the same on every machine and do not move when unrelated
files appear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import hashlib
import os
import pathlib
import sysconfig

import numpy as np
import tokenizers

from composer_jax import config
from composer_jax.data import stream

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
  root = pathlib.Path(cfg.path or sysconfig.get_path('stdlib'))
  excluded = frozenset() if cfg.path else _NOT_LIBRARY_CODE
  if not root.is_dir():
    raise ValueError(
        f'CorpusConfig.path={str(root)!r}: no such directory; set it to a'
        f' directory of {cfg.suffix} files'
    )
  documents, size, skipped = [], 0, 0
  for name in sorted(names(root, cfg.suffix, excluded), key=_order_key):
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
      d.name for d in documents if is_heldout(d.name, cfg.heldout_fraction)
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


def names(
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


def is_heldout(name: str, fraction: float) -> bool:
  """Says whether a document of this name is never trained on."""
  return _split_key(name) < fraction * 2**64


def _order_key(name: str) -> bytes:
  # Other bytes than the split uses: the cap must not favor one side.
  return hashlib.sha256(name.encode()).digest()[8:]


def encode(
    documents: Sequence[Document],
    tokenizer: tokenizers.Tokenizer,
    *,
    start: int,
) -> stream.Tokens:
  """Encodes documents, each behind the token `start`."""
  # A source that spells a special token must not become one.
  tokenizer.encode_special_tokens = True
  texts = [d.text for d in documents]
  encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
  parts = [np.array([start, *e.ids], np.int32) for e in encodings]
  starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
  size = sum(len(t.encode()) for t in texts)
  return stream.Tokens(np.concatenate(parts), starts, size)
