"""A thousand versions, and a model of half a gigabyte: too long for every day.

Run with `pytest tests/nightly/weights_soak_test.py`.
"""

import functools
import gc
from http import server
import pathlib
import tempfile
import threading
import time

from absl.testing import absltest
import ml_dtypes
import numpy as np

from composer_jax import config
from composer_jax.weights import codec
from composer_jax.weights import follow
from composer_jax.weights import publish
from tests import remote_store_test
from tests import sample_weights

_MB = 1 << 20


def _resident():
  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  return pages * 4096


class _Peak:
  """Largest resident size while the context is open, above its start."""

  def __enter__(self):
    gc.collect()
    self._start = self._most = _resident()
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._watch)
    self._thread.start()
    return self

  def _watch(self):
    while not self._stop.is_set():
      self._most = max(self._most, _resident())
      time.sleep(0.002)

  def __exit__(self, *unused):
    self._stop.set()
    self._thread.join()

  @property
  def megabytes(self):
    return (self._most - self._start) / _MB


class SoakTest(absltest.TestCase):

  def test_thousand_versions_end_at_a_full_publish(self):
    url = f'file://{self.enterContext(tempfile.TemporaryDirectory())}/'
    cfg = config.WeightsConfig(tile_elements=512)
    publisher = publish.Publisher(url, cfg, 'a')
    steady, lazy = follow.Follower(url), follow.Follower(url)
    for step, named in enumerate(sample_weights.versions(1000, lr=1e-6)):
      done = publisher.publish(step, named)
      version, got = steady.poll()
      self.assertEqual(version, done.version)
      if step % 37 == 0:
        self.assertTrue(sample_weights.same(got, named))
        self.assertTrue(sample_weights.same(lazy.poll()[1], named))
      if step % 101 == 0:  # a restart from a checkpoint
        publisher = publish.Publisher(url, cfg, f'restart{step}')
        self.assertEqual(publisher.resume(named, step), done.version)
    full = publish.Publisher('memory://soak/', cfg, 'full')
    last = full.publish(0, named).version
    self.assertEqual(last.digest, version.digest)
    self.assertEqual(last.digest, codec.root(named, 512))
    self.assertEqual(steady.digest_mismatches, 0)
    for follower in (steady, lazy, follow.Follower(url)):
      follower.poll()
      self.assertEqual(follower.version, version)

  def test_memory_of_a_large_model(self):
    """2 bytes a parameter for the snapshot, and 256 MB."""
    url = f'file://{self.enterContext(tempfile.TemporaryDirectory())}/'
    rng = np.random.default_rng(0)
    shape = 260, 1024, 1024  # 520 MB
    words = np.empty(shape, np.uint16)
    for i in range(shape[0]):
      layer = rng.normal(0, 0.02, shape[1:]).astype(ml_dtypes.bfloat16)
      words[i] = layer.view(np.uint16)
    named = {'w': words.view(ml_dtypes.bfloat16)}
    limit = words.nbytes / _MB + 256
    publisher = publish.Publisher(url, config.WeightsConfig(), 'a')
    follower = follow.Follower(url)
    peaks = {}
    with _Peak() as peaks['publish base']:
      publisher.publish(0, named)
    with _Peak() as peaks['join']:
      follower.poll()
    for step in range(1, 9):
      for i in range(shape[0]):
        hit = rng.random(shape[1:]) < 0.01
        words[i] += hit
      with _Peak() as peaks[f'publish {step}']:
        publisher.publish(step, named)
      with _Peak() as peaks[f'apply {step}']:
        follower.poll()
    sizes = {name: round(p.megabytes) for name, p in peaks.items()}
    print(sizes)
    self.assertLess(max(sizes.values()), limit, sizes)
    self.assertEqual(follower.version.digest, codec.root(named))


class AwayTest(absltest.TestCase):

  def test_store_that_is_away_for_a_while(self):
    """An error that names it, the old version meanwhile, then the new one."""
    folder = self.create_tempdir().full_path
    handler = functools.partial(remote_store_test.Files, directory=folder)
    http = server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    address = http.server_address
    threading.Thread(target=http.serve_forever, daemon=True).start()
    publisher = publish.Publisher(
        f'file://{folder}/', config.WeightsConfig(tile_elements=512), 'a'
    )
    named = list(sample_weights.versions(3))
    publisher.publish(0, named[0])
    follower = follow.Follower(f'http://127.0.0.1:{address[1]}/')
    first, _ = follower.poll()
    publisher.publish(1, named[1])
    http.shutdown()
    http.server_close()
    with self.assertRaisesRegex(follow.FollowError, 'LATEST'):
      follower.poll()
    self.assertEqual(follower.version, first)
    http = server.ThreadingHTTPServer(address, handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    self.addCleanup(http.server_close)
    self.addCleanup(http.shutdown)
    self.assertTrue(sample_weights.same(follower.poll()[1], named[1]))

  def test_bucket_that_is_away_for_a_while(self):
    """Publisher and follower both fail by name, and go on afterwards."""
    bucket = self.enterContext(remote_store_test.bucket())
    url = bucket.url('away')
    cfg = config.WeightsConfig(tile_elements=512)
    publisher = publish.Publisher(url, cfg, 'a')
    follower = follow.Follower(url)
    named = list(sample_weights.versions(3))
    first = publisher.publish(0, named[0]).version
    follower.poll()
    bucket.stop()
    with self.assertRaisesRegex(OSError, 'd/0-1/.*in reach'):
      publisher.publish(1, named[1])
    with self.assertRaisesRegex(follow.FollowError, 'LATEST'):
      follower.poll()
    self.assertEqual(follower.version, first)
    bucket.start()
    done = publisher.publish(2, named[2])
    version, got = follower.poll()
    self.assertEqual(version, done.version)
    self.assertTrue(sample_weights.same(got, named[2]))


if __name__ == '__main__':
  absltest.main()
