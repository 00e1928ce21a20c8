"""A follower has the old version or the new one, whatever the store does."""

import json
import pathlib
import random
import shutil
import tempfile
import threading
import uuid

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import ml_dtypes
import numpy as np
from tests import sample_weights

from composer_jax import config
from composer_jax.weights import codec
from composer_jax.weights import follow
from composer_jax.weights import publish
from composer_jax.weights import records
from composer_jax.weights import store


class FollowTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.url = f'file://{self.dir}/'

  def _publish(self, count, seed=0, first=1, cfg=sample_weights.CFG):
    publisher = publish.Publisher(self.url, cfg, f'trainer{seed}')
    named = list(sample_weights.versions(count, seed))
    done = [publisher.publish(first + i, n) for i, n in enumerate(named)]
    return publisher, named, done

  def test_follows_bit_for_bit(self):
    follower = follow.Follower(self.url)
    self.assertIsNone(follower.poll())
    publisher = publish.Publisher(self.url, sample_weights.CFG, 'a')
    parent = None
    for step, named in enumerate(sample_weights.versions(11)):
      done = publisher.publish(step, named)
      version, got = follower.poll()
      self.assertTrue(sample_weights.same(got, named))
      self.assertEqual(version, done.version)
      self.assertEqual((version.step, version.parent), (step, parent))
      self.assertEqual(version.digest, codec.root(named, 512))
      self.assertIsNone(follower.poll())
      self.assertEqual(follower.version, version)
      parent = version.digest
    self.assertEqual(follower.digest_mismatches, 0)

  def test_fifty_versions_end_at_a_full_publish(self):
    _, named, done = self._publish(50)
    warm = follow.Follower(self.url)
    version, got = warm.poll()  # base and the deltas after it
    self.assertTrue(sample_weights.same(got, named[-1]))
    full = publish.Publisher('memory://full/', sample_weights.CFG, 'full')
    self.assertEqual(full.publish(0, named[-1]).version.digest, version.digest)
    self.assertLess(done[1].bytes, done[0].bytes)

  def test_catches_up_over_deltas_and_over_bases(self):
    publisher, _, _ = self._publish(1)
    warm = follow.Follower(self.url)
    warm.poll()
    for step, named in enumerate(sample_weights.versions(9), 2):
      publisher.publish(step, named)
    version, got = warm.poll()
    self.assertEqual(version.step, 10)
    self.assertTrue(sample_weights.same(got, named))

  def test_fetch_any_version(self):
    _, named, _ = self._publish(10)
    follower = follow.Follower(self.url)
    for i in (0, 3, 7, 9):
      self.assertTrue(sample_weights.same(follower.fetch(i + 1), named[i]))
    self.assertIsNone(follower.version)
    for step in (0, 11):
      with self.assertRaisesRegex(follow.FollowError, 'never published'):
        follower.fetch(step)

  def test_handed_out_arrays_stay(self):
    publisher, named, _ = self._publish(1)
    follower = follow.Follower(self.url)
    _, first = follower.poll()
    with self.assertRaises(ValueError):
      first['embed'][0, 0] = 1
    *_, last = sample_weights.versions(3)
    publisher.publish(9, last)
    follower.poll()
    self.assertTrue(sample_weights.same(first, named[0]))

  def test_repairs_weights_that_were_written_to(self):
    publisher, _, _ = self._publish(1)
    follower = follow.Follower(self.url)
    _, got = follower.poll()
    got['embed'].flags.writeable = True
    got['embed'][3, 4] = 7
    *_, last = sample_weights.versions(3)
    publisher.publish(9, last)
    _, got = follower.poll()
    self.assertTrue(sample_weights.same(got, last))
    self.assertEqual(follower.digest_mismatches, 1)

  def test_any_flipped_byte_is_refused_or_harmless(self):
    """Each object, damaged at many places: never other weights."""
    _, named, _ = self._publish(7)
    pick = random.Random(0)
    refused = 0
    names = sample_weights.files(self.dir)
    self.assertGreater(len(names), 20)
    for name in names:
      path = self.dir / name
      with sample_weights.restored(path) as data:
        spots = {0, len(data) - 1, *pick.choices(range(len(data)), k=8)}
        for at in spots:
          damaged = bytearray(data)
          damaged[at] ^= pick.randint(1, 255)
          path.write_bytes(damaged)
          refused += self._harmless(named)
        for size in (0, len(data) // 2, len(data) - 1):
          path.write_bytes(data[:size])
          refused += self._harmless(named)
      with sample_weights.restored(path):
        path.unlink()
        refused += self._harmless(named)
    self.assertGreater(refused, 50)
    self.assertEqual(self._harmless(named), 0)

  def _harmless(self, named):
    """1 if a joiner refused version 7, 0 if it got exactly that."""
    follower = follow.Follower(self.url)
    try:
      found = follower.poll()
    except follow.FollowError as e:
      self.assertIsNone(follower.version)
      self.assertNotIn('\n', str(e))
      return 1
    if found is None:  # no LATEST at all
      return 1
    self.assertTrue(sample_weights.same(found[1], named[6]))
    return 0

  def test_every_byte_of_the_small_objects(self):
    self._publish(2)
    for path in (self.dir / 'LATEST', next(self.dir.glob('m/2.*'))):
      with sample_weights.restored(path) as data:
        for at in range(len(data)):
          damaged = bytearray(data)
          damaged[at] ^= 1
          path.write_bytes(damaged)
          with self.assertRaises(follow.FollowError, msg=f'{path} {at}'):
            follow.Follower(self.url).poll()

  def test_refusal_keeps_the_old_version_until_the_cure(self):
    publisher, named, _ = self._publish(2)
    follower = follow.Follower(self.url)
    version, got = follower.poll()
    *_, last = sample_weights.versions(3)
    publisher.publish(3, last)
    segment = next(self.dir.glob('d/2-3/*.seg.0'))
    with sample_weights.restored(segment) as data:
      segment.write_bytes(data[:-9] + bytes(9))
      for _ in range(2):
        with self.assertRaisesRegex(follow.FollowError, 'seg.0'):
          follower.poll()
        self.assertEqual(follower.version, version)
        self.assertTrue(sample_weights.same(got, named[1]))
    self.assertTrue(sample_weights.same(follower.poll()[1], last))

  @parameterized.parameters(
      ('d/2-3/*.seg.0', None), ('d/2-3/*.seg.0', 20), ('m/3.*', None)
  )
  def test_damaged_delta_is_passed_by_the_next_base(self, pattern, keep):
    publisher, _, _ = self._publish(2)
    follower = follow.Follower(self.url)
    version, _ = follower.poll()
    more = list(sample_weights.versions(6))[2:]
    publisher.publish(3, more[0])
    path = next(self.dir.glob(pattern))
    data = path.read_bytes()
    path.unlink()
    if keep is not None:
      path.write_bytes(data[:keep])
    for step in (4, 5):
      with self.assertRaisesRegex(follow.FollowError, path.name):
        follower.poll()
      self.assertEqual(follower.version, version)
      publisher.publish(step, more[step - 3])
    version, got = follower.poll()  # version 5 has a base
    self.assertEqual(version.step, 5)
    self.assertTrue(sample_weights.same(got, more[2]))

  def test_swapped_and_doubled_objects(self):
    self._publish(4)
    for kind in ('seg.0', 'idx'):
      one, two = (
          next(self.dir.glob(f'd/{e}/*.{kind}')) for e in ('1-2', '2-3')
      )
      with sample_weights.restored(one) as a, sample_weights.restored(two) as b:
        for x, y in ((b, a), (a, a), (b, b)):
          one.write_bytes(x)
          two.write_bytes(y)
          with self.assertRaises(follow.FollowError):
            follow.Follower(self.url).poll()
    one, two = (next(self.dir.glob(f'm/{v}.*')) for v in (2, 3))
    with sample_weights.restored(one) as a, sample_weights.restored(two) as b:
      one.write_bytes(b)
      two.write_bytes(a)
      with self.assertRaises(follow.FollowError):
        follow.Follower(self.url).poll()
    follow.Follower(self.url).poll()

  def test_rolled_back_pointer(self):
    publisher, named, _ = self._publish(3)
    old = (self.dir / 'LATEST').read_bytes()
    *_, last = sample_weights.versions(4)
    publisher.publish(4, last)
    follower = follow.Follower(self.url)
    version, _ = follower.poll()
    (self.dir / 'LATEST').write_bytes(old)
    with self.assertRaisesRegex(follow.FollowError, 'versions only grow'):
      follower.poll()
    self.assertEqual(follower.version, version)
    with self.assertRaises(publish.Conflict):
      publisher.publish(5, last)
    # The cure the message names: the old weights under a new number.
    rescue = publish.Publisher(self.url, sample_weights.CFG, 'operator')
    rescue.publish(6, named[2])
    self.assertTrue(sample_weights.same(follower.poll()[1], named[2]))

  def test_forked_history(self):
    publisher, named, _ = self._publish(3)
    follower = follow.Follower(self.url)
    follower.poll()
    fork = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    shutil.copytree(self.dir, fork, dirs_exist_ok=True)
    *_, last = sample_weights.versions(4)
    publisher.publish(4, last)
    follower.poll()
    other = publish.Publisher(f'file://{fork}/', sample_weights.CFG, 'fork')
    self.assertEqual(other.resume(named[2]).step, 3)
    other.publish(4, named[0])
    other.publish(5, named[1])
    shutil.rmtree(self.dir)
    shutil.copytree(fork, self.dir)
    with self.assertRaisesRegex(follow.FollowError, 'forked'):
      follower.poll()
    self.assertEqual(follower.version.step, 4)

  def test_contradicting_manifest(self):
    """A pointer that vouches for a manifest with another root."""
    self._publish(2)
    opened = store.Store(self.url)
    link, generation = opened.latest()
    bad = records.Link(3, 'f' * 64, link.manifest)
    self.assertTrue(opened.advance(bad, 'x', generation))
    with self.assertRaisesRegex(follow.FollowError, 'not version 3'):
      follow.Follower(self.url).poll()

  def test_wrong_root_in_manifest(self):
    self._publish(2)
    opened = store.Store(self.url)
    link, generation = opened.latest()
    head = json.loads(opened.get(link.manifest))
    head['root'] = 'f' * 64
    blob = opened.put('m/3.json', json.dumps(head).encode())
    opened.advance(records.Link(2, 'f' * 64, blob), 'x', generation)
    with self.assertRaisesRegex(follow.FollowError, 'add up to its root'):
      follow.Follower(self.url).poll()

  def test_concurrent_polls(self):
    publisher, _, _ = self._publish(1)
    follower = follow.Follower(self.url)
    got, errors = [], []

    def work():
      try:
        while len(got) < 6 and not errors:
          found = follower.poll()
          if found is not None:
            got.append(found)
      except Exception as e:
        errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
      t.start()
    named = list(sample_weights.versions(6))
    for i in range(1, 6):
      while len(got) < i and not errors:
        pass
      publisher.publish(1 + i, named[i])
    for t in threads:
      t.join(600)
    self.assertEmpty(errors)
    steps = [version.step for version, _ in got]
    self.assertEqual(steps, [1, 2, 3, 4, 5, 6])
    for version, arrays in got:
      self.assertTrue(sample_weights.same(arrays, named[version.step - 1]))

  def test_reads_ranges_not_objects(self):
    """Few requests: LATEST, manifest, index, and one per segment."""
    publisher, _, _ = self._publish(1)
    counted = sample_weights.CountingStore(self.url)
    follower = follow.Follower(self.url, store=counted)
    follower.poll()
    *_, last = sample_weights.versions(2)
    publisher.publish(2, last)
    counted.forget()
    follower.poll()
    self.assertLen(counted.reads, 4, counted.reads)


class SkipTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.url = f'file://{self.enterContext(tempfile.TemporaryDirectory())}/'
    self.cfg = config.WeightsConfig(
        tile_elements=512, base_every_versions=100, skip_every_versions=4
    )
    self.publisher = publish.Publisher(self.url, self.cfg, 'a')
    self.named = list(sample_weights.versions(15, lr=1e-6))

  def _publish(self, first, last):
    for step in range(first, last):
      done = self.publisher.publish(step, self.named[step])
      self.assertEqual(done.skip_bytes > 0, step in (4, 8, 12))

  def _poll(self, follower, counted):
    counted.forget()
    version, got = follower.poll()
    self.assertTrue(sample_weights.same(got, self.named[version.step]))
    return sorted({k.split('/')[1] for k, _ in counted.reads if k[0] == 'd'})

  def test_far_behind_takes_skips(self):
    self._publish(0, 3)
    counted = sample_weights.CountingStore(self.url)
    follower = follow.Follower(self.url, store=counted)
    self.assertEqual(self._poll(follower, counted), ['0-1', '1-2'])
    self._publish(3, 15)
    self.assertEqual(
        self._poll(follower, counted),
        ['12-13', '13-14', '2-3', '3-4', '4-8', '8-12'],
    )
    self.assertEqual(follower.digest_mismatches, 0)
    joiner = follow.Follower(self.url, store=counted)
    self.assertEqual(
        self._poll(joiner, counted), ['0-4', '12-13', '13-14', '4-8', '8-12']
    )

  def test_damaged_skip_is_passed_by_its_deltas(self):
    self._publish(0, 1)
    counted = sample_weights.CountingStore(self.url)
    follower = follow.Follower(self.url, store=counted)
    follower.poll()
    self._publish(1, 6)
    (path,) = pathlib.Path(self.url[7:]).glob('d/0-4/*.seg.0')
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    taken = self._poll(follower, counted)
    self.assertContainsSubset(['0-1', '1-2', '2-3', '3-4', '4-5'], taken)

  def test_large_changes_give_up_skips(self):
    named = list(sample_weights.versions(9, lr=1e-2))
    done = [self.publisher.publish(i, n) for i, n in enumerate(named)]
    self.assertEqual({d.skip_bytes for d in done}, {0})
    got = follow.Follower(self.url).poll()[1]
    self.assertTrue(sample_weights.same(got, named[-1]))


class SliceTest(absltest.TestCase):

  @hypothesis.given(st.data())
  @hypothesis.settings(deadline=None, max_examples=25)
  def test_any_box_of_any_array(self, data):
    named = list(sample_weights.versions(6, seed=1))
    boxes = {}
    for name, a in named[0].items():
      if data.draw(st.booleans()):
        axes = []
        for dim in a.shape:
          start = data.draw(st.integers(0, dim - 1))
          axes.append(slice(start, data.draw(st.integers(start, dim))))
        boxes[name] = tuple(axes)
    url = f'memory://slice{uuid.uuid4().hex}/'
    publisher = publish.Publisher(url, sample_weights.CFG, 'a')
    publisher.publish(0, named[0])
    follower = follow.Follower(url, boxes=boxes)
    for step in (1, 2, 5):
      publisher.publish(step, named[step])
      version, got = follower.poll()
      self.assertEqual(version.step, step)
      want = {name: named[step][name][box] for name, box in boxes.items()}
      self.assertTrue(sample_weights.same(got, want))

  def test_an_eighth_of_the_tiles_is_an_eighth_of_the_bytes(self):
    rng = np.random.default_rng(0)
    masters = rng.normal(0, 0.02, (8, 512, 512)).astype(np.float32)
    moved = masters + rng.choice([-1, 1], masters.shape) * rng.gamma(
        2, 1e-7, masters.shape
    )
    named = [{'w': m.astype(ml_dtypes.bfloat16)} for m in (masters, moved)]
    url = 'memory://eighth/'
    publisher = publish.Publisher(url, config.WeightsConfig(), 'a')
    publisher.publish(0, named[0])
    box = slice(3, 4), slice(0, 512), slice(0, 512)
    followers = {}
    for boxes in (None, {'w': box}):
      counted = sample_weights.CountingStore(url)
      follower = follow.Follower(url, boxes=boxes, store=counted)
      follower.poll()
      followers[boxes is None] = follower, counted
    done = publisher.publish(1, named[1])
    self.assertBetween(done.changed_fraction, 0.008, 0.013)
    sizes = {}
    for whole, (follower, counted) in followers.items():
      counted.forget()
      _, got = follower.poll()
      want = named[1]['w'] if whole else named[1]['w'][box]
      self.assertTrue(sample_weights.same(got, {'w': want}))
      self.assertLessEqual(len(counted.reads), 4)
      sizes[whole] = sum(n for key, n in counted.reads if key[0] == 'd')
    self.assertLessEqual(sizes[False], (1 / 8 + 0.02) * sizes[True])


class EmptyTest(absltest.TestCase):

  def test_missing_store_has_nothing(self):
    url = f'file://{self.enterContext(tempfile.TemporaryDirectory())}/nothing/'
    self.assertIsNone(follow.Follower(url).poll())
    with self.assertRaisesRegex(follow.FollowError, 'version 3'):
      follow.Follower(url).fetch(3)

  def test_lost_pointer(self):
    url = 'memory://lost/'
    publisher = publish.Publisher(url, sample_weights.CFG, 'a')
    publisher.publish(1, {'x': np.zeros(3, np.float32)})
    follower = follow.Follower(url)
    follower.poll()
    opened = store.Store(url)
    opened._kv.write('LATEST', None).result()
    with self.assertRaisesRegex(follow.FollowError, 'gone'):
      follower.poll()


if __name__ == '__main__':
  absltest.main()
