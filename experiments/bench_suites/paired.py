"""Paired timing: both sides in turn on the same machine, minutes not apart.

A machine's speed drifts (other tenants, heat) by more than what is measured.
So each round of ours is divided by the peer's round next to it, who goes first
alternates, and the figure is the median of these ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import statistics
import time
from typing import Any

Round = Callable[[], object]  # does the work once and waits until it is done


@dataclasses.dataclass(frozen=True)
class Figure:
  """A number without a peer: a size, a ratio or a time of our own.

  Attributes:
    name: what it is of.
    value: number of `unit`.
    unit: unit such as 'x' for ratios.
    least: smallest value that we promise, or None.
    most: largest value that we promise, or None.
  """

  name: str
  value: float
  unit: str
  least: float | None = None
  most: float | None = None

  def as_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)

  def __str__(self) -> str:
    out = f'{self.name}: {self.value:.4g} {self.unit}'
    for bound, ok in (
        (self.least, self.least is None or self.value >= self.least),
        (self.most, self.most is None or self.value <= self.most),
    ):
      if bound is not None:
        out += f' (target {bound:g}: {"ok" if ok else "MISSED"})'
    return out


@dataclasses.dataclass(frozen=True)
class Result:
  """Rates of one measurement; higher is better.

  Attributes:
    name: what was done.
    unit: unit of the rates.
    ours: one rate per round.
    peer: rate of the round next to it; empty if no peer is installed.
    peer_name: which peer, the fastest of the candidates.
    target: smallest ratio ours / peer that we promise.
  """

  name: str
  unit: str
  ours: tuple[float, ...]
  peer: tuple[float, ...]
  peer_name: str
  target: float

  @property
  def ratio(self) -> float | None:
    """Median over pairs of ours / peer; None without a peer."""
    pairs = zip(self.ours, self.peer, strict=True) if self.peer else ()
    return statistics.median([a / b for a, b in pairs] or [0.0]) or None

  def as_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self) | {'ratio': self.ratio}

  def __str__(self) -> str:
    ours = f'{self.name}: {statistics.median(self.ours):,.0f} {self.unit}'
    if self.ratio is None:
      return ours
    verdict = 'ok' if self.ratio >= self.target else 'BELOW TARGET'
    return (
        f'{ours}; {self.peer_name} {statistics.median(self.peer):,.0f};'
        f' ratio {self.ratio:.2f} (target {self.target}: {verdict})'
    )


def fastest(
    rounds: Mapping[str, Round],
    clock: Callable[[], float] = time.perf_counter,
) -> str:
  """The fastest of candidates, by one round after one to warm up.

  Args:
    rounds: rounds by name.
    clock: tells seconds.

  Returns:
    Its name; '' if there is none.
  """
  seconds = {}
  for name, run in rounds.items():
    run()
    start = clock()
    run()
    seconds[name] = clock() - start
  return min(seconds, key=seconds.__getitem__, default='')


def measure(
    name: str,
    ours: Round,
    peers: Mapping[str, Round],
    *,
    work: float,
    unit: str,
    pairs: int,
    target: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Result:
  """Times `ours` against the fastest of `peers`.

  Args:
    name: name of the measurement.
    ours: one round.
    peers: candidates by name; may be empty.
    work: units done in one round, the same for both sides.
    unit: unit such as 'tokens/s'.
    pairs: rounds that count; one more of each side warms up.
    target: smallest ratio that we promise (`Result`).
    clock: tells seconds.
  """

  def rate(run: Round) -> float:
    start = clock()
    run()
    return work / (clock() - start)

  ours()
  chosen = fastest(peers, clock)
  rates: dict[bool, list[float]] = {True: [], False: []}
  for i in range(pairs):
    for is_ours in (True, False) if i % 2 == 0 else (False, True):
      if is_ours or chosen:
        run = ours if is_ours else peers[chosen]
        rates[is_ours].append(rate(run))
  return Result(
      name, unit, tuple(rates[True]), tuple(rates[False]), chosen, target
  )
