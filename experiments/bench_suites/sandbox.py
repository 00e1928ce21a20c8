"""Sandboxes: how fast a warm one answers, how fast many of them start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
import statistics
import time

from composer_jax.sandbox import box
from composer_jax.sandbox import pool as pool_lib
from experiments.bench_suites import paired

_STARTED = 16
_WARM = 4
# Milliseconds of a command in a warm session, seconds until all have started;
# the fallback promises nothing.
_MOST = {'bubblewrap': (5.0, 2.0), 'landlock': (None, None)}


async def _median_ms(call: Callable[[], Awaitable[object]], times: int):
  out = []
  for _ in range(times):
    start = time.perf_counter()
    await call()
    out.append(1e3 * (time.perf_counter() - start))
  return statistics.median(out)


async def _sessions_per_second(pool: pool_lib.Pool, times: int) -> float:
  """Whole sessions of one command, twice as many at a time as sandboxes."""

  async def one() -> None:
    async with pool.session() as session:
      await session.exec('true')

  start = time.perf_counter()
  for _ in range(times):
    await asyncio.gather(*(one() for _ in range(2 * _WARM)))
  return times * 2 * _WARM / (time.perf_counter() - start)


async def measure(name: str, rounds: int) -> list[paired.Figure]:
  """Figures of one level of isolation."""
  level = box.Level(name, '')
  most_ms, most_seconds = _MOST[name]
  out = []

  def add(what, value, unit, most=None):
    out.append(paired.Figure(f'{name}: {what}', value, unit, most=most))

  seconds = []
  for _ in range(max(1, rounds // 2)):
    start = time.perf_counter()
    async with pool_lib.Pool(_STARTED, level=level):
      seconds.append(time.perf_counter() - start)
  add(f'{_STARTED} sessions up', statistics.median(seconds), 's', most_seconds)
  async with pool_lib.Pool(_WARM, level=level) as pool:
    async with pool.session() as session:
      files = {'a.py': 'x' * 2000}
      calls = {
          'exec': lambda: session.exec('true'),
          'python': lambda: session.python('pass'),
          'put': lambda: session.put(files),
          'get': lambda: session.get(files),
          'snapshot': session.snapshot,
      }
      for what, call in calls.items():
        await call()
        most = most_ms if what == 'exec' else None
        add(what, await _median_ms(call, 40 * rounds), 'ms', most)
    add(
        'throughput', await _sessions_per_second(pool, 4 * rounds), 'sessions/s'
    )
  return out


def run(*, pairs: int) -> list[paired.Figure]:
  """All figures of every level that this machine has."""
  levels = [name for name in _MOST if not box.failure(name)]
  return [f for name in levels for f in asyncio.run(measure(name, pairs))]
