"""Figures of a rollout host, in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import prometheus_client
from prometheus_client import core
from prometheus_client import registry

from composer_jax.rollout import engine as engine_lib

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
  """Counts requests; reads the engine's totals whenever it is asked.

  Attributes:
    lost: calls missing from closed rollouts.
    replayed: replies given again to retries.
    cancelled: calls that their clients gave up.
    first_token: seconds until a stream began.
  """

  def __init__(self, engine: engine_lib.Engine, calls: Callable[[], int]):
    """Registers everything, in a registry of its own.

    Args:
      engine: engine whose totals are shown.
      calls: how many are sampled or waiting.
    """
    self._engine = engine
    self._calls = calls
    self._registry = own = prometheus_client.CollectorRegistry()
    self._requests = prometheus_client.Counter(
        'composer_requests', 'HTTP answers.', ['route', 'status'], registry=own
    )
    self._seconds = prometheus_client.Histogram(
        'composer_request_seconds',
        'Seconds from a request to the end of its answer.',
        ['route'],
        buckets=_SECONDS,
        registry=own,
    )
    self.first_token = prometheus_client.Histogram(
        'composer_first_token_seconds',
        'Seconds from a request to the first event of its stream.',
        buckets=_SECONDS,
        registry=own,
    )
    self.lost = prometheus_client.Counter(
        'composer_lost_calls',
        'Calls missing from closed rollouts.',
        registry=own,
    )
    self.replayed = prometheus_client.Counter(
        'composer_replayed_replies',
        'Stored replies given to retries.',
        registry=own,
    )
    self.cancelled = prometheus_client.Counter(
        'composer_cancelled_calls',
        'Calls that their clients gave up.',
        registry=own,
    )
    own.register(_Collector(self._totals))

  def answered(self, route: str, status: int, seconds: float) -> None:
    """Counts one HTTP request."""
    self._requests.labels(route, str(status)).inc()
    self._seconds.labels(route).observe(seconds)

  def text(self) -> bytes:
    """The exposition format."""
    return prometheus_client.generate_latest(self._registry)

  def _totals(self) -> Iterator[core.Metric]:
    stats, engine = self._engine.stats(), self._engine
    pages, slots = engine.free()
    counters = {
        'decoded_tokens': (stats.decoded_tokens, 'Tokens sampled.'),
        'prefill_tokens': (stats.prefill_tokens, 'Prompt tokens computed.'),
        'cached_tokens': (stats.cached_tokens, 'Prompt tokens found cached.'),
        'preemptions': (stats.preemptions, 'Windows that gave way to others.'),
        'busy_seconds': (stats.busy_seconds, 'Seconds of prefill and decode.'),
        'aborted_calls': (stats.aborted, 'Calls that the engine failed.'),
        'weight_swaps': (stats.swaps, 'New weights taken.'),
        'weight_swap_seconds': (
            stats.swap_seconds,
            'Seconds that decoding stood still for new weights.',
        ),
    }
    for name, (value, text) in counters.items():
      yield core.CounterMetricFamily(f'composer_{name}', text, value=value)
    gauges = {
        'weight_swap_seconds_max': (
            stats.longest_swap_seconds,
            'Longest pause for new weights.',
        ),
        'weights_version': (
            max(dict(engine.digests)),
            'Step of the weights in use.',
        ),
        'calls': (self._calls(), 'Calls sampled or waiting.'),
        'free_pages': (pages, 'Cache pages that no call holds.'),
        'free_slots': (slots, 'Decode slots that no call holds.'),
    }
    for name, (value, text) in gauges.items():
      yield core.GaugeMetricFamily(f'composer_{name}', text, value=value)


class _Collector(registry.Collector):

  def __init__(self, totals: Callable[[], Iterator[core.Metric]]):
    self._totals = totals

  def collect(self) -> Iterator[core.Metric]:
    return self._totals()
