"""A policy that plays back written turns, for tests of the harness."""

from collections.abc import Iterable

import numpy as np

from composer_jax import trace


class ScriptedPolicy:
  """Answers turn t with the t-th list of ids; repeats the last one.

  Attributes:
    contexts: the context it was given at each turn.
    seeds: the seed it was given at each turn.
  """

  def __init__(self, turns: Iterable[list[int]], layers: int | None = 2):
    self._turns = list(turns)
    self._layers = layers
    self.contexts = []
    self.seeds = []

  async def complete(self, context, *, max_tokens, stop, seed, temperature):
    del stop, temperature
    turn = self._turns[min(len(self.seeds), len(self._turns) - 1)][:max_tokens]
    self.contexts.append(context)
    self.seeds.append(seed)
    old, new = len(context), len(turn)
    routing = None
    if self._layers:
      rows = np.full((old + new, self._layers, 2), 255, np.uint8)
      if context.routing is not None:
        rows[:old] = context.routing.experts
      blank = rows[:-1] == 255
      rows[:-1][blank] = len(self.seeds)  # as if run at this turn
      routing = trace.RoutingTrace(rows)
    versions = np.where(context.versions < 0, len(self.seeds), context.versions)
    join = np.concatenate
    return trace.TokenTrace(
        tokens=join([context.tokens, np.array(turn, np.int32)]),
        sampled=join([context.sampled, np.ones(new, np.bool_)]),
        logps=join([context.logps, np.full(new, -0.5, np.float32)]),
        versions=join([versions, np.full(new, 7)]).astype(np.int32),
        routing=routing,
    )
