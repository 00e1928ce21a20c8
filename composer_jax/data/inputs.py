"""Documents in files of people: folders of text, JSON lines, Parquet.

A record is numbered within its file, so that reading goes on behind any of
them, and is named by both, which decides whether it is held out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import pathlib
from typing import Any

from composer_jax.data import corpus


@dataclasses.dataclass(frozen=True)
class File:
  """An input.

  Attributes:
    name: path below the folder that was given, with '/' on every platform.
    path: where it is.
    size: bytes.
  """

  name: str
  path: pathlib.Path
  size: int


@dataclasses.dataclass(frozen=True)
class Record:
  """What may become a document.

  Attributes:
    name: name of the document.
    fields: fields it has; None for what is blank or no text, and is left out.
    done: bytes of the file that end with it, about.
  """

  name: str
  fields: Mapping[str, Any] | None
  done: int


def find(paths: Sequence[str], suffix: str) -> list[File]:
  """Lists inputs in order.

  Args:
    paths: files, and folders that are searched for `suffix`.
    suffix: end of the names of files in folders.

  Raises:
    ValueError: there is no such file or folder, or nothing in it.
  """
  files = []
  for text in paths:
    root = pathlib.Path(text)
    if root.is_file():
      files.append(File(root.name, root, root.stat().st_size))
    elif root.is_dir():
      names = sorted(corpus.names(root, suffix, frozenset()))
      if not names:
        raise ValueError(f'--input={text}: no {suffix} file; set --suffix')
      files += [File(n, root / n, (root / n).stat().st_size) for n in names]
    else:
      raise ValueError(f'--input={text}: no such file or folder')
  return files


def records(file: File, field: str, skip: int) -> Iterator[Record]:
  """Reads a file.

  Args:
    file: .jsonl, .parquet, or else a document of its own.
    field: field that a record must have.
    skip: leading records that are not wanted.

  Raises:
    ValueError: names the file and line of what cannot be read.
  """
  if file.path.suffix == '.jsonl':
    yield from _lines(file, field, skip)
  elif file.path.suffix == '.parquet':
    yield from _rows(file, field, skip)
  elif not skip:
    try:
      text = file.path.read_bytes().decode()
    except UnicodeDecodeError:
      text = None
    yield Record(file.name, {field: text} if text else None, file.size)


def _lines(file: File, field: str, skip: int) -> Iterator[Record]:
  done = 0
  with file.path.open('rb') as lines:
    for number, line in enumerate(lines, 1):
      done += len(line)
      if number <= skip:
        continue
      where = f'{file.path}:{number}'
      fields = None
      if line.strip():
        try:
          fields = json.loads(line)
        except (ValueError, RecursionError) as e:
          raise ValueError(f'{where}: no JSON: {e}') from e
        if not isinstance(fields, dict) or field not in fields:
          raise ValueError(f'{where}: no field {field!r}; set --field')
      yield Record(f'{file.name}:{number}', fields, done)


def _rows(file: File, field: str, skip: int) -> Iterator[Record]:
  try:
    from pyarrow import parquet
    import pyarrow
  except ImportError as e:
    raise ValueError(
        f'{file.path}: Parquet needs pyarrow; pip install composer_jax[data]'
    ) from e
  try:
    with parquet.ParquetFile(file.path) as table:
      have = table.schema_arrow.names
      if field not in have:
        raise ValueError(f'{file.path}: no column {field!r}; set --field')
      total, number = max(table.metadata.num_rows, 1), 0
      wanted = [c for c in (field, 'tools') if c in have]
      for group in table.iter_batches(1024, columns=wanted):
        for fields in group.to_pylist():
          number += 1
          if number > skip:
            done = file.size * number // total
            yield Record(f'{file.name}:{number}', fields, done)
  except (pyarrow.ArrowException, OSError) as e:
    raise ValueError(f'{file.path}: no readable Parquet: {e}') from e
