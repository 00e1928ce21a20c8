"""One program in several processes: what each holds, and what all agree on.

Every process runs the same steps on the same cursor, and puts on its devices
only the rows that they own. In a run of one process nothing here communicates.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from composer_jax.model import sharding


def first() -> bool:
  """Says whether this process is the one that writes for all."""
  return jax.process_index() == 0


def place(batch: Any, mesh: jax.sharding.Mesh) -> Any:
  """Puts a batch on the devices; each process sends the rows of its own.

  Args:
    batch: pytree of numpy arrays [B ...], the same in every process; arrays
      that are on the devices already are moved.
    mesh: the trainer's, which splits the rows.
  """
  rows = NamedSharding(mesh, PartitionSpec(sharding.ROWS))
  if rows.is_fully_addressable:
    return jax.device_put(batch, rows)

  def leaf(x):
    return jax.make_array_from_callback(x.shape, rows, x.__getitem__)

  return jax.tree.map(leaf, batch)


def whole(x: jax.Array) -> np.ndarray:
  """Brings an array to the host of every process."""
  if x.is_fully_addressable:
    return np.asarray(x)
  return multihost_utils.process_allgather(x, tiled=True)


def agree(*flags: bool) -> tuple[bool, ...]:
  """Says of each flag whether it is set in any process, the same everywhere.

  What decides when to save or to stop (a signal, a clock) differs between
  processes, but they must do it after the same step.
  """
  if jax.process_count() == 1:
    return flags
  said = multihost_utils.process_allgather(np.array(flags))
  return tuple(said.any(axis=0).tolist())
