"""Work on tiles by a few threads, in order and without piling up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import collections
from concurrent import futures
import os
import threading
from typing import TypeVar

import numpy as np

_THREADS = min(len(os.sched_getaffinity(0)), 8)
_In = TypeVar('_In')
_Out = TypeVar('_Out')
_local = threading.local()


def ordered(fn: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
  """Results of fn(item) in the order of the items, a few of them ahead."""
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    ahead = collections.deque()
    for item in items:
      ahead.append(pool.submit(fn, item))
      if len(ahead) > 4 * _THREADS:
        yield ahead.popleft().result()
    while ahead:
      yield ahead.popleft().result()


def scratch(name: str, size: int, dtype: np.typing.DTypeLike) -> np.ndarray:
  """This thread's array of that name, until the thread asks for it again.

  Mapping fresh pages costs several times what is done to them here, and every
  thread has to stop when they are given back.
  """
  held = _local.__dict__
  if name not in held or held[name].size < size:
    held[name] = np.empty(size, dtype)
  return held[name][:size]
