"""Sampling with a paged KV cache: the engine against generate, and itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
import contextlib
import functools
import itertools
import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.model import params as params_lib
from composer_jax.rollout import device
from composer_jax.rollout import engine as engine_lib
from composer_jax.serving import capture as capture_lib
from composer_jax.serving import graph
from experiments.bench_suites import mixtral
from experiments.bench_suites import paired
from kernels_triton import contract

_TARGETS = {1: 2.0}  # by batch; of ours / peer
_TARGET = 1.5
_STEPS_PER_SYNC = 16  # nothing to refresh or to admit in between
_ARRIVAL_STEPS = 4
_PAUSE_SECONDS = 0.25  # bound of a swap's pause
_FEED_SECONDS = 0.2  # between two swaps

Report = list[paired.Result | paired.Figure]


_sizes = config.RolloutConfig  # slots, context tokens, steps per sync


def _requests(prompts: np.ndarray, new_tokens: int) -> list[engine_lib.Request]:
  n = prompts.shape[1]
  blank = np.zeros(n, bool), np.zeros(n, np.float32), np.full(n, -1, np.int32)
  return [
      engine_lib.Request(
          trace.TokenTrace(row, *blank), new_tokens, frozenset(), seed
      )
      for seed, row in enumerate(prompts)
  ]


def _generate(
    engine: engine_lib.Engine, prompts: Callable[[], np.ndarray], new: int
) -> None:
  """Answers one round of prompts, all submitted at once."""
  for future in engine.submit_group(_requests(prompts(), new)):
    future.result()


def _seconds(run: Callable[[], object]) -> float:
  start = time.perf_counter()
  run()
  return time.perf_counter() - start


def _middle_seconds(
    engine: engine_lib.Engine, tokens: int, run: Callable[[], object]
) -> float:
  """Seconds in which the middle half of a run's tokens is decoded.

  Before and after it the engine fills and drains, however requests arrive.
  """
  with futures.ThreadPoolExecutor(1) as pool:
    first = engine.stats().decoded_tokens
    running, times = pool.submit(run), []
    for share in (0.25, 0.75):
      while engine.stats().decoded_tokens - first < share * tokens:
        time.sleep(0.002)
      times.append(time.perf_counter())
    running.result()
  return times[1] - times[0]


class _Bench:
  """A model, and engines of several sizes on it."""

  def __init__(self, cfg: config.ModelConfig, pairs: int) -> None:
    params = params_lib.init(cfg, jax.random.key(0))
    self._params = params_lib.publish_dtype(params)
    self._cfg, self._pairs = cfg, pairs
    self._rng = np.random.default_rng(0)

  def _engine(self, rollout, lanes=2, refresh=None):
    return engine_lib.Engine(
        self._cfg,
        rollout,
        trace.WeightVersion(0, '', None),
        self._params,
        devices=jax.devices()[:lanes],
        refresh=refresh,
    )

  def _prompts(self, count: int, tokens: int) -> np.ndarray:
    """New ones each time: the cache must not answer for the prefill."""
    return self._rng.integers(0, self._cfg.vocab, (count, tokens), np.int32)

  def _paired(self, ours, base) -> float:
    """Median of the ratio ours / base of seconds, one round each to warm up."""
    ours(), base()
    return statistics.median(
        _seconds(ours) / _seconds(base) for _ in range(self._pairs)
    )

  def batch(self, batch: int, prompt_tokens: int, new_tokens: int) -> Report:
    """Prefill and decode against the peer; then decode and prefill apart."""
    context = prompt_tokens + new_tokens
    prompts = functools.partial(self._prompts, batch, prompt_tokens)
    with self._engine(_sizes(batch, context, _STEPS_PER_SYNC)) as engine:
      run = functools.partial(_generate, engine, prompts)
      result = paired.measure(
          f'decode batch {batch}',
          functools.partial(run, new_tokens),
          {
              name: functools.partial(
                  mixtral.generate, model, prompts(), new_tokens
              )
              for name, model in mixtral.models(self._cfg, context).items()
          },
          work=batch * new_tokens,
          unit='tokens/s',
          pairs=self._pairs,
          target=_TARGETS.get(batch, _TARGET),
      )
      # One block each; what more blocks take longer is decoding alone.
      short = min(_STEPS_PER_SYNC, new_tokens // 2)
      once = statistics.median(
          _seconds(functools.partial(run, short)) for _ in range(self._pairs)
      )
      whole = statistics.median(batch * new_tokens / r for r in result.ours)
    rate = batch * (new_tokens - short) / max(whole - once, 1e-9)
    name = f'decode batch {batch}, prefill apart'
    return [result, paired.Figure(name, rate, 'tokens/s')]

  def first_token(self, lengths: Sequence[int]) -> Report:
    """Milliseconds from submitting one prompt to its first token."""
    out = []
    with self._engine(_sizes(1, max(lengths) + 1, 1)) as engine:
      for tokens in lengths:
        prompts = functools.partial(self._prompts, 1, tokens)
        run = functools.partial(_generate, engine, prompts, 1)
        run()
        seconds = statistics.median(_seconds(run) for _ in range(self._pairs))
        name = f'first token after a prompt of {tokens}'
        out.append(paired.Figure(name, 1e3 * seconds, 'ms'))
    return out

  def group(self, members: int, prompt_tokens: int) -> Report:
    """Separate prompts against one prompt for all, one token each."""
    with self._engine(_sizes(members, prompt_tokens + 1, 1)) as engine:
      same = lambda: np.repeat(self._prompts(1, prompt_tokens), members, axis=0)
      apart = functools.partial(self._prompts, members, prompt_tokens)
      ratio = self._paired(
          functools.partial(_generate, engine, apart, 1),
          functools.partial(_generate, engine, same, 1),
      )
    name = f'group of {members}: separate / shared prompt'
    return [paired.Figure(name, ratio, 'x', least=5.0)]

  def swaps(self, streams: int, prompt_tokens: int, new: int) -> Report:
    """Weights that arrive while all streams decode."""
    last, count = [time.perf_counter()], [0]

    def refresh():
      if time.perf_counter() - last[0] < _FEED_SECONDS and count[0]:
        return None
      last[0], count[0] = time.perf_counter(), count[0] + 1
      return trace.WeightVersion(count[0], str(count[0]), None), self._params

    sizes = _sizes(streams, prompt_tokens + new, _ARRIVAL_STEPS)
    with self._engine(sizes, refresh=refresh) as engine:
      prompts = functools.partial(self._prompts, streams, prompt_tokens)
      _generate(engine, prompts, new)
      stats = engine.stats()
    return [
        paired.Figure(
            f'longest pause of {stats.swaps} swaps under {streams} streams',
            1e3 * stats.longest_swap_seconds,
            'ms',
            most=1e3 * _PAUSE_SECONDS,
        ),
        paired.Figure('requests aborted by swaps', stats.aborted, '', most=0),
    ]

  def arrivals(
      self, count: int, slots: int, prompt_tokens: int, new: int
  ) -> Report:
    """Requests at random moments, against all at once."""
    context = prompt_tokens + new
    with self._engine(_sizes(slots, context, _ARRIVAL_STEPS)) as engine:
      prompts = functools.partial(self._prompts, count, prompt_tokens)
      at_once = functools.partial(_generate, engine, prompts, new)
      at_once()
      # All come within half of the time that all at once take: the engine is
      # full soon, and stays so.
      span = _seconds(at_once) / 2

      def at_random():
        moments = np.sort(self._rng.uniform(0, span, count))
        start, pending = time.perf_counter(), []
        for moment, r in zip(moments, _requests(prompts(), new), strict=True):
          time.sleep(max(0.0, start + moment - time.perf_counter()))
          pending.append(engine.submit(r))
        for future in pending:
          future.result()

      middle = functools.partial(_middle_seconds, engine, count * new)
      middle(at_random)
      ratio = statistics.median(
          middle(at_once) / middle(at_random) for _ in range(self._pairs)
      )
    name = f'{count} random arrivals: throughput of the plateau'
    return [paired.Figure(name, ratio, '', least=0.9)]

  def capture(self, batch: int, prompt_tokens: int, new: int) -> Report:
    """The engine, every call on disk, against its device programs alone."""
    sizes = config.RolloutConfig(
        slots=batch,
        context_tokens=prompt_tokens + new,
        steps_per_sync=_STEPS_PER_SYNC,
        # At once, as the programs do: not a first half that decodes alone.
        prefill_tokens=batch * prompt_tokens,
    )
    programs = _Programs(self._cfg, sizes, self._params, prompt_tokens, new)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(capture_lib.Capture(pathlib.Path(folder))) as record,
        self._engine(sizes, lanes=1) as engine,
    ):
      names = itertools.count()

      def ours():
        requests = _requests(self._prompts(batch, prompt_tokens), new)
        written = []
        for future in engine.submit_group(requests):
          name = str(next(names))
          admission = capture_lib.Admission(0, 1, b'', b'', b'', b'')
          record.admit(name, admission)
          call = graph.child(
              None, 0, future.result(), prompt_tokens, None, engine.digests
          )
          written.append(record.answer(name, [call], ['length'], ''))
        futures.wait(written)

      ratio = self._paired(ours, programs.run)
    name = f'engine with capture and routing / its programs, batch {batch}'
    return [paired.Figure(name, ratio, 'x', most=1.05)]


class _Programs:
  """What the engine runs on the device for one round, and nothing else."""

  def __init__(self, cfg, rollout, params, prompt_tokens, new) -> None:
    self._runner = device.Runner(cfg, rollout, params, jax.devices()[0])
    n, rows = rollout.slots, contract.QUERY_ROWS
    width = self._runner.width
    self._table = np.arange(n * width, dtype=np.int32).reshape(n, width)
    at = np.tile(np.arange(prompt_tokens, dtype=np.int32), n).reshape(-1, rows)
    dtype = trace.route_dtype(cfg.experts)
    routes = np.full(
        (cfg.moe_layers, cfg.top_k), trace.blank_route(dtype), dtype
    )
    self._routes = routes
    self._positions, self._prompt, self._new = at, prompt_tokens, new

  def run(self) -> None:
    runner, at = self._runner, self._positions
    tables = np.repeat(self._table, len(at) // len(self._table), axis=0)
    for i in range(0, len(at), runner.tiles):
      part = at[i : i + runner.tiles]
      routes = np.broadcast_to(self._routes, (*part.shape, *self._routes.shape))
      runner.prefill(part, part, tables[i : i + len(part)], routes)
    n = len(self._table)
    routes = np.broadcast_to(self._routes, (n, *self._routes.shape))
    tokens = np.zeros(n, np.int32)
    for start in range(0, self._new, _STEPS_PER_SYNC):
      out = runner.decode(
          n,
          self._table,
          tokens,
          np.full(n, self._prompt - 1 + start, np.int32),
          routes,
          np.zeros(n, np.uint32),
          np.ones(n, np.float32),
      )
      tokens = np.asarray(out[0])[-1, :n]


def run(
    *,
    pairs: int,
    cfg: config.ModelConfig = mixtral.MODEL,
    batches: Sequence[int] = (1, 16, 64, 128),
    prompt_tokens: int = 32,
    new_tokens: int = 128,
    group: int = 128,
    arrivals: int = 256,
) -> Report:
  """All figures; `batches` are numbers of sequences decoded together."""
  bench = _Bench(cfg, pairs)
  long = 8 * prompt_tokens
  out = []
  for batch in batches:
    out += bench.batch(batch, prompt_tokens, new_tokens)
  most = max(batches)
  out += bench.first_token((prompt_tokens, long))
  out += bench.group(group, long)
  out += bench.capture(most, prompt_tokens, new_tokens)
  slots = min(most, 64)
  out += bench.swaps(slots, prompt_tokens, new_tokens)
  out += bench.arrivals(arrivals, slots, prompt_tokens, new_tokens)
  return out
