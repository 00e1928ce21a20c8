"""One declaration per tensor: names, shapes, values and specs derive from it."""

from absl.testing import absltest
import jax
from jax.sharding import PartitionSpec
import numpy as np

from composer_jax import config
from composer_jax.model import params

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
    # The router's output is an axis of its own: top-k must see it whole.
    self.assertEqual(specs.layers.moe.router, PartitionSpec(None, 'fsdp', None))


if __name__ == '__main__':
  absltest.main()
