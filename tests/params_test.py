"""One declaration per tensor: names, shapes, values and specs derive from it."""

import dataclasses

from absl.testing import absltest
import jax
from jax.sharding import PartitionSpec
import numpy as np

from composer_jax import config
from composer_jax.model import params
from tests import fresh

_CFG = config.ModelConfig(vocab=64, layers=2, embed=32, experts=4, moe_ffn=16)


class ParamsTest(absltest.TestCase):

  def test_names_lead_back_to_the_tree(self):
    tree = params.init(_CFG, jax.random.key(0))
    named = params.names(tree)
    self.assertIn('layers/moe/w_in', named)
    back = params.from_names(named)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    del named['norm']
    with self.assertRaisesRegex(ValueError, "missing .'norm'"):
      params.from_names(named)

  def test_those_of_the_tests_are_the_same(self):
    want = params.init(_CFG, jax.random.key(2))
    jax.tree.map(np.testing.assert_array_equal, fresh.params(_CFG, 2), want)

  def test_abstract_shapes_and_counts_are_those_of_the_arrays(self):
    tree = params.init(_CFG, jax.random.key(0))
    abstract = params.abstract(_CFG)
    jax.tree.map(
        lambda a, b: self.assertEqual(a.shape, b.shape), abstract, tree
    )
    total, active = params.count(_CFG)
    self.assertEqual(total, sum(x.size for x in jax.tree.leaves(tree)))
    self.assertLess(active, total)

  def test_value_of_a_tensor_does_not_depend_on_the_others(self):
    deep = config.ModelConfig(
        vocab=96, layers=2, embed=32, experts=4, moe_ffn=16
    )
    a = params.init(_CFG, jax.random.key(0))
    b = params.init(deep, jax.random.key(0))
    np.testing.assert_array_equal(a.layers.moe.w_in, b.layers.moe.w_in)
    self.assertNotEqual(a.embedding.shape, b.embedding.shape)

  def test_specs_follow_the_rules(self):
    rules = {'experts': 'expert', 'embed': 'fsdp'}
    specs = params.pspecs(params.abstract(_CFG), rules)
    self.assertEqual(
        specs.layers.moe.w_in,
        PartitionSpec(None, 'expert', 'fsdp', None, None),
    )
    # No mesh axis splits a tensor twice.
    rules |= {'vocab': 'fsdp'}
    specs = params.pspecs(params.abstract(_CFG), rules)
    self.assertEqual(specs.embedding, PartitionSpec('fsdp', None))
    # The router's output is an axis of its own: top-k must see it whole.
    self.assertEqual(specs.layers.moe.router, PartitionSpec(None, 'fsdp', None))

  def test_layers_of_two_kinds_are_two_stacks(self):
    cfg = dataclasses.replace(
        _CFG,
        layers=3,
        dense_layers=2,
        dense_ffn=24,
        router='sigmoid',
        kv_heads=1,
        kv_latent=12,
        rope_dim=4,
        value_dim=6,
    )
    tree = params.publish_dtype(params.init(cfg, jax.random.key(0)))
    named = params.names(tree)
    self.assertEqual(named['dense_layers/moe/shared_in'].shape, (2, 32, 2, 24))
    self.assertEqual(named['layers/moe/w_in'].shape, (1, 4, 32, 2, 16))
    self.assertEqual(named['layers/attention/kv_down'].shape, (1, 32, 16))
    self.assertEqual(named['dense_layers/attention/wo'].shape, (2, 4, 6, 32))
    # A bias that chooses is compared with scores: bf16 would be too coarse.
    self.assertEqual(named['layers/moe/bias'].dtype, np.float32)
    total, active = params.count(cfg)
    self.assertEqual(total, sum(x.size for x in named.values()))
    experts = sum(named[f'layers/moe/w_{x}'].size for x in ('in', 'out'))
    self.assertEqual(total - active, experts // 2)


if __name__ == '__main__':
  absltest.main()
