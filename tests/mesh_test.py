"""Any mesh trains like a single device, with a part of the model on each."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax.learner import step
from composer_jax.model import params as params_lib
from composer_jax.runs import rl
from composer_jax.weights import checkpoint
from tests import fresh
from tests import mesh_cases

_MESH = config.MeshConfig(1, 2, 2, 1)


class MeshTest(absltest.TestCase):

  def test_gradients_are_those_of_one_device(self):
    mesh_cases.check(_MESH)

  def test_update_is_that_of_one_device(self):
    mesh_cases.check_update(_MESH, 'adamw')


class ShardsTest(parameterized.TestCase):

  @parameterized.parameters((4, 1, 1), (2, 2, 1), (1, 2, 2), (1, 4, 1))
  def test_a_device_holds_its_part(self, fsdp, expert, tensor):
    """Of parameters and of both moments; also in what is restored."""
    mesh = step.make_mesh(config.MeshConfig(1, fsdp, expert, tensor))
    tx = mesh_cases.optimizer_of('adamw')
    state = step.restart(fresh.params(mesh_cases.CFG), tx, mesh)
    sizes = {
        name: (x.size, x.addressable_shards[0].data.size)
        for name, x in params_lib.names(state.params).items()
    }
    whole, part = sizes['layers/moe/w_in']
    self.assertEqual(whole, part * fsdp * expert * tensor)
    whole, part = sizes['layers/attention/wq']
    self.assertEqual(whole, part * fsdp * tensor)
    whole, part = sizes['embedding']
    self.assertEqual(whole, part * fsdp)
    held = sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)
    )
    moments, counters = 2, 3
    parts = sum(part for _, part in sizes.values())
    self.assertEqual(held, 4 * ((1 + moments) * parts + counters))
    abstract = step.abstract_state(mesh_cases.CFG, tx, mesh)
    jax.tree.map(
        lambda x, y: self.assertEqual(
            (x.shape, x.dtype, x.sharding), (y.shape, y.dtype, y.sharding)
        ),
        state,
        abstract,
    )

  def test_a_layer_computed_again_is_not_kept(self):
    batch = mesh_cases.batch()
    args = mesh_cases.masters(), batch, jnp.float32(100.0)
    programs = [
        mesh_cases.compiled(
            mesh_cases.ONE, dataclasses.replace(mesh_cases.CFG, remat=x)
        )
        for x in (False, True)
    ]
    (want, _), (got, _) = (f(*args) for f in programs)
    mesh_cases.all_near(params_lib.names(got), params_lib.names(want))
    kept, again = (f.memory_analysis().temp_size_in_bytes for f in programs)
    width = 4 * mesh_cases.CFG.embed * batch.tokens.size
    self.assertGreater(kept - again, 10 * width)


class StoredTest(parameterized.TestCase):

  def test_a_checkpoint_is_restored_on_any_mesh(self):
    tx = mesh_cases.optimizer_of('adamw')
    saved = mesh_cases.updated(config.MeshConfig(2, 1, 2), 'adamw')
    want = [np.asarray(x).tobytes() for x in jax.tree.leaves(saved)]
    folder = self.create_tempdir().full_path
    saver = checkpoint.Checkpointer(folder)
    saver.save(1, saved, {})
    for axes in ((1, 4), (1, 1, 1, 2), (1,), (2, 1, 2)):
      mesh = step.make_mesh(config.MeshConfig(*axes))
      abstract = step.abstract_state(mesh_cases.CFG, tx, mesh)
      _, state, _ = saver.restore(abstract)
      got = [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]
      self.assertEqual(got, want)
      jax.tree.map(
          lambda x, y: self.assertEqual(x.sharding, y.sharding), state, abstract
      )
    saver.close()

  def test_published_arrays_are_whole(self):
    one, four = (
        rl.published_arrays(
            step.restart(
                fresh.params(mesh_cases.CFG),
                mesh_cases.optimizer_of('adamw'),
                step.make_mesh(cfg),
            ).params
        )
        for cfg in (mesh_cases.ONE, config.MeshConfig(1, 2, 2))
    )
    for name, x in one.items():
      self.assertEqual(x.tobytes(), four[name].tobytes(), name)


class RefusedTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(data=8), 'mesh.data=8: only 4'),
      (dict(fsdp=4, expert=2), 'mesh.data=2 x mesh.fsdp=4 x mesh.expert=2: on'),
      (dict(data=0), 'MeshConfig.data=0: must be at least 1'),
      (dict(data=1, expert=3), r'mesh.expert=3: must divide experts=4'),
      (dict(data=1, fsdp=3), r'mesh.fsdp=3: must divide embed=32'),
      (dict(data=1, tensor=3), r'mesh.tensor=3: must divide q_heads=4'),
      (dict(data=1, tensor=4), r'mesh.tensor=4: must divide kv_heads=2'),
  )
  def test_one_line(self, axes, message):
    with self.assertRaisesRegex(ValueError, message):
      mesh = step.make_mesh(config.MeshConfig(**axes))
      step.init_state(mesh_cases.CFG, mesh_cases.optimizer_of('adamw'), 0, mesh)


if __name__ == '__main__':
  absltest.main()
