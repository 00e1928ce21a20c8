"""The same store over s3 and read-only http, and on a disk that is full."""

import contextlib
import functools
from http import server
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
from unittest import mock

from absl.testing import absltest
import boto3
from moto import server as moto_server
from tests import sample_weights

from composer_jax import config
from composer_jax.weights import follow
from composer_jax.weights import publish
from composer_jax.weights import store

_CFG = config.WeightsConfig(
    tile_elements=512, base_every_versions=3, skip_every_versions=2
)


class Files(server.SimpleHTTPRequestHandler):
  """A static server that can do what any real one can: ranges."""

  def do_GET(self):
    path = pathlib.Path(self.translate_path(self.path))
    if not path.is_file():
      self.send_error(404)
      return
    data, status = path.read_bytes(), 200
    if wanted := re.match(r'bytes=(\d+)-(\d+)', self.headers.get('Range', '')):
      first, last = map(int, wanted.groups())
      if first >= len(data):
        self.send_error(416)
        return
      status, whole = 206, len(data)
      data = data[first : last + 1]
    self.send_response(status)
    if status == 206:
      end = first + len(data) - 1
      self.send_header('Content-Range', f'bytes {first}-{end}/{whole}')
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, *args):
    pass


class Bucket:
  """An s3 server on loopback that can go away and come back as it was."""

  def __init__(self):
    self._address = '127.0.0.1', 0
    self.start()
    client = boto3.client(
        's3', endpoint_url=self._endpoint, region_name='us-east-1'
    )
    client.create_bucket(Bucket='weights')

  @property
  def _endpoint(self):
    return 'http://{}:{}'.format(*self._address)

  def start(self):
    self._server = moto_server.ThreadedMotoServer(*self._address, verbose=False)
    self._server.start()
    self._address = self._server.get_host_and_port()

  def stop(self):
    self._server.stop()

  def url(self, prefix):
    spec = {
        'driver': 's3',
        'bucket': 'weights',
        'path': f'{prefix}/',
        'endpoint': self._endpoint,
        'aws_region': 'us-east-1',
    }
    return json.dumps(spec)


@contextlib.contextmanager
def bucket():
  """A running `Bucket`, and keys for it in the environment."""
  keys = ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY')
  with mock.patch.dict(os.environ, dict.fromkeys(keys, 'x')):
    opened = Bucket()
    yield opened
    opened.stop()


class S3Test(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.bucket = cls.enterClassContext(bucket())

  def _url(self):
    return self.bucket.url(self.id())

  def test_publish_follow_collect(self):
    url = self._url()
    named = list(sample_weights.versions(11, lr=1e-6))
    publisher = publish.Publisher(url, _CFG, 'a')
    follower = follow.Follower(url, host='h')
    late = follow.Follower(url)
    late.poll()
    for step, arrays in enumerate(named):
      publisher.publish(step, arrays)
      version, got = follower.poll()
      self.assertEqual(version.step, step)
      self.assertTrue(sample_weights.same(got, arrays))
      self.assertIsNone(follower.poll())
    self.assertTrue(sample_weights.same(late.poll()[1], named[-1]))
    opened = store.Store(url)
    self.assertGreater(opened.horizon(), 0)
    self.assertLess(len(opened.keys('m/')), len(named))

  def test_racing_trainers(self):
    url = self._url()
    named = list(sample_weights.versions(3))
    publish.Publisher(url, _CFG, 'a').publish(0, named[0])
    first, second = (publish.Publisher(url, _CFG, n) for n in 'bc')
    first.publish(1, named[1])
    with self.assertRaises(publish.Conflict):
      second.publish(1, named[2])
    got = follow.Follower(url).poll()[1]
    self.assertTrue(sample_weights.same(got, named[1]))

  def test_truncated_and_missing_objects(self):
    url = self._url()
    publisher = publish.Publisher(url, _CFG, 'a')
    named = list(sample_weights.versions(2))
    for step, arrays in enumerate(named):
      publisher.publish(step, arrays)
    opened = store.Store(url)
    (segment,) = [k for k in opened.keys('d/') if '.seg.' in k]
    data = opened.read(segment)[1]
    for cut in (len(data) // 2, 0, None):
      opened.delete(segment)
      if cut is not None:
        opened.put(segment, data[:cut])
      with self.assertRaisesRegex(follow.FollowError, segment):
        follow.Follower(url).poll()
    opened.put(segment, data)
    got = follow.Follower(url).poll()[1]
    self.assertTrue(sample_weights.same(got, named[1]))


class HttpTest(absltest.TestCase):

  def test_read_only_over_http(self):
    folder = self.create_tempdir().full_path
    handler = functools.partial(Files, directory=folder)
    http = server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    self.addCleanup(http.server_close)
    self.addCleanup(http.shutdown)
    url = f'http://127.0.0.1:{http.server_port}/'
    follower = follow.Follower(url)
    self.assertIsNone(follower.poll())
    publisher = publish.Publisher(f'file://{folder}/', _CFG, 'a')
    box = slice(3, 40), slice(0, 24)
    part = follow.Follower(url, boxes={'embed': box})
    for step, named in enumerate(sample_weights.versions(5, lr=1e-6)):
      publisher.publish(step, named)
      self.assertTrue(sample_weights.same(follower.poll()[1], named))
      want = {'embed': named['embed'][box]}
      self.assertTrue(sample_weights.same(part.poll()[1], want))
    with self.assertRaisesRegex(NotImplementedError, 'writing'):
      publish.Publisher(url, _CFG, 'b')


@absltest.skipIf(shutil.which('bwrap') is None, 'needs bubblewrap')
class FullDiskTest(absltest.TestCase):

  def test_full_disk_is_an_error_and_nothing_else(self):
    """A real file system without space, then with space again."""
    folder = self.create_tempdir().full_path
    child = subprocess.run(
        [
            *('bwrap', '--dev-bind', '/', '/'),
            *('--size', str(1 << 20), '--tmpfs', folder),
            *(sys.executable, __file__, 'publish-on-a-full-disk', folder),
        ],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
        capture_output=True,
        text=True,
    )
    self.assertEqual(child.returncode, 0, child.stderr[-2000:])
    self.assertRegex(child.stdout, 'd/0-1/.*No space left on device')


def _publish_on_a_full_disk(folder):
  url = f'file://{folder}/'
  named = list(sample_weights.versions(3))
  publisher = publish.Publisher(url, _CFG, 'a')
  publisher.publish(0, named[0])
  follower = follow.Follower(url)
  first, _ = follower.poll()
  filler = pathlib.Path(folder, 'filler')
  try:
    filler.write_bytes(bytes(1 << 21))
  except OSError:
    pass
  try:
    publisher.publish(1, named[1])
  except OSError as error:
    print(error)
  assert follower.poll() is None and follower.version == first
  assert follow.Follower(url).poll()[0] == first
  filler.unlink()
  done = publisher.publish(2, named[2])
  version, got = follower.poll()
  assert version == done.version and sample_weights.same(got, named[2])


if __name__ == '__main__':
  if sys.argv[1:2] == ['publish-on-a-full-disk']:
    _publish_on_a_full_disk(sys.argv[2])
  else:
    absltest.main()
