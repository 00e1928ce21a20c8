"""Kinds of models: routers, shared experts, dense, latent; one contract for all."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax import rope
from composer_jax import trace
from composer_jax.learner import items
from composer_jax.learner import losses
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.model import decode
from composer_jax.model import params as params_lib
from composer_jax.rollout import engine as engine_lib
from kernels_triton import contract
from kernels_triton import router
from tests import fresh

_BASE = config.ModelConfig(
    vocab=64,
    layers=1,
    embed=32,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    experts=4,
    moe_ffn=32,
)
_VARIANTS = {
    'sigmoid': dict(router='sigmoid', shared_experts=1, routed_scale=2.5),
    'dense': dict(experts=0, top_k=0, shared_experts=2),
    'qwen': dict(
        renormalize=False,
        shared_experts=2,
        shared_gate=True,
        qkv_bias=True,
        qk_norm=True,
        tied=True,
    ),
    'deepseek': dict(
        layers=2,
        dense_layers=1,
        dense_ffn=48,
        experts=6,
        router='sigmoid',
        routed_scale=2.5,
        expert_groups=3,
        top_groups=2,
        shared_experts=1,
        kv_heads=1,
        kv_latent=24,
        q_latent=20,
        rope_dim=8,
        value_dim=12,
        rope_scaling=rope.Yarn(4.0, 32, mscale=1.0, mscale_all_dim=0.8),
    ),
}
_PROMPT, _LENGTH = 21, 40


def model(variant, **changes):
  """A small model of that kind."""
  return dataclasses.replace(_BASE, **_VARIANTS[variant], **changes)


def _params(cfg):
  """bf16 values; no bias is zero and no norm is one, as after some training."""
  params = params_lib.publish_dtype(fresh.params(cfg))
  named = params_lib.names(params)
  for name, value in named.items():
    last = name.split('/')[-1]
    if last in ('bias', 'bq', 'bk', 'bv') or last.endswith('_norm'):
      noise = jax.random.normal(jax.random.key(len(name)), value.shape)
      named[name] = (value + noise).astype(value.dtype)
  named = {k: v.astype(jnp.float32) for k, v in named.items()}
  return params_lib.from_names(named)


def _packed(texts, cfg, routing=None):
  """Documents as a batch, with their routing where given."""
  packed = []
  for i, text in enumerate(texts, 1):
    window = items.document(text)
    if routing is not None:
      window = dataclasses.replace(
          window, routing=trace.RoutingTrace(routing[i - 1])
      )
    packed.append(items.Item(i, window, 1.0))
  shape = packing.Shape(4, 64, contract.KEY_BLOCK)
  replay = None if routing is None else cfg
  return packing.pack_all(packed, shape, now=0, replay=replay)[0][0]


class VariantsTest(parameterized.TestCase):

  @parameterized.parameters(  # more pairs in the nightly tests
      ('sigmoid', 'float32'),
      ('dense', 'bfloat16'),
      ('qwen', 'bfloat16'),
      ('deepseek', 'float32'),
  )
  def test_decode_equals_trainer_and_own_routes_change_nothing(
      self, variant, dtype
  ):
    cfg = model(variant, dtype=dtype)
    params = _params(cfg)
    texts = np.random.default_rng(0).integers(0, cfg.vocab, (3, _LENGTH))
    texts = texts.astype(np.int32)
    mesh = step.make_mesh(config.MeshConfig(2))
    batch = _packed(texts, cfg)
    scored = step.score(params, batch, cfg=cfg, mesh=mesh)
    logps, routing = map(np.asarray, scored)
    rows = [np.argwhere(batch.rollouts == i)[0][0] for i in (1, 2, 3)]
    logps, routing = logps[rows, :_LENGTH], routing[rows, :_LENGTH]
    self.assertEqual(routing.shape, (3, _LENGTH, cfg.moe_layers, cfg.top_k))

    table = jnp.asarray([[3, 0], [1, 2]], jnp.int32)
    pages = decode.init_pages(cfg, 4)
    advance = jax.jit(decode.step, static_argnames='cfg')
    for at in range(_PROMPT):
      where = jnp.full(2, at, jnp.int32)
      _, pages, _ = advance(
          params, pages, jnp.asarray(texts[:2, at]), where, table, cfg=cfg
      )
    for at in range(_PROMPT, _LENGTH - 1):
      where = jnp.full(2, at, jnp.int32)
      out, pages, used = advance(
          params, pages, jnp.asarray(texts[:2, at]), where, table, cfg=cfg
      )
      got = np.asarray(out)[np.arange(2), texts[:2, at + 1]]
      want = logps[:2, at + 1]
      np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
      np.testing.assert_array_equal(used, routing[:2, at])

    again = _packed(texts, cfg, routing)
    replayed, _ = step.score(params, again, cfg=cfg, mesh=mesh)
    np.testing.assert_array_equal(np.asarray(replayed)[rows, :_LENGTH], logps)

  @parameterized.parameters(*_VARIANTS)
  def test_windows_of_the_engine_train_without_mismatch(self, variant):
    cfg = model(variant, replay_threshold=0.2)
    params = _params(cfg)
    engine = engine_lib.Engine(
        cfg,
        config.RolloutConfig(slots=4, context_tokens=64),
        trace.WeightVersion(0, 'digest', None),
        params,
        devices=jax.devices()[:1],
    )
    self.addCleanup(engine.close)
    prompts = [
        items.document(np.arange(5, 39 + i, dtype=np.int32)) for i in range(3)
    ]
    prompts = [
        dataclasses.replace(
            p,
            sampled=np.zeros(len(p), bool),
            versions=np.full(len(p), -1, np.int32),
        )
        for p in prompts
    ]
    requests = [
        engine_lib.Request(p, 12, frozenset(), seed)
        for seed, p in enumerate(prompts)
    ]
    windows = [engine.submit(r).result(600) for r in requests]
    self.assertGreater(engine.stats().cached_tokens, 0)  # of shared prefixes
    for request, window in zip(requests, windows, strict=True):
      again = engine.submit(request).result(600)
      np.testing.assert_array_equal(again.tokens, window.tokens)
      np.testing.assert_array_equal(again.logps, window.logps)
      np.testing.assert_array_equal(
          again.routing.experts, window.routing.experts
      )
    packed = [items.Item(i, w, 1.0) for i, w in enumerate(windows, 1)]
    shape = packing.Shape(4, 64, contract.KEY_BLOCK)
    batches, _ = packing.pack_all(packed, shape, now=0, replay=cfg)
    _, metrics = step.gradients(
        params,
        batches[0],
        jnp.float32(1.0),
        cfg=cfg,
        loss=losses.DppoTv(),
        mesh=step.make_mesh(config.MeshConfig(2)),
    )
    self.assertEqual(float(metrics['mismatch/max_log_ratio'].value()), 0.0)
    self.assertEqual(float(metrics['routing/disagreement'].value()), 0.0)

  @parameterized.parameters(*_VARIANTS)
  def test_every_tensor_learns_but_the_bias(self, variant):
    cfg = model(variant)
    texts = np.random.default_rng(1).integers(0, cfg.vocab, (3, _LENGTH))
    grads, _ = step.gradients(
        _params(cfg),
        _packed(texts.astype(np.int32), cfg),
        jnp.float32(1.0),
        cfg=cfg,
        loss=losses.NextToken(),
        mesh=step.make_mesh(config.MeshConfig(2)),
        balancing=config.Balancing(aux=0.01),
    )
    still = {
        name
        for name, g in params_lib.names(grads).items()
        if not np.abs(np.asarray(g)).max() > 0
    }
    self.assertEqual(still, {'layers/moe/bias'} & set(params_lib.names(grads)))

  @parameterized.parameters('sigmoid', 'deepseek')
  def test_parameters_come_back_and_a_lone_half_is_refused(self, variant):
    params = _params(model(variant))
    named = params_lib.names(params)
    back = params_lib.from_names(named)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    del named['layers/moe/shared_out']
    with self.assertRaisesRegex(ValueError, 'missing .*shared_out'):
      params_lib.from_names(named)

  @parameterized.parameters(
      (dict(experts=0, top_k=0), 'shared_experts=0'),
      (dict(experts=0, shared_experts=1), 'top_k=2'),
      (dict(router='tanh'), 'router='),
      (dict(replay_threshold=2.0), 'replay_threshold='),
      (dict(dense_layers=1, dense_ffn=8), r'dense_layers=1: .* layers=1'),
      (dict(dense_ffn=8), 'dense_ffn=8: .*dense_layers=0'),
      (dict(router='sigmoid', expert_groups=3), 'expert_groups=3: .*experts=4'),
      (dict(expert_groups=2), "expert_groups=2: .*router='sigmoid'"),
      (
          dict(router='sigmoid', expert_groups=2, top_groups=3),
          'top_groups=3: .*expert_groups=2',
      ),
      (dict(kv_latent=8, kv_heads=1), 'rope_dim=0: .*kv_latent=8'),
      (dict(rope_dim=8), 'rope_dim=8: .*kv_latent=0'),
      (dict(kv_latent=8, rope_dim=2, value_dim=2), 'kv_heads=2'),
      (dict(kernels='cuda'), 'kernels='),
  )
  def test_what_is_no_model_is_refused(self, changes, field):
    with self.assertRaisesRegex(ValueError, field):
      dataclasses.replace(_BASE, **changes)


class RouterTest(absltest.TestCase):

  def test_bias_chooses_and_does_not_weigh(self):
    logits = jnp.asarray([[0.0, 1.0, 2.0, -9.0]])
    bias = jnp.asarray([0.0, 0.0, 0.0, 5.0])
    gates, experts, _ = router.route(
        logits,
        bias,
        jnp.full((1, 2), 255, jnp.uint8),
        top_k=2,
        blank=255,
        scores='sigmoid',
        renormalize=False,
        scale=2.0,
    )
    np.testing.assert_array_equal(experts, [[3, 2]])
    want = 2 / (1 + np.exp([[9.0, -2.0]]))
    np.testing.assert_allclose(gates, want, 1e-6)

  def test_groups_count_their_two_best_biased_scores(self):
    scores = np.array([[0.9, 0.1, 0.5, 0.6, 0.2, 0.7]])
    bias = jnp.asarray([0.0, 0.0, 0.0, 0.0, 0.3, 0.0])
    routed = functools.partial(
        router.route,
        jnp.asarray(np.log(scores / (1 - scores)), jnp.float32),
        bias,
        top_k=2,
        blank=255,
        scores='sigmoid',
        groups=3,
    )
    blank = jnp.full((1, 2), 255, jnp.uint8)
    # Groups count 1.0, 1.1 and 1.2: the best expert of all is in the worst.
    _, experts, _ = routed(blank, top_groups=1)
    np.testing.assert_array_equal(experts, [[5, 4]])
    _, experts, _ = routed(blank, top_groups=2)
    np.testing.assert_array_equal(experts, [[5, 3]])
    # A record is obeyed, whatever its groups, and filtered by value alone.
    record = jnp.asarray([[0, 1]], jnp.uint8)
    _, experts, live = routed(record, top_groups=1)
    np.testing.assert_array_equal(experts, [[0, 1]])
    np.testing.assert_array_equal(live, [[5, 4]])
    _, experts, _ = routed(record, top_groups=1, threshold=0.9)
    np.testing.assert_array_equal(experts, [[0, 5]])

  def test_filter_replaces_what_fell_far_and_stays_distinct(self):
    values = jnp.asarray([[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]])
    live = router.select(values, 2)
    recorded = jnp.asarray([[3, 0], [2, 3]])
    # The weakest live choice has 0.3: expert 3 is below half of it.
    got = router.filtered(recorded, live, values, 0.5)
    np.testing.assert_array_equal(got, [[1, 0], [2, 3]])
    np.testing.assert_array_equal(
        router.filtered(recorded, live, values, 0.1), recorded
    )


if __name__ == '__main__':
  absltest.main()
