"""What somebody needs stays, the rest goes, and no reader meets a gap."""

import pathlib
import tempfile

from absl.testing import absltest
from tests import sample_weights

from composer_jax import config
from composer_jax.inspect import stored_weights
from composer_jax.weights import follow
from composer_jax.weights import publish
from composer_jax.weights import retain
from composer_jax.weights import store

_CFG = config.WeightsConfig(
    tile_elements=512, base_every_versions=3, skip_every_versions=2
)


class _Forgetful(store.Store):
  """Cannot delete or list anything for a while."""

  away = False

  def keys(self, prefix):
    if self.away:
      raise OSError('listing refused')
    return super().keys(prefix)


class RetainTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.url = f'file://{self.dir}/'
    self.publisher = publish.Publisher(self.url, _CFG, 'a')
    self.named = list(sample_weights.versions(20))

  def _publish(self, first, last):
    for step in range(first, last):
      self.publisher.publish(step, self.named[step])

  def _versions(self):
    names = sample_weights.files(self.dir)
    return sorted({int(n[2:].split('.')[0]) for n in names if n[:2] == 'm/'})

  def test_two_bases_and_all_since_stay(self):
    self._publish(0, 4)
    (self.dir / 'd' / '3-9').mkdir()
    (self.dir / 'd' / '3-9' / 'orphan.0.seg.0').write_bytes(b'x')
    self._publish(4, 20)  # bases at 0, 3, ..., 18
    # Condemned at 15 was what lies before 12, and so were the orphans.
    self.assertEqual(self._versions(), [*range(12, 20)])
    names = sample_weights.files(self.dir)
    self.assertNotIn('d/3-9/orphan.0.seg.0', names)
    self.assertGreaterEqual(
        min(int(n.split('/')[1]) for n in names if n[:5] == 'base/'), 12
    )
    follower = follow.Follower(self.url)
    for step in (12, 14, 17, 19):
      got = follower.fetch(step)
      self.assertTrue(sample_weights.same(got, self.named[step]))
    with self.assertRaisesRegex(follow.FollowError, 'never published'):
      follower.fetch(3)
    self.assertLen(stored_weights.versions(self.url, verify=True).rows, 8)

  def test_grace_of_one_base(self):
    self._publish(0, 4)
    reader = follow.Follower(self.url)
    reader.poll()
    self._publish(4, 10)  # at 9 what lies before 6 is condemned, not gone
    self.assertEqual(self._versions()[0], 3)
    self.assertTrue(sample_weights.same(reader.poll()[1], self.named[9]))

  def test_slow_host_joins_over_a_base(self):
    self._publish(0, 2)
    reader = follow.Follower(self.url)
    reader.poll()
    self._publish(2, 20)
    self.assertTrue(sample_weights.same(reader.poll()[1], self.named[19]))

  def test_trouble_with_removal_does_not_touch_the_version(self):
    opened = _Forgetful(self.url)
    self.publisher = publish.Publisher('', _CFG, 'a', store=opened)
    follower = follow.Follower(self.url)
    self._publish(0, 9)
    opened.away = True
    for step in range(9, 13):  # two with a base
      with (
          self.assertLogs(level='WARNING')
          if step in (9, 12)
          else self.assertNoLogs(level='WARNING')
      ):
        self._publish(step, step + 1)
      got = follower.poll()[1]
      self.assertTrue(sample_weights.same(got, self.named[step]))
    opened.away = False
    self.assertEqual(self._versions()[0], 0)
    self._publish(13, 20)
    self.assertEqual(self._versions()[0], 12)

  def test_lease_keeps_a_version_until_it_is_not_renewed(self):
    self._publish(0, 5)
    host = follow.Follower(self.url, host='h0')
    host.poll()  # version 4
    opened = store.Store(self.url)
    for step in range(5, 20):
      self._publish(step, step + 1)
      retain.lease(opened, 'h0', 4)
    self.assertEqual(self._versions()[0], 3)  # the base it is built from
    got = follow.Follower(self.url).fetch(4)
    self.assertTrue(sample_weights.same(got, self.named[4]))
    for step, named in enumerate(sample_weights.versions(12, seed=1), 20):
      self.publisher.publish(step, named)
    self.assertGreater(self._versions()[0], 18)
    self.assertEmpty([*self.dir.glob('lease/*')])


if __name__ == '__main__':
  absltest.main()
