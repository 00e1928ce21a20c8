"""A publisher may die or lose anywhere; readers see whole versions only."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
from tests import sample_weights

from composer_jax import config
from composer_jax.weights import codec
from composer_jax.weights import follow
from composer_jax.weights import publish
from composer_jax.weights import records
from composer_jax.weights import store

# seg and idx of the delta, seg and idx of the base, manifest, LATEST.
_POINTS = (0, 1, 2, 3, 4, 5)
_EVERY = config.WeightsConfig(tile_elements=512, base_every_versions=1)


class StoreTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.url = f'file://{self.dir}/'

  def test_publishes_deltas_and_bases(self):
    publisher = publish.Publisher(self.url, sample_weights.CFG, 'a')
    named = list(sample_weights.versions(6))
    done = [publisher.publish(i, n) for i, n in enumerate(named)]
    self.assertEqual(
        [d.base_bytes > 0 for d in done],
        [True, False, False, False, True, False],
    )
    for before, after, d in zip(named, named[1:], done[1:], strict=False):
      changed = sum(
          int((before[k].view(t) != after[k].view(t)).sum())
          for k, t in ((k, f'u{before[k].itemsize}') for k in before)
      )
      self.assertEqual(d.changed, changed)
      self.assertEqual(d.elements, sum(a.size for a in after.values()))
      self.assertLess(d.bytes, d.full_bytes)
    on_disk = sum(
        (self.dir / n).stat().st_size
        for n in sample_weights.files(self.dir)
        if n.startswith('d/4-5/') or n.startswith('m/5.')
    )
    self.assertEqual(done[5].bytes, on_disk)
    self.assertEqual(done[0].changed_fraction, 1.0)

  def test_unchanged_version_costs_only_its_index(self):
    publisher = publish.Publisher(self.url, sample_weights.CFG, 'a')
    named = next(sample_weights.versions(1))
    publisher.publish(0, named)
    done = publisher.publish(1, named)
    self.assertEqual(done.changed, 0)
    version, got = follow.Follower(self.url).poll()
    self.assertEqual(version.step, 1)
    self.assertTrue(sample_weights.same(got, named))

  def test_raw_tiles_when_most_values_change(self):
    publisher = publish.Publisher(self.url, sample_weights.CFG, 'a')
    named = list(sample_weights.versions(2, lr=0.02))
    publisher.publish(0, named[0])
    done = publisher.publish(1, named[1])
    self.assertGreater(done.changed_fraction, 0.9)
    opened = store.Store(self.url)
    manifest = opened.manifest(opened.latest()[0])
    rows = opened.index(manifest.delta, manifest.table)
    self.assertIn(codec.RAW, rows['codec'])
    self.assertTrue(
        sample_weights.same(follow.Follower(self.url).poll()[1], named[1])
    )

  def test_arrays_may_appear_and_change_shape(self):
    publisher = publish.Publisher(self.url, sample_weights.CFG, 'a')
    follower = follow.Follower(self.url)
    named = next(sample_weights.versions(1))
    for step, extra in enumerate(({}, {'x': (3, 4)}, {'x': (4, 3)})):
      now = named | {k: np.ones(s, np.float32) for k, s in extra.items()}
      version = publisher.publish(step, now).version
      self.assertIsNone(version.parent)
      self.assertTrue(sample_weights.same(follower.poll()[1], now))

  def test_segments_are_split(self):
    self.enter_context(absltest.mock.patch.object(store, 'SEGMENT_BYTES', 2000))
    publisher = publish.Publisher(self.url, sample_weights.CFG, 'a')
    named = next(sample_weights.versions(1))
    publisher.publish(0, named)
    self.assertGreater(len(list(self.dir.glob('base/0/*.seg.*'))), 3)
    self.assertTrue(
        sample_weights.same(follow.Follower(self.url).poll()[1], named)
    )

  @parameterized.product(point=_POINTS, lands=(False, True))
  def test_failing_store(self, point, lands):
    """Every write of a publish fails, before or after taking effect."""
    dying = sample_weights.DyingStore(self.url)
    publisher = publish.Publisher('', _EVERY, 'a', store=dying)
    named = list(sample_weights.versions(4))
    first = publisher.publish(1, named[0]).version
    follower = follow.Follower(self.url)
    follower.poll()
    dying.arm(point, lands=lands)
    landed = point == max(_POINTS) and lands
    if landed:
      # The answer got lost, the write did not: recognised by its nonce.
      self.assertEqual(publisher.publish(2, named[1]).version.step, 2)
    else:
      with self.assertRaisesRegex(OSError, 'unreachable'):
        publisher.publish(2, named[1])
      self.assertIsNone(follower.poll())
      joiner = follow.Follower(self.url)
      self.assertEqual(joiner.poll()[0], first)
    dying.left = None
    # The snapshot is still what receivers have: the next delta fits.
    done = publisher.publish(3, named[2])
    version, got = follower.poll()
    self.assertEqual(version, done.version)
    self.assertTrue(sample_weights.same(got, named[2]))
    self.assertEqual(follower.digest_mismatches, 0)

  @parameterized.parameters(*_POINTS[:-1])
  def test_failing_store_with_skips(self, point):
    """Steps of a version that never came do not enter the next skip."""
    cfg = config.WeightsConfig(tile_elements=512, skip_every_versions=2)
    dying = sample_weights.DyingStore(self.url)
    publisher = publish.Publisher('', cfg, 'a', store=dying)
    named = list(sample_weights.versions(6, lr=1e-6))
    behind = follow.Follower(self.url)
    publisher.publish(0, named[0])
    behind.poll()
    publisher.publish(1, named[1])
    dying.arm(point)
    with self.assertRaisesRegex(OSError, 'unreachable'):
      publisher.publish(2, named[2])
    dying.left = None
    done = publisher.publish(3, named[3])
    self.assertGreater(done.skip_bytes, 0)
    self.assertTrue(sample_weights.same(behind.poll()[1], named[3]))
    publisher.publish(4, named[4])
    self.assertGreater(publisher.publish(5, named[5]).skip_bytes, 0)
    self.assertTrue(sample_weights.same(behind.poll()[1], named[5]))
    self.assertEqual(behind.digest_mismatches, 0)

  def test_swap_without_any_answer(self):
    """The swap lands, and the store is then gone for a while."""
    dying = sample_weights.DyingStore(self.url)
    publisher = publish.Publisher('', sample_weights.CFG, 'a', store=dying)
    named = list(sample_weights.versions(3))
    publisher.publish(1, named[0])
    dying.arm(3, lands=True)
    with absltest.mock.patch.object(dying, 'read', side_effect=OSError('gone')):
      with self.assertRaisesRegex(OSError, 'gone'):
        publisher.publish(2, named[1])
    dying.left = None
    follower = follow.Follower(self.url)
    self.assertTrue(sample_weights.same(follower.poll()[1], named[1]))
    publisher.publish(3, named[2])
    self.assertTrue(sample_weights.same(follower.poll()[1], named[2]))

  @parameterized.parameters(0, 2, 4, 5)
  def test_killed_publisher(self, point):
    """A real SIGKILL just before each kind of write."""
    child = subprocess.run(
        [sys.executable, __file__, 'publish-and-die', self.url, str(point)],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
        capture_output=True,
    )
    self.assertEqual(child.returncode, -signal.SIGKILL, child.stderr[-2000:])
    named = list(sample_weights.versions(3))
    follower = follow.Follower(self.url)
    version, got = follower.poll()
    self.assertEqual(version.step, 1)
    self.assertTrue(sample_weights.same(got, named[0]))
    # The trainer comes back from a checkpoint of step 1 and goes on.
    publisher = publish.Publisher(self.url, _EVERY, 'again')
    self.assertEqual(publisher.resume(named[0], 1), version)
    self.assertEqual(publisher.publish(2, named[1]).version.step, 2)
    self.assertTrue(sample_weights.same(follower.poll()[1], named[1]))

  def test_two_publishers_one_winner(self):
    named = list(sample_weights.versions(3))
    publish.Publisher(self.url, _EVERY, 'first').publish(0, named[0])
    racers = [publish.Publisher(self.url, _EVERY, n) for n in ('a', 'b')]
    barrier = threading.Barrier(2)
    won, lost = [], []

    def race(publisher, arrays):
      barrier.wait()
      try:
        won.append((publisher.publish(1, arrays), arrays, publisher))
      except publish.Conflict as e:
        lost.append((str(e), publisher, arrays))

    threads = [
        threading.Thread(target=race, args=x)
        for x in zip(racers, named[1:], strict=True)
    ]
    for t in threads:
      t.start()
    for t in threads:
      t.join()
    self.assertLen(won, 1)
    self.assertLen(lost, 1)
    version, got = follow.Follower(self.url).poll()
    self.assertEqual(version, won[0][0].version)
    self.assertTrue(sample_weights.same(got, won[0][1]))
    # The loser never gets anything in, however often it tries.
    with self.assertRaisesRegex(publish.Conflict, 'another trainer'):
      lost[0][1].publish(2, lost[0][2])
    won[0][2].publish(2, named[0])
    self.assertTrue(
        sample_weights.same(follow.Follower(self.url).poll()[1], named[0])
    )

  def test_resume(self):
    named = list(sample_weights.versions(4))
    first = publish.Publisher(self.url, sample_weights.CFG, 'a')
    published = [first.publish(i, n).version for i, n in enumerate(named[:3])]
    follower = follow.Follower(self.url)
    follower.poll()
    # From a checkpoint of the last version: goes on with deltas.
    second = publish.Publisher(self.url, sample_weights.CFG, 'b')
    self.assertEqual(second.resume(named[2], 2), published[2])
    self.assertIsNone(follower.poll())
    done = second.publish(3, named[3])
    self.assertEqual(done.version.parent, published[2].digest)
    self.assertEqual(done.base_bytes, 0)
    # From an older one: a fresh base under a number never used before.
    third = publish.Publisher(self.url, sample_weights.CFG, 'c')
    version = third.resume(named[1], 1)
    self.assertEqual((version.step, version.parent), (4, None))
    self.assertEqual(version.digest, codec.root(named[1], 512))
    got = follower.poll()
    self.assertEqual(got[0], version)
    self.assertTrue(sample_weights.same(got[1], named[1]))
    self.assertEqual(third.publish(2, named[2]).version.step, 5)
    # Every version so far can still be rebuilt for an audit.
    for step, arrays in enumerate(named + [named[1], named[2]]):
      self.assertTrue(sample_weights.same(follower.fetch(step), arrays))

  def test_resume_of_an_empty_store(self):
    named = next(sample_weights.versions(1))
    publisher = publish.Publisher(self.url, sample_weights.CFG, 'a')
    self.assertEqual(publisher.resume(named, 7).step, 7)
    self.assertEqual(follow.Follower(self.url).poll()[0].step, 7)

  def test_refuses_a_store_without_conditional_writes(self):

    class Careless(store.Store):

      def swap(self, key, data, generation):
        return super().swap(key, data, self.read(key)[2])

    with self.assertRaisesRegex(records.StoreError, 'not honored'):
      publish.Publisher('', _EVERY, 'a', store=Careless(self.url))

  def test_memory_store(self):
    publisher = publish.Publisher('memory://run/w', sample_weights.CFG, 'a')
    named = list(sample_weights.versions(2))
    follower = follow.Follower('memory://run/w/')
    for step, arrays in enumerate(named):
      publisher.publish(step, arrays)
      self.assertTrue(sample_weights.same(follower.poll()[1], arrays))


class BackgroundTest(absltest.TestCase):

  def test_publishes_all_in_order(self):
    url = 'memory://background/'
    background = publish.BackgroundPublisher(
        publish.Publisher(url, sample_weights.CFG, 'a')
    )
    named = list(sample_weights.versions(5))
    results = [background.submit(i, n) for i, n in enumerate(named)]
    background.close()
    self.assertEqual([r.result().version.step for r in results], [*range(5)])
    self.assertTrue(
        sample_weights.same(follow.Follower(url).poll()[1], named[-1])
    )

  def test_errors_surface(self):
    dying = sample_weights.DyingStore('memory://background-dying/')
    background = publish.BackgroundPublisher(
        publish.Publisher('', sample_weights.CFG, 'a', store=dying)
    )
    named = next(sample_weights.versions(1))
    dying.arm(0)
    failed = background.submit(0, named)
    self.assertIsInstance(failed.exception(), OSError)
    with self.assertRaisesRegex(OSError, 'unreachable'):
      background.submit(1, named)
    background.submit(2, named)
    with self.assertRaisesRegex(OSError, 'unreachable'):
      background.close()

  def test_train_step_does_not_wait(self):
    store_ = store.Store('memory://background-slow/')
    gate = threading.Event()
    put = store_.put
    store_.put = lambda *a: (gate.wait(), put(*a))[1]
    background = publish.BackgroundPublisher(
        publish.Publisher('', sample_weights.CFG, 'a', store=store_)
    )
    named = next(sample_weights.versions(1))
    background.submit(0, named)
    background.submit(1, named)
    self.assertLess(background.seconds_waited, 60)  # the store waits for ever
    gate.set()
    background.close()


def _publish_and_die(url, point):
  dying = sample_weights.DyingStore(url)
  dying.on_death = lambda: os.kill(os.getpid(), signal.SIGKILL)
  publisher = publish.Publisher('', _EVERY, 'victim', store=dying)
  named = list(sample_weights.versions(2))
  publisher.publish(1, named[0])
  dying.arm(point)
  publisher.publish(2, named[1])


if __name__ == '__main__':
  if sys.argv[1:2] == ['publish-and-die']:
    _publish_and_die(sys.argv[2], int(sys.argv[3]))
  else:
    absltest.main()
