"""Where the parts of a run are that are not in its work directory."""

from __future__ import annotations

import json
import pathlib

from composer_jax import atomic

FILE = 'fleet.json'  # of a work directory


def keep(workdir: pathlib.Path, *, weights: str, blobs: str) -> None:
  """Notes where the parts of a run are that are not in its directory."""
  atomic.write_json(workdir / FILE, {'blobs': blobs, 'weights': weights})


def weights(workdir: pathlib.Path) -> str:
  """URL of the weight store of a run."""
  path = workdir / FILE
  if path.exists():
    return json.loads(path.read_text())['weights']
  return f'file://{(workdir / "weights").resolve()}/'
