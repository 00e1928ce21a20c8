"""The rollout side of a run: engine, environments and an event loop of its own.

A `RolloutHost` turns tasks into graded trajectories. It sees the trainer only
through the weight store; a host on another machine would be built of the same
parts around another `WorkQueue`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
import contextlib
import threading
import time
from typing import Any, Self, TypeVar

import jax

from composer_jax import config
from composer_jax import trace
from composer_jax.agents import harness
from composer_jax.agents import sandbox
from composer_jax.agents import tasks as tasks_lib
from composer_jax.rollout import engine as engine_lib
from composer_jax.runs import feed as feed_lib

T = TypeVar('T')


class BusyClock:
  """Seconds during which at least one of many coroutines was inside."""

  def __init__(self):
    self.seconds = 0.0
    self._inside = 0
    self._since = 0.0

  def __enter__(self) -> None:
    if not self._inside:
      self._since = time.perf_counter()
    self._inside += 1

  def __exit__(self, *_) -> None:
    self._inside -= 1
    if not self._inside:
      self.seconds += time.perf_counter() - self._since
