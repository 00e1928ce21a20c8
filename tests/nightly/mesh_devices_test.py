"""Meshes of four and of eight devices, all axes together."""

import os
import re
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
import jax

from composer_jax import config
from tests import mesh_cases

# (data, fsdp, expert, tensor)
_EIGHT = ((2, 2, 2, 1), (1, 2, 2, 2))


class MeshTest(parameterized.TestCase):

  def test_experts_and_heads_are_split(self):
    mesh_cases.check(config.MeshConfig(1, 1, 2, 2))

  def test_latent_attention_and_dense_layers_too(self):
    mesh_cases.check_latent(config.MeshConfig(1, 2, 1, 2))

  @parameterized.product(
      axes=((1, 2, 2, 1), (1, 1, 2, 2)), name=tuple(mesh_cases.OPTIMIZERS)
  )
  def test_update_is_that_of_one_device(self, axes, name):
    mesh_cases.check_update(config.MeshConfig(*axes), name)

  def test_eight_devices(self):
    cache = jax.config.jax_compilation_cache_dir
    done = subprocess.run(
        [sys.executable, __file__, 'eight', cache],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
        capture_output=True,
        text=True,
    )
    self.assertEqual(done.returncode, 0, done.stderr)

  def test_collectives(self):
    """What the compiled step moves, and that it takes and returns parts."""
    kinds = r'all-reduce|all-gather|reduce-scatter|collective-permute'
    found, sizes = {}, {}
    for axes in ((4,), (1, 4), (1, 1, 4)):
      compiled = mesh_cases.compiled(config.MeshConfig(*axes))
      text = compiled.as_text()
      found[axes] = set(re.findall(rf' ({kinds})[-a-z]*\(', text))
      sizes[axes] = compiled.memory_analysis().argument_size_in_bytes
    self.assertEqual(found[4,], {'all-reduce', 'all-gather'})
    self.assertEqual(
        found[1, 4], {'all-reduce', 'all-gather', 'reduce-scatter'}
    )
    self.assertEqual(found[1, 1, 4], found[4,] | {'collective-permute'})
    self.assertLess(3 * sizes[1, 4], sizes[4,])


def _eight(cache):
  jax.config.update('jax_num_cpu_devices', 8)
  jax.config.update('jax_compilation_cache_dir', cache)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  for axes in _EIGHT:
    mesh_cases.check(config.MeshConfig(*axes))


if __name__ == '__main__':
  if sys.argv[1:2] == ['eight']:
    _eight(sys.argv[2])
  else:
    absltest.main()
