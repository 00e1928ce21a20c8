"""Work on tiles by a few threads, in order and without piling up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import collections
from concurrent import futures
import threading
from typing import TypeVar

import numpy as np

_THREADS = 4
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


def scratch(like: np.ndarray) -> np.ndarray:
  """This thread's array of that size and type, until it asks for the next.

  Fresh pages cost several times as much as what is done to them here.
  """
  if getattr(_local, 'bytes', np.empty(0, np.uint8)).nbytes < like.nbytes:
    _local.bytes = np.empty(like.nbytes, np.uint8)
  return _local.bytes[: like.nbytes].view(like.dtype)
