"""Sampling with a KV cache, prefill included: the engine against generate."""

from __future__ import annotations

from collections.abc import Sequence
import functools

import jax
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.model import params as params_lib
from composer_jax.rollout import engine as engine_lib
from experiments.bench_suites import mixtral
from experiments.bench_suites import paired

_TARGET = 1.5
_STEPS_PER_SYNC = 16  # nothing to refresh or to admit in between


def _contexts(prompts: np.ndarray) -> list[trace.TokenTrace]:
  n = prompts.shape[1]
  return [
      trace.TokenTrace(
          tokens=row,
          sampled=np.zeros(n, bool),
          logps=np.zeros(n, np.float32),
          versions=np.full(n, -1, np.int32),
      )
      for row in prompts
  ]


def _generate(
    engine: engine_lib.Engine, prompts: np.ndarray, new_tokens: int
) -> list[trace.TokenTrace]:
  requests = [
      engine_lib.Request(context, new_tokens, frozenset(), seed)
      for seed, context in enumerate(_contexts(prompts))
  ]
  return [f.result() for f in engine.submit_group(requests)]


def _compare(
    cfg: config.ModelConfig,
    params: params_lib.Params,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    pairs: int,
) -> paired.Result:
  rng = np.random.default_rng(batch)
  prompts = rng.integers(0, cfg.vocab, (batch, prompt_tokens), np.int32)
  context = prompt_tokens + new_tokens
  rollout = config.RolloutConfig(
      slots=batch,
      context_tokens=context,
      steps_per_sync=_STEPS_PER_SYNC,
  )
  version = trace.WeightVersion(0, '', None)
  devices = jax.devices()[:2]
  with engine_lib.Engine(
      cfg, rollout, version, params, devices=devices
  ) as engine:
    return paired.measure(
        f'decode batch {batch}',
        functools.partial(_generate, engine, prompts, new_tokens),
        {
            name: functools.partial(
                mixtral.generate, model, prompts, new_tokens
            )
            for name, model in mixtral.models(cfg, context).items()
        },
        work=batch * new_tokens,
        unit='tokens/s',
        pairs=pairs,
        target=_TARGET,
    )


def run(
    *,
    pairs: int,
    cfg: config.ModelConfig = mixtral.MODEL,
    batches: Sequence[int] = (1, 64),
    prompt_tokens: int = 32,
    new_tokens: int = 128,
) -> list[paired.Result]:
  """New tokens per second for each number of sequences decoded together."""
  params = params_lib.publish_dtype(params_lib.init(cfg, jax.random.key(0)))
  return [
      _compare(cfg, params, b, prompt_tokens, new_tokens, pairs)
      for b in batches
  ]
