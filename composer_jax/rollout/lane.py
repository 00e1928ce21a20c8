"""One device's share of the engine: its weights, its cache and its slots.

Everything here launches work and returns what waits for it: jax returns before
the device is done, so the engine can keep every device busy from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
import functools
import itertools

import jax
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.model import params as params_lib
from composer_jax.rollout import runner as runner_lib
from composer_jax.rollout import slots as slots_lib

# Requests of one context, which share a prefill.
Group = list[tuple[slots_lib.Request, futures.Future]]
Answer = tuple[futures.Future, trace.TokenTrace]
# Waits for launched work; returns (number of tokens kept, windows it ended).
Collect = Callable[[], tuple[int, list[Answer]]]


class Lane:
  """A runner and its slot table.

  Collect everything before launching the other kind of work: the next inputs
  depend on it, and a device may still read the table in place.

  Attributes:
    runner: the device side.
    table: the host side.
  """

  def __init__(
      self,
      cfg: config.ModelConfig,
      rollout: config.RolloutConfig,
      params: params_lib.Params,
      device: jax.Device,
  ) -> None:
    self._prefill_rows = rollout.prefill_rows
    self.runner = runner_lib.Runner(cfg, rollout, params, device)
    self.table = slots_lib.SlotTable(cfg, rollout)

  def admit(self, groups: Sequence[Group], version: int) -> list[Collect]:
    """Launches prefills of one padded length each, for all the groups.

    Args:
      groups: no more requests than there are free slots.
      version: step of the weights in use.
    """

    def length(group):
      return self.runner.padded_length(len(group[0][0].context))

    launched, n = [], self._prefill_rows
    for _, same in itertools.groupby(sorted(groups, key=length), length):
      same = list(same)
      for i in range(0, len(same), n):
        launched.append(self._admit(same[i : i + n], version))
    return launched

  def _admit(self, groups, version):
    """Prefills one row per group and starts every member in its own slot."""
    table = self.table
    prefilled = self.runner.prefill([group[0][0].context for group in groups])
    rows, slots = np.array(
        [
            (row, table.admit(request, future, version))
            for row, group in enumerate(groups)
            for request, future in group
        ],
        np.int32,
    ).T
    chunks = self.runner.start(
        prefilled,
        rows,
        slots,
        table.seeds[slots],
        table.length[slots],
        table.temperatures[slots],
    )
    out = prefilled.routing, chunks
    return functools.partial(self._started, rows, slots, out, version)

  def _started(self, rows, slots, out, version):
    routing, chunks = jax.device_get(out)
    for row, slot in zip(rows, slots, strict=True):
      self.table.fill_routing(slot, routing[row])
    tokens, logps = (
        np.concatenate(x)[: len(slots), None] for x in zip(*chunks, strict=True)
    )
    return self._append(slots, tokens, logps, version)

  def decode(self, version: int) -> Collect:
    """Launches a block of decode steps; some slot must be live.

    Args:
      version: step of the weights in use.
    """
    table = self.table
    live = np.flatnonzero(table.live)
    at = table.length - 1
    tokens = table.tokens[np.arange(at.size), at]
    out = self.runner.decode(
        live[-1] + 1, tokens, at, table.seeds, table.temperatures
    )
    return functools.partial(self._decoded, live, out, version)

  def _decoded(self, live, out, version):
    tokens, logps, routing = (
        np.moveaxis(x, 0, 1)[live] for x in jax.device_get(out)
    )
    return self._append(live, tokens, logps, version, routing)

  def _append(self, *args):
    kept, ended = self.table.append(*args)
    return kept, [self.table.release(int(slot)) for slot in ended]
