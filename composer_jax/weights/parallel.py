"""Work on tiles by a few threads, in order and without piling up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import collections
from concurrent import futures
from typing import TypeVar

_THREADS = 4
_In = TypeVar('_In')
_Out = TypeVar('_Out')


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
