"""A small model with every kind of tensor, and its gradient on any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax.learner import items
from composer_jax.learner import losses
from composer_jax.learner import optimizer
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.model import params as params_lib
from kernels_triton import contract
from tests import fresh

ROWS, TOKENS = 8, 64
CFG = config.ModelConfig(
    vocab=64,
    layers=2,
    embed=32,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    experts=4,
    moe_ffn=32,
    shared_experts=1,
    shared_gate=True,
    qkv_bias=True,
    qk_norm=True,
)
LATENT = config.ModelConfig(
    vocab=64,
    layers=2,
    embed=32,
    q_heads=4,
    kv_heads=1,
    head_dim=16,
    kv_latent=24,
    q_latent=16,
    rope_dim=8,
    value_dim=8,
    experts=4,
    moe_ffn=32,
    shared_experts=1,
    dense_layers=1,
    dense_ffn=48,
    router='sigmoid',
    routed_scale=2.5,
)
ONE = config.MeshConfig(1)
OPTIMIZERS = {'adamw': optimizer.AdamW(), 'muon': optimizer.Muon()}


@functools.cache
def masters(model=CFG):
  return fresh.params(model)


@functools.cache
def batch():
  rng = np.random.default_rng(0)
  texts = [rng.integers(0, CFG.vocab, n) for n in rng.integers(40, 60, ROWS)]
  packed = [
      items.Item(i, items.document(t.astype(np.int32)), 1.0)
      for i, t in enumerate(texts, 1)
  ]
  shape = packing.Shape(ROWS, TOKENS, contract.KEY_BLOCK)
  return packing.pack(packed, shape, now=0)[0]


@functools.cache
def scored(cfg):
  """(log-probs, routes) on a mesh, routing live."""
  published = step.rounded(masters())
  mesh = step.make_mesh(cfg)
  return jax.device_get(step.score(published, batch(), cfg=CFG, mesh=mesh))


def routes():
  """Kinds of recorded routes [B T L K]."""
  live = scored(ONE)[1]
  one_device = np.zeros_like(live)
  one_device[..., 1] = 1  # every token chooses the first two experts
  return {'replayed': live, 'all to one': one_device}


def routed(kind):
  return batch().replace(routing=routes()[kind])


@functools.cache
def gradients(cfg, kind):
  return gradients_of(CFG, cfg, routed(kind))


def gradients_of(model, cfg, batch):
  """(gradients by name on the host, loss), with the router's own losses."""
  mesh = step.make_mesh(cfg)
  grads, metrics = step.gradients(
      fresh.params(model),
      batch,
      jnp.float32(100.0),
      cfg=model,
      loss=losses.NextToken(),
      mesh=mesh,
      balancing=config.Balancing(aux=0.1, z=0.1),
  )
  named = params_lib.names(jax.device_get(grads))
  return named, float(metrics['loss'].value())


@functools.cache
def optimizer_of(name):
  return OPTIMIZERS[name].build()


def updated(cfg, name):
  """The state after one update, from gradients of a single device."""
  named, _ = gradients(ONE, 'replayed')
  mesh = step.make_mesh(cfg)
  tx = optimizer_of(name)
  state = step.restart(fresh.params(CFG), tx, mesh)
  to = jax.tree.map(lambda x: x.sharding, state.params)
  grads = jax.device_put(params_lib.from_names(named), to)
  return step.apply_gradients(state, grads, tx=tx)


def check(cfg):
  """Everything that a mesh must share with a single device."""
  (logps, used), (want, want_used) = scored(cfg), scored(ONE)
  np.testing.assert_array_equal(used, want_used)
  if cfg.tensor == 1:
    np.testing.assert_array_equal(_bits(logps), _bits(want))
  else:
    np.testing.assert_allclose(logps, want, rtol=0, atol=1e-5)
  for kind in ('replayed', 'all to one'):
    (got, loss), (want, want_loss) = gradients(cfg, kind), gradients(ONE, kind)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    all_near(got, want)
  again, _ = gradients_of(CFG, cfg, routed('replayed'))
  for name, g in gradients(cfg, 'replayed')[0].items():
    np.testing.assert_array_equal(_bits(again[name]), _bits(g), name)


def check_latent(cfg):
  (got, loss), (want, want_loss) = (
      gradients_of(LATENT, mesh, batch()) for mesh in (cfg, ONE)
  )
  np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
  all_near(got, want)


def check_update(cfg, name):
  want, got = updated(ONE, name), updated(cfg, name)
  leaves = zip(
      jax.tree_util.tree_leaves_with_path(got),
      jax.tree.leaves(want),
      strict=True,
  )
  for (path, x), y in leaves:
    near(x, y, jax.tree_util.keystr(path))


def all_near(got, want):
  for name, g in want.items():
    near(got[name], g, name)


def near(got, want, name):
  """Equal within 1e-5 of the tensor's largest value."""
  got, want = np.asarray(got), np.asarray(want)
  scale = np.abs(want).max()
  np.testing.assert_allclose(got, want, 0, 1e-5 * scale, err_msg=name)


def _bits(x):
  return np.asarray(x, np.float32).view(np.uint32)


def compiled(mesh, cfg=CFG):
  """Forward and backward of a mesh, compiled on no weights."""
  mesh = step.make_mesh(mesh)
  tx = optimizer_of('adamw')
  return step.gradients.lower(
      step.abstract_state(cfg, tx, mesh).params,
      batch(),
      jnp.float32(1.0),
      cfg=cfg,
      loss=losses.NextToken(),
      mesh=mesh,
  ).compile()
