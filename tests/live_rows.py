"""Decoder against trainer, whatever the number of sequences that are live."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from tests import variants_test

from composer_jax import config
from composer_jax import trace
from composer_jax.learner import items
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.model import params as params_lib
from composer_jax.rollout import engine as engine_lib
from kernels_triton import contract

_CONTEXT = 64
_SAMPLED = 8


def random_params(cfg):
  """Parameters of any size, made without compiling: bf16 values."""
  rng = np.random.default_rng(0)

  def draw(leaf):
    x = rng.standard_normal(leaf.shape, np.float32)
    x *= 1.0 if len(leaf.shape) < 3 else 0.05
    return jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32)

  named = params_lib.names(params_lib.abstract(cfg))
  out = {name: draw(leaf) for name, leaf in named.items()}
  for name in ('embedding', 'unembedding'):
    if name in out:
      out[name] = out[name] * 0.05
  return params_lib.from_names(out)


def model(variant, vocab, embed, **changes):
  """A model of a kind of `variants_test` at other sizes."""
  cfg = variants_test.model(variant, **changes)
  return dataclasses.replace(cfg, vocab=vocab, embed=embed)


def differences(cfg, numbers):
  """Number of live sequences -> (log-probs, those that differ in a bit).

  Args:
    cfg: The model.
    numbers: How many sequences decode together, one after another.
  """
  params = random_params(cfg)
  rollout = config.RolloutConfig(
      slots=max(numbers), context_tokens=_CONTEXT, prefill_tokens=256
  )
  engine = engine_lib.Engine(
      cfg,
      rollout,
      trace.WeightVersion(0, 'digest', None),
      params,
      devices=jax.devices()[:1],
  )
  mesh = step.make_mesh(config.MeshConfig(data=1))
  shape = packing.Shape(4, _CONTEXT, contract.KEY_BLOCK)
  rng = np.random.default_rng(1)
  out = {}
  try:
    for live in numbers:
      prompts = [
          trace.extend(trace.empty(), rng.integers(0, cfg.vocab, 20 + i % 13))
          for i in range(live)
      ]
      requests = [
          engine_lib.Request(p, _SAMPLED, frozenset(), 7 * i, 1.0)
          for i, p in enumerate(prompts)
      ]
      windows = [f.result(600) for f in engine.submit_group(requests)]
      packed = [
          items.Item(i, items.document(w.tokens), 1.0)
          for i, w in enumerate(windows, 1)
      ]
      total = different = 0
      for batch in packing.pack_all(packed, shape, now=0)[0]:
        logps, _ = jax.device_get(step.score(params, batch, cfg=cfg, mesh=mesh))
        for i in np.unique(batch.rollouts[batch.rollouts > 0]):
          row, start = np.argwhere(batch.rollouts == i)[0]
          window = windows[i - 1]
          got = logps[row, start : start + len(window)][window.sampled]
          want = window.logps[window.sampled]
          total += len(want)
          different += int((got.view('u4') != want.view('u4')).sum())
      out[live] = total, different
  finally:
    engine.close()
  return out
