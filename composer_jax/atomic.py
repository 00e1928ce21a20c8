"""Files and folders that are there as a whole or not at all.

Whoever reads meanwhile, or after a crash, finds the old content or the new.
"""

from __future__ import annotations

from collections.abc import Generator
import contextlib
import json
import os
import pathlib
import secrets
import shutil
from typing import Any


def write(path: pathlib.Path, data: bytes | str) -> None:
  """Writes a file; several processes may write it at once."""
  # With a shared name, one would publish what another is still writing.
  part = path.with_name(f'.{path.name}.{secrets.token_hex(4)}.part')
  try:
    with part.open('wb') as file:
      file.write(data.encode() if isinstance(data, str) else data)
      file.flush()
      os.fsync(file.fileno())
    part.replace(path)
  except BaseException:
    part.unlink(missing_ok=True)
    raise


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a value as JSON that people can read, too."""
  write(path, json.dumps(value, indent=2) + '\n')


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Generator[pathlib.Path]:
  """Yields a folder to fill, which then gets its name; for one writer at a time.

  What a killed writer left is removed by the next one.
  """
  part = path.with_name(f'.{path.name}.part')
  shutil.rmtree(part, ignore_errors=True)
  part.mkdir(parents=True)
  try:
    yield part
    part.rename(path)
  except BaseException:
    shutil.rmtree(part, ignore_errors=True)
    raise
