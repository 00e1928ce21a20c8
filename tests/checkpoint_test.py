"""A checkpoint is the whole state of one step, bit for bit, or not there."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import optax

from composer_jax.learner import batch
from composer_jax.weights import checkpoint

# Files of the state below take some 100 ms to write: time to be killed in.
_ROWS = 1_500


def _state(step, rows=16):
  """A train state with awkward values and a sharded parameter."""
  mesh = jax.make_mesh((2,), ('data',))
  split = jax.NamedSharding(mesh, jax.P('data', None))
  w = np.random.default_rng(step).normal(size=(rows, 1024))
  w = w.astype(np.float32)
  w[0, :4] = (-0.0, np.inf, 1e-45, -np.inf)
  w.view(np.uint32)[1, 0] = 0x7FC12345  # a NaN with a payload
  params = {'w': jax.device_put(w, split), 'b': jnp.full((3,), step / 3)}
  tx = optax.adamw(1e-3)
  return batch.TrainState(
      step=jnp.asarray(step, jnp.int32),
      params=params,
      opt_state=tx.init(params),
  )


def _bits(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


class CheckpointTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = (
        pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / 'run'
    )

  def test_only_who_writes_removes_what_a_failed_save_left(self):
    left = self.dir / '7.orbax-checkpoint-tmp'
    left.mkdir(parents=True)
    checkpoint.Checkpointer(self.dir).close()
    self.assertTrue(left.exists())  # perhaps of a run that is going on
    saver = checkpoint.Checkpointer(self.dir, writes=True)
    self.assertFalse(left.exists())
    self.assertIsNone(saver.restore(_state(0)))
    saver.save(7, _state(7), {})
    saver.close()

  def test_round_trip(self):
    extra = {'ledger': [1, 'a', None, {'x': 0.1}], 'cursor': 2**60}
    saver = checkpoint.Checkpointer(self.dir)
    self.assertIsNone(saver.restore(_state(0)))
    saver.save(3, _state(3), extra)
    saver.close()
    reader = checkpoint.Checkpointer(self.dir)
    step, state, got = reader.restore(_state(0))
    self.assertEqual((step, got), (3, extra))
    self.assertEqual(_bits(state), _bits(_state(3)))
    self.assertEqual(jax.tree.structure(state), jax.tree.structure(_state(3)))
    self.assertEqual(state.params['w'].sharding, _state(3).params['w'].sharding)
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
        _state(0),
    )
    self.assertEqual(_bits(reader.restore(abstract)[1]), _bits(_state(3)))
    reader.close()

  def test_keeps_the_newest(self):
    saver = checkpoint.Checkpointer(self.dir, keep=2)
    for step in (1, 2, 5):
      saver.save(step, _state(step), {'step': step})
    saver.close()
    self.assertEqual(sorted(os.listdir(self.dir)), ['2', '5'])
    reader = checkpoint.Checkpointer(self.dir)
    step, state, extra = reader.restore(_state(0))
    self.assertEqual((step, extra['step'], int(state.step)), (5, 5, 5))
    with self.assertRaisesRegex(ValueError, 'already holds 5'):
      reader.save(4, _state(4), {})
    reader.close()

  def test_background(self):
    saver = checkpoint.Checkpointer(self.dir, background=True)
    saver.save(1, _state(1), {'n': 1})
    saver.save(2, _state(2), {'n': 2})
    step, state, extra = saver.restore(_state(0))
    self.assertEqual((step, extra), (2, {'n': 2}))
    self.assertEqual(_bits(state), _bits(_state(2)))
    saver.close()

  def test_killed_while_saving(self):
    """SIGKILL between the first file of step 2 and its commit."""
    child = subprocess.Popen(
        [sys.executable, __file__, 'save', str(self.dir)],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
    )
    deadline = time.monotonic() + 600
    unfinished = []
    while not unfinished and time.monotonic() < deadline:
      self.assertIsNone(child.poll(), 'died by itself')
      unfinished = [
          p
          for p in self.dir.glob('2*')
          if any(f.is_file() for f in p.rglob('*'))
      ]
    child.send_signal(signal.SIGKILL)
    child.wait()
    self.assertNotEmpty(unfinished)
    self.assertFalse((self.dir / '2').exists(), 'was killed too late')
    reader = checkpoint.Checkpointer(self.dir)
    step, state, extra = reader.restore(_state(0, _ROWS))
    self.assertEqual((step, extra), (1, {'n': 1}))
    self.assertEqual(_bits(state), _bits(_state(1, _ROWS)))
    # And the same step can be saved by the run that comes back.
    reader.save(2, state, {'n': 2})
    self.assertEqual(reader.restore(_state(0, _ROWS))[0], 2)
    reader.close()


def _save(directory):
  jax.config.update('jax_num_cpu_devices', 2)
  saver = checkpoint.Checkpointer(directory)
  saver.save(1, _state(1, _ROWS), {'n': 1})
  while True:  # until killed
    saver.save(2, _state(2, _ROWS), {'n': 2})


if __name__ == '__main__':
  if sys.argv[1:2] == ['save']:
    _save(sys.argv[2])
  else:
    absltest.main()
