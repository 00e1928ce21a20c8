"""Checkpoints of a training run: device state and host state, or neither.

Orbax writes a step under a temporary name and renames it when every file is
on disk, so a run killed at any moment restores the last finished step.
"""

from __future__ import annotations

from collections.abc import Mapping
import os
import pathlib
import shutil
from typing import Any

import orbax.checkpoint as ocp


class Checkpointer:
  """Saves and restores (state, extra) pairs in one directory."""

  def __init__(
      self,
      directory: str | os.PathLike,
      *,
      keep: int = 2,
      background=False,
      writes=False,
  ):
    """Opens or creates a directory of checkpoints.

    Args:
      directory: where to; one folder per step.
      keep: finished checkpoints that are kept, newest first.
      background: return from `save` once the state is copied to the host;
        the next `save` or `close` waits for the files and raises errors.
      writes: nobody else saves here, so what a failed save left is removed.
    """
    if writes:
      for path in pathlib.Path(directory).glob('*.orbax-checkpoint-tmp*'):
        shutil.rmtree(path, ignore_errors=True)
    self._manager = ocp.CheckpointManager(
        os.path.abspath(directory),
        item_names=('state', 'extra'),
        options=ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=background,
        ),
    )

  def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
    """Saves a pytree of arrays and a JSON value as one atomic step.

    Args:
      step: larger than every step saved before.
      state: pytree of arrays (f32 masters, optimizer state, ...).
      extra: JSON-serializable host state (ledger, cursors, ...).

    Raises:
      ValueError: the step exists already or is not the newest.
    """
    newest = self._manager.latest_step()
    if newest is not None and step <= newest:
      raise ValueError(
          f'step={step}: {self._manager.directory} already holds {newest};'
          ' save a later step, or delete the newer ones'
      )
    self._manager.save(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            extra=ocp.args.JsonSave(dict(extra)),
        ),
    )

  def restore(self, abstract_state: Any) -> tuple[int, Any, dict] | None:
    """Restores the newest finished checkpoint.

    Args:
      abstract_state: pytree like the saved one, of arrays (a fresh state) or
        of `jax.ShapeDtypeStruct`s with shardings on a concrete mesh.

    Returns:
      (step, state, extra), bit for bit as saved; None if there is none.
    """
    self._manager.wait_until_finished()
    step = self._manager.latest_step()
    if step is None:
      return None
    found = self._manager.restore(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract_state),
            extra=ocp.args.JsonRestore(),
        ),
    )
    return step, found.state, found.extra

  def close(self) -> None:
    """Waits for a background save and raises what it failed with."""
    self._manager.wait_until_finished()
    self._manager.close()


def read_extra(directory: str | os.PathLike) -> dict[str, Any]:
  """Host state of the newest finished checkpoint, without the arrays.

  Raises:
    ValueError: there is no checkpoint.
  """
  with ocp.CheckpointManager(
      os.path.abspath(directory), item_names=('state', 'extra')
  ) as manager:
    step = manager.latest_step()
    if step is None:
      raise ValueError(f'{directory}: no finished checkpoint')
    found = manager.restore(
        step, args=ocp.args.Composite(extra=ocp.args.JsonRestore())
    )
    return found.extra
