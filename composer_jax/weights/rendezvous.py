"""Meetings of several writers, through nothing but the store.

A writer leaves a record and waits until those of all others are there. Records
of the call before the last are removed: whoever is in this call has read them.
"""

from __future__ import annotations

import json
import time
from typing import Any

from composer_jax.weights import store as store_lib

_POLL_SECONDS = 0.02


class Rounds:
  """One writer's side of the meetings."""

  def __init__(
      self,
      store: store_lib.Store,
      incarnation: str,
      writer: int,
      writers: int,
      patience_seconds: float = 120.0,
  ):
    self._store = store
    self._prefix = f'round/{incarnation}'
    self._writer = writer
    self._writers = writers
    self._patience = patience_seconds
    self._call = 0
    self._mine = {}  # call -> my keys

  def next_call(self) -> None:
    """Begins a series of meetings; every writer makes the same ones."""
    self._call += 1
    for key in self._mine.pop(self._call - 2, ()):
      self._store.delete(key)

  def gather(self, name: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of all writers, in their order.

    Args:
      name: name of the meeting, once per call.
      record: JSON value of this writer.

    Raises:
      TimeoutError: a writer did not come.
    """
    if self._writers == 1:
      return [record]
    prefix = f'{self._prefix}/{self._call}/{name}'
    mine = f'{prefix}/{self._writer}'
    self._store.put(mine, json.dumps(record).encode())
    self._mine.setdefault(self._call, []).append(mine)
    until = time.monotonic() + self._patience
    return [self._wait(f'{prefix}/{i}', until) for i in range(self._writers)]

  def _wait(self, key: str, until: float) -> dict[str, Any]:
    while True:
      state, data, _ = self._store.read(key)
      if state == 'value':
        return json.loads(data)
      if time.monotonic() > until:
        raise TimeoutError(
            f'{self._store.url}{key}: no such writer within'
            f' {self._patience:g} s; restart all processes of the trainer'
        )
      time.sleep(_POLL_SECONDS)
