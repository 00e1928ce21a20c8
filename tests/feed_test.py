"""A host goes on with its old weights until the store can be read again."""

import asyncio
import dataclasses
import pathlib

from absl.testing import absltest
import jax
import ml_dtypes
import numpy as np
from tests import fresh
from tests import small_config

from composer_jax import config
from composer_jax.learner import step
from composer_jax.model import params as params_lib
from composer_jax.runs import feed
from composer_jax.weights import follow
from composer_jax.weights import publish


def _named(seed):
  tree = fresh.params(small_config.experiment().model, seed)
  return {
      name: np.asarray(a).astype(ml_dtypes.bfloat16)
      for name, a in params_lib.names(tree).items()
  }


class WeightFeedTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.url = f'file://{self.dir}/'
    publisher = publish.Publisher(
        self.url, small_config.experiment().weights, 'a'
    )
    publisher.publish(0, _named(0))
    self.publisher = publisher

  def _publish_out_of_reach(self):
    """Version 1, whose manifest is not there yet; returns where it belongs."""
    hidden = self.dir / 'hidden.json'
    latest = self.dir / 'LATEST'
    before = latest.read_bytes()
    self.publisher.publish(1, _named(1))
    after = latest.read_bytes()
    latest.write_bytes(before)
    (manifest,) = self.dir.glob('m/1.*.json')
    manifest.rename(hidden)
    return hidden, manifest, latest, after

  def test_recovers_when_the_store_does(self):
    hidden, manifest, latest, after = self._publish_out_of_reach()
    opened = feed.WeightFeed(self.url)
    self.addCleanup(opened.close)
    latest.write_bytes(after)

    async def wait():
      waiting = asyncio.ensure_future(opened.wait_for(1))
      await asyncio.sleep(0.5)
      self.assertFalse(waiting.done())
      self.assertEqual(opened.newest, 0)
      self.assertIsNone(opened.refresh())
      hidden.rename(manifest)
      await asyncio.wait_for(waiting, 30)

    asyncio.run(wait())
    version, params = opened.refresh()
    self.assertEqual(version.step, 1)
    want = _named(1)['embedding'].astype(np.float32)
    np.testing.assert_array_equal(params.embedding, want)

  def test_a_bias_that_chooses_keeps_its_f32_through_deltas(self):
    cfg = dataclasses.replace(small_config.experiment().model, router='sigmoid')
    params = fresh.params(cfg)
    url = f'{self.url}sigmoid/'
    publisher = publish.Publisher(url, config.WeightsConfig(), 'a')
    for version in range(2):
      moe = params.layers.moe
      moe = moe.replace(bias=moe.bias + 0.1234567, w_in=moe.w_in * 1.01)
      params = params.replace(layers=params.layers.replace(moe=moe))
      named = params_lib.names(params_lib.publish_dtype(params))
      publisher.publish(version, jax.tree.map(np.asarray, named))
      got = params_lib.names(feed.decode_params(feed.fetch(url)[1]))
      # What the trainer computes with.
      for name, want in params_lib.names(step.rounded(params)).items():
        np.testing.assert_array_equal(got[name], want, name)
      np.testing.assert_array_equal(got['layers/moe/bias'], moe.bias)

  def test_a_wait_fails_by_name_when_it_lasts(self):
    _, manifest, latest, after = self._publish_out_of_reach()
    opened = feed.WeightFeed(self.url, patience_seconds=0.2)
    self.addCleanup(opened.close)
    latest.write_bytes(after)
    with self.assertRaisesRegex(follow.FollowError, manifest.name):
      asyncio.run(asyncio.wait_for(opened.wait_for(1), 30))


if __name__ == '__main__':
  absltest.main()
