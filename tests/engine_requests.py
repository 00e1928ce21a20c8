"""Requests for the engine's tests, and what their windows must be."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.model import params as params_lib
from composer_jax.model import transformer
from composer_jax.rollout import engine as engine_lib
from tests import fresh

CFG = config.ModelConfig(
    vocab=64,
    layers=2,
    embed=32,
    q_heads=2,
    kv_heads=1,
    head_dim=16,
    experts=4,
    moe_ffn=32,
)
_SCORED = 96  # tokens of the rows that `score` compiles for
_FIELDS = ('tokens', 'sampled', 'logps', 'versions')
BLANK = 255


def _params(seed, scale=1.5):
  """Random weights; the scaled head makes the samples less uniform."""
  params = fresh.params(CFG, seed)
  params = params.replace(unembed=params.unembed * scale)
  return jax.tree.map(jnp.asarray, params_lib.publish_dtype(params))


PARAMS = [_params(i) for i in range(5)]


def version(step):
  return trace.WeightVersion(step, f'digest-{step}', None)


def engine(rollout, *, lanes, params=None, refresh=None):
  return engine_lib.Engine(
      CFG,
      rollout,
      version(0),
      PARAMS[0] if params is None else params,
      devices=jax.devices()[:lanes],
      refresh=refresh,
  )


def context(tokens, routing=None):
  n = len(tokens)
  return trace.TokenTrace(
      tokens=np.asarray(tokens, np.int32),
      sampled=np.zeros(n, bool),
      logps=np.zeros(n, np.float32),
      versions=np.full(n, -1, np.int32),
      routing=routing,
  )


def request(
    seed,
    *,
    tokens=None,
    max_tokens=12,
    stop=(),
    temperature=1.0,
    stop_sequences=(),
):
  rng = np.random.default_rng(seed)
  if tokens is None:
    tokens = rng.integers(0, CFG.vocab, rng.integers(1, 45))
  return engine_lib.Request(
      context(tokens),
      max_tokens,
      frozenset(stop),
      seed,
      temperature,
      stop_sequences,
  )


def digest(window):
  arrays = [getattr(window, f) for f in _FIELDS] + [window.routing.experts]
  return hashlib.sha256(b'|'.join(a.tobytes() for a in arrays)).hexdigest()


def run(engine, requests):
  pending = [engine.submit(r) for r in requests]
  return [f.result(timeout=600) for f in pending]


def cut(window, n, routing=True):
  """The first n tokens as a context, its last route blank as in a trace."""
  experts = window.routing.experts[:n].copy()
  experts[-1] = BLANK
  return trace.TokenTrace(
      *(getattr(window, f)[:n] for f in _FIELDS),
      routing=trace.RoutingTrace(experts) if routing else None,
  )


def append(window, tokens):
  """The window plus tool output, as the next turn's context."""
  extra = context(tokens)
  blank = np.full(
      (len(tokens), *window.routing.experts.shape[1:]), BLANK, np.uint8
  )
  return trace.TokenTrace(
      *(
          np.concatenate([getattr(window, f), getattr(extra, f)])
          for f in _FIELDS
      ),
      routing=trace.RoutingTrace(
          np.concatenate([window.routing.experts, blank])
      ),
  )


@jax.jit
def _trainer_logps(params, tokens, segments, positions, routing):
  out = transformer.forward(
      params, tokens, segments, positions, cfg=CFG, routing=routing
  )
  targets = jnp.roll(tokens, -1, axis=1)
  return transformer.token_logps(params, out.hidden, targets, cfg=CFG)[0]


def score(params, window):
  """Log-prob of token t + 1 for every t, by the trainer's forward."""
  n, size = len(window), _SCORED

  def pad(x, value):
    tail = np.full((size - n, *x.shape[1:]), value, x.dtype)
    return np.concatenate([x, tail])[None]

  logps = _trainer_logps(
      params,
      pad(window.tokens, 0),
      pad(np.ones(n, np.int32), 0),
      np.arange(size, dtype=np.int32)[None],
      pad(window.routing.experts, BLANK),
  )
  return np.asarray(logps)[0, : n - 1]
