"""Gradients have the same bits on any number of cores.

XLA's pool has a thread for every fake device, so that many devices stand for a
machine of many cores.
"""

import hashlib
import json
import os
import subprocess
import sys

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax.learner import losses
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.model import params as params_lib
from kernels_triton import contract
from tests import fresh
from tests import small_config
from tests import variants_test

_MODELS = {
    'small': small_config.experiment().model,
    'deepseek': variants_test.model('deepseek'),
    'qwen': variants_test.model('qwen'),
}
_SHAPES = (2, 256), (8, 128)


def _digests():
  """By model, rows, devices of the mesh, and tensor."""
  found = {}
  for name, cfg in _MODELS.items():
    for rows, length in _SHAPES:
      rng = np.random.default_rng(1)
      texts = list(rng.integers(0, cfg.vocab, (rows, length), np.int32))
      shape = packing.Shape(rows, length, contract.KEY_BLOCK)
      batch, _ = packing.pack_documents(texts, shape)
      for devices in (1, 2):
        grads, _ = step.gradients(
            fresh.params(cfg),
            batch,
            jnp.float32(100.0),
            cfg=cfg,
            loss=losses.NextToken(),
            mesh=step.make_mesh(config.MeshConfig(devices)),
        )
        for key, value in params_lib.names(grads).items():
          bits = hashlib.sha256(np.asarray(value).tobytes()).hexdigest()
          found[f'{name} {rows}x{length} on {devices}, {key}'] = bits
  return found


class ThreadsTest(absltest.TestCase):

  def test_gradients_have_the_same_bits(self):
    found = []
    for threads in (2, 4, 8):
      done = subprocess.run(
          [sys.executable, __file__, 'print', str(threads)],
          env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
          stdout=subprocess.PIPE,
          check=True,
      )
      found.append(json.loads(done.stdout))
    self.assertGreater(len(found[0]), 200)
    self.assertEqual(found[1], found[0])
    self.assertEqual(found[2], found[0])


if __name__ == '__main__':
  if sys.argv[1:2] == ['print']:
    jax.config.update('jax_num_cpu_devices', int(sys.argv[2]))
    print(json.dumps(_digests()))
  else:
    absltest.main()
