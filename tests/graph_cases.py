"""Rollouts for the tests of calls: windows as an engine makes them."""

import numpy as np

from composer_jax import trace
from composer_jax.serving import graph

BLANK = 255


def _sample(context, count, start):
  """A window as an engine makes it; log-probs name every draw."""
  n = len(context)
  routing = context.routing
  experts = np.full((n, 2, 1), BLANK, np.uint8)
  if routing is not None:
    experts = routing.experts.copy()
  fill = np.arange(start, start + n)[:, None, None] % 200
  experts = np.where(experts == BLANK, fill, experts).astype(np.uint8)
  draws = np.arange(start, start + count)
  new = (draws[:, None, None] % 200 * np.ones((1, 2, 1))).astype(np.uint8)
  new[-1] = BLANK

  def join(old, value, dtype):
    return np.concatenate([old, np.asarray(value, dtype)])

  return trace.TokenTrace(
      tokens=join(context.tokens, draws % 3, np.int32),
      sampled=join(context.sampled, np.ones(count), np.bool_),
      logps=join(context.logps, -1.0 - draws, np.float32),
      versions=join(np.maximum(context.versions, 0), draws * 0, np.int32),
      routing=trace.RoutingTrace(np.concatenate([experts, new])),
  )


def rollout(spec):
  """Builds calls as a server does.

  Args:
    spec: per call (number of the one it goes on from, or -1; tokens it adds to
      the context; how many it samples).

  Returns:
    (calls, their windows, number of tokens sampled).
  """
  calls, windows, drawn = [], [], 0
  ends = graph.Ends()
  for number, (before, added, count) in enumerate(spec):
    known = windows[before].tokens.tolist() if -1 < before < number else []
    ids = np.array([*known, *added] or [0], np.int32)
    parent = ends.find(ids)
    context = graph.extend(parent, ids[len(parent) if parent else 0 :])
    np.testing.assert_array_equal(context.tokens, ids)
    window = _sample(context, count, drawn)
    drawn += count
    calls.append(
        graph.child(parent, number, window, len(ids), None, {0: 'digest'})
    )
    ends.add(calls[-1])
    windows.append(window)
  return calls, windows, drawn


def same(a, b):
  for field in ('tokens', 'sampled', 'logps', 'versions'):
    np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
  np.testing.assert_array_equal(a.routing.experts, b.routing.experts)
