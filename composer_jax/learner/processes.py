"""One program in several processes: what each holds, and what all agree on.

Every process runs the same steps on the same cursor, and puts on its devices
only the rows that they own. In a run of one process nothing here communicates.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np


def first() -> bool:
  """Whether this process is the one that writes for all."""
  return jax.process_index() == 0


def place(batch: Any, sharding: jax.sharding.Sharding) -> Any:
  """Puts a batch on the devices; each process sends the rows of its own.

  Args:
    batch: pytree of numpy arrays [B ...], the same in every process; arrays
      that are on the devices already are moved.
    sharding: of the rows.
  """
  if sharding.is_fully_addressable:
    return jax.device_put(batch, sharding)

  def leaf(x):
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

  return jax.tree.map(leaf, batch)


def whole(x: jax.Array) -> np.ndarray:
  """Brings an array to the host of every process."""
  if x.is_fully_addressable:
    return np.asarray(x)
  return multihost_utils.process_allgather(x, tiled=True)


def agree(*flags: bool) -> tuple[bool, ...]:
  """For each flag, whether it is set in any process: the same in all of them.

  What decides when to save or to stop (a signal, a clock) differs between
  processes, but they must do it after the same step.
  """
  if jax.process_count() == 1:
    return flags
  said = multihost_utils.process_allgather(np.array(flags))
  return tuple(said.any(axis=0).tolist())
