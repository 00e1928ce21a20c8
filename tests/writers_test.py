"""Several processes publish one version, whatever their shards are."""

from concurrent import futures
import os
import signal
import subprocess
import sys
import uuid

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
from tests import sample_weights

from composer_jax import config
from composer_jax.weights import codec
from composer_jax.weights import follow
from composer_jax.weights import layout
from composer_jax.weights import publish
from composer_jax.weights import store

_SHAPES = {'embed': (64, 32), 'w_up': (2, 4, 32, 64), 'norm': (2, 32)}
_CFG = config.WeightsConfig(
    tile_elements=512, base_every_versions=5, skip_every_versions=2
)


def _axis(shape, axis, part, parts):
  box = [slice(0, dim) for dim in shape]
  box[axis] = slice(
      part * shape[axis] // parts, (part + 1) * shape[axis] // parts
  )
  return tuple(box)


def _boxes(parts, axes):
  """Shards along one axis of each array; None is a copy on every process."""
  return tuple(
      {
          name: _axis(shape, axes[name], i, parts)
          if axes[name] is not None
          else tuple(slice(0, dim) for dim in shape)
          for name, shape in _SHAPES.items()
      }
      for i in range(parts)
  )


_FSDP = _boxes(4, {'embed': 0, 'w_up': 2, 'norm': None})
_EXPERTS = _boxes(2, {'embed': 1, 'w_up': 1, 'norm': None})
_TENSOR = _boxes(4, {'embed': 1, 'w_up': 3, 'norm': None})


def _versions(count):
  for named in sample_weights.versions(count, shapes=_SHAPES, lr=1e-6):
    yield {name: named[name] for name in _SHAPES}


def _root(named, boxes):
  table = layout.Table.of(named, 512, boxes)
  return table.root(codec.digests(named, table))


class Trainer:
  """The processes of one trainer, each on a thread."""

  def __init__(self, url, boxes, arrays, incarnation=None, patience=20.0):
    incarnation = incarnation or uuid.uuid4().hex
    self.boxes = boxes
    self.stores = [sample_weights.DyingStore(url) for _ in boxes]
    self.publishers = [
        publish.Publisher(
            '',
            _CFG,
            incarnation,
            writers=publish.Writers(i, boxes, arrays, patience),
            store=s,
        )
        for i, s in enumerate(self.stores)
    ]

  def each(self, call):
    """call(publisher, its boxes) on all; their results or exceptions."""
    with futures.ThreadPoolExecutor(len(self.publishers)) as pool:
      jobs = [
          pool.submit(call, p, b)
          for p, b in zip(self.publishers, self.boxes, strict=True)
      ]
      return [job.exception() or job.result() for job in jobs]

  def publish(self, step, named):
    return self.each(lambda p, box: p.publish(step, _mine(named, box)))

  def resume(self, named, step):
    return self.each(lambda p, box: p.resume(_mine(named, box), step))


def _mine(named, boxes):
  return {
      name: np.ascontiguousarray(named[name][box])
      for name, box in boxes.items()
  }


class WritersTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.url = f'file://{self.create_tempdir().full_path}/'
    self.named = list(_versions(8))

  @parameterized.product(
      trainer=('fsdp', 'experts', 'tensor'), host=('fsdp', 'experts', 'tensor')
  )
  def test_any_mesh_to_any_mesh(self, trainer, host):
    meshes = {'fsdp': _FSDP, 'experts': _EXPERTS, 'tensor': _TENSOR}
    trainer = Trainer(self.url, meshes[trainer], self.named[0])
    hosts = [follow.Follower(self.url, boxes=b) for b in meshes[host]]
    for step, named in enumerate(self.named[:4]):
      versions = {d.version for d in trainer.publish(step, named)}
      self.assertLen(versions, 1)
      self.assertEqual(versions.pop().digest, _root(named, trainer.boxes))
      for follower, boxes in zip(hosts, meshes[host], strict=True):
        version, got = follower.poll()
        self.assertEqual(version.step, step)
        self.assertTrue(sample_weights.same(got, _mine(named, boxes)))

  def test_bases_skips_and_small_litter(self):
    trainer = Trainer(self.url, _FSDP, self.named[0])
    for step, named in enumerate(self.named):
      done = trainer.publish(step, named)
      self.assertEqual(len({d.bytes for d in done}), 1)
      self.assertEqual(done[0].skip_bytes > 0, step in (2, 4, 7))
      self.assertEqual(done[0].base_bytes > 0, step in (0, 5))
    for step, named in enumerate(self.named):
      got = follow.Follower(self.url).fetch(step)
      self.assertTrue(sample_weights.same(got, named))
    left = store.Store(self.url).keys('round/')
    self.assertLessEqual(len(left), 2 * 3 * len(_FSDP))

  def test_missing_tiles_are_refused(self):
    halves = [dict(b, embed=_FSDP[0]['embed']) for b in _FSDP]
    trainer = Trainer(self.url, tuple(halves), self.named[0])
    for error in trainer.publish(0, self.named[0]):
      self.assertIsInstance(error, ValueError)
      self.assertIn('embed', str(error))
    self.assertIsNone(follow.Follower(self.url).poll())

  def test_boxes_of_a_jax_sharding(self):
    mesh = jax.make_mesh((2, 2), ('a', 'b'))
    shape = (8, 6)
    for spec, want in (
        (('a', 'b'), (slice(4, 8), slice(0, 6))),
        (('b', 'a'), (slice(0, 8), slice(3, 6))),
        ((None, None), (slice(0, 8), slice(0, 6))),
    ):
      sharding = jax.NamedSharding(mesh, jax.P(*spec))
      found = sharding.devices_indices_map(shape)
      second_host = [found[d] for d in mesh.devices[1]]
      self.assertEqual(layout.hull(second_host, shape), want)

  def test_copies_take_turns(self):
    table = layout.Table.of({'a': np.zeros((64, 64))}, 256)
    owner = layout.owners([layout.whole(table)] * 4)
    np.testing.assert_array_equal(np.bincount(owner), [len(owner) // 4] * 4)

  @parameterized.parameters(0, 2)
  def test_one_writer_fails(self, who):
    """Others give up; the version does not exist; all go on after it."""
    trainer = Trainer(
        self.url, _EXPERTS + _EXPERTS[:1], self.named[0], patience=1.0
    )
    first = trainer.publish(0, self.named[0])[0].version
    trainer.stores[who].arm(2)
    results = trainer.publish(1, self.named[1])
    self.assertTrue(all(isinstance(r, Exception) for r in results), results)
    self.assertEqual(follow.Follower(self.url).poll()[0], first)
    trainer.stores[who].left = None
    trainer.publish(2, self.named[2])
    follower = follow.Follower(self.url)
    self.assertTrue(sample_weights.same(follower.poll()[1], self.named[2]))

  @parameterized.parameters((0, 5, 0), (0, 6, 1), (1, 3, 0))
  def test_a_writer_process_is_killed(self, who, point, newest):
    """A real SIGKILL of one of two, before or after LATEST moves."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, __file__, 'write', self.url]
    writers = [
        subprocess.Popen(
            [*command, str(i), *([str(point)] if i == who else [])],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    said = [p.communicate(timeout=120)[0] for p in writers]
    self.assertEqual(writers[who].returncode, -signal.SIGKILL)
    self.assertEqual(writers[1 - who].returncode, 0)
    self.assertIn('restart all processes of the trainer', said[1 - who])
    follower = follow.Follower(self.url)
    version, got = follower.poll()
    self.assertEqual(version.step, newest)
    named = self.named[newest]
    self.assertTrue(sample_weights.same(got, named))
    again = Trainer(self.url, _EXPERTS, named)
    self.assertEqual({v for v in again.resume(named, newest)}, {version})
    again.publish(2, self.named[2])
    self.assertTrue(sample_weights.same(follower.poll()[1], self.named[2]))
    self.assertEqual(follower.digest_mismatches, 0)

  def test_resume(self):
    Trainer(self.url, _FSDP, self.named[0]).publish(3, self.named[0])
    again = Trainer(self.url, _FSDP, self.named[0])
    version = {v for v in again.resume(self.named[0], 3)}
    self.assertEqual({v.step for v in version}, {3})
    done = again.publish(4, self.named[1])
    self.assertEqual({d.base_bytes for d in done}, {0})
    # An older checkpoint, and one on another mesh: a base each.
    self.assertEqual({v.step for v in again.resume(self.named[0], 3)}, {5})
    other = Trainer(self.url, _TENSOR, self.named[0])
    self.assertEqual({v.step for v in other.resume(self.named[0], 3)}, {6})
    got = follow.Follower(self.url).poll()[1]
    self.assertTrue(sample_weights.same(got, self.named[0]))

  def test_zombies_lose(self):
    old = Trainer(self.url, _EXPERTS, self.named[0])
    old.publish(0, self.named[0])
    new = Trainer(self.url, _FSDP, self.named[0])
    new.resume(self.named[0], 0)
    new.publish(1, self.named[1])
    for error in old.publish(1, self.named[2]):
      self.assertIsInstance(error, publish.Conflict)
    got = follow.Follower(self.url).poll()[1]
    self.assertTrue(sample_weights.same(got, self.named[1]))


def _write(url, index, point=None):
  """One of two writers; dies at its write number `point` of version 1."""
  first, second = _versions(2)
  dying = sample_weights.DyingStore(url)
  dying.on_death = lambda: os.kill(os.getpid(), signal.SIGKILL)
  writers = publish.Writers(index, _EXPERTS, first, patience_seconds=20.0)
  publisher = publish.Publisher('', _CFG, 'all', writers=writers, store=dying)
  boxes = _EXPERTS[index]
  publisher.publish(0, _mine(first, boxes))
  publisher._rounds._patience = 3.0  # both are up now
  if point is not None:
    dying.arm(point)
  try:
    publisher.publish(1, _mine(second, boxes))
  except TimeoutError as e:
    print(e)


if __name__ == '__main__':
  if sys.argv[1:2] == ['write']:
    _write(sys.argv[2], *map(int, sys.argv[3:]))
  else:
    absltest.main()
