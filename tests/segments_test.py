"""Rollouts of several segments, from the engine to the gradient."""

import dataclasses
import functools
import pathlib

from absl.testing import absltest
import jax
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.chat import compact_renderer
from composer_jax.fleet import admission
from composer_jax.fleet import facts
from composer_jax.fleet import ingest
from composer_jax.learner import advantages
from composer_jax.learner import items
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.model import params as params_lib
from composer_jax.runs import audit
from composer_jax.runs import feed
from composer_jax.runs import player
from composer_jax.runs import replay
from composer_jax.runs import rl
from composer_jax.weights import publish
from kernels_triton import contract
from tests import fresh
from tests import summary_config

_CFG = dataclasses.replace(
    summary_config.experiment(),
    rollout=config.RolloutConfig(
        slots=16, context_tokens=96, prefill_tokens=512
    ),
)


def _renderer():
  texts = [_CFG.tasks.task(k, 'warmup').files['f.py'] for k in range(300)]
  return compact_renderer.CompactRenderer(
      compact_renderer.train_tokenizer(texts, 384)
  )


class EngineTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)
    self.url = f'file://{self.workdir}/weights/'
    self.params = fresh.params(_CFG.model)
    publisher = publish.Publisher(self.url, _CFG.weights, 'test')
    arrays = rl.published_arrays(self.params)
    self.version = publisher.publish(0, arrays).version
    host = player.Player(
        _CFG,
        self.url,
        _renderer(),
        device=jax.devices()[0],
        feed=functools.partial(feed.FixedFeed, step=0),
    )
    self.host = self.enterContext(host)

  def test_audit_and_replay_of_every_segment_are_exact(self):
    tasks = [_CFG.tasks.task(k, 'train') for k in range(12)]
    rollouts = self.host.call(
        self.host.rollouts(tasks, name='t', seeds=range(12), temperature=1.0)
    )
    # A model without training is cut off and told so until it has to sum up.
    several = [t for t in rollouts if len(t.segments) > 1]
    self.assertGreater(len(several), 6)
    folder = self.workdir / 'trajectories'
    folder.mkdir()
    for i, t in enumerate(rollouts):
      (folder / f'{i}.traj').write_bytes(trace.to_bytes(t))
    mesh = step.make_mesh(_CFG.mesh)
    found = audit.run(_CFG, self.workdir, self.url, mesh)
    sampled = sum(int(s.sampled.sum()) for t in rollouts for s in t.segments)
    self.assertEqual((found.trajectories, found.tokens), (12, sampled))
    self.assertEqual(found.max_abs_dlogp, 0.0)
    self.assertEqual(found.routing_differences, 0)
    self.assertEqual(found.digest_mismatches, 0)

    named = params_lib.names(params_lib.publish_dtype(self.params))
    params = feed.decode_params({k: np.asarray(v) for k, v in named.items()})
    original = next(t for t in several if len(t.segments) > 2)
    # Played again as if other weights had drawn every segment: the same ones.
    count = len(original.segments)
    weights = {k: replay.Weights(params, f'digest-{k}') for k in range(count)}
    spans = [s.versions + k for k, s in enumerate(original.segments)]
    index = int(original.group_id.rpartition('/')[2])
    again = self.host.call(
        self.host.rollout(
            tasks[index],
            original.task_id,
            seed=index,
            policy=replay.Recorded(_CFG, weights, spans),
        )
    )
    self.assertLen(again.segments, count)
    self.assertEqual(again.weights, {k: f'digest-{k}' for k in range(count)})
    for k, (got, want) in enumerate(
        zip(again.segments, original.segments, strict=True)
    ):
      self.assertTrue((got.versions == k).all())
      for field in ('tokens', 'sampled', 'logps'):
        np.testing.assert_array_equal(getattr(got, field), getattr(want, field))
      np.testing.assert_array_equal(got.routing.experts, want.routing.experts)


def _segment(first, sampled=4):
  n = 8
  drawn = np.arange(n) >= n - sampled
  return trace.TokenTrace(
      np.arange(first, first + n, dtype=np.int32),
      drawn,
      np.where(drawn, -0.5, 0).astype(np.float32),
      np.zeros(n, np.int32),
  )


def _rollout(member, reward, segments):
  return trace.Trajectory(
      f'r/0/{member}',
      'r/0',
      tuple(_segment(10 * k) for k in range(segments)),
      reward,
      {},
      trace.StopReason.FINISHED,
      meta={'summaries': str(segments - 1), 'summary_tokens': '6'},
  )


class LearnerTest(absltest.TestCase):

  def test_a_group_counts_rollouts_whatever_their_segments(self):
    group = [_rollout(0, 1.0, 3), _rollout(1, 0.0, 1), _rollout(2, 0.0, 2)]
    weights = advantages.group_advantages(group, advantages.GroupMean())
    np.testing.assert_allclose(weights, [2 / 3, -1 / 3, -1 / 3])
    found = items.from_trajectories(group, weights)
    self.assertEqual(
        [(i.rollout, round(3 * i.advantage)) for i in found],
        [(1, 2)] * 3 + [(2, -1)] + [(3, -1)] * 2,
    )
    shape = packing.Shape(3, 32, contract.KEY_BLOCK)
    batches, stats = packing.pack_all(found, shape, now=0)
    self.assertEqual(stats.sampled_tokens, 6 * 4)
    homes = [set(b.rollouts[b.rollouts > 0].tolist()) for b in batches]
    self.assertEqual(sorted(n for home in homes for n in home), [1, 2, 3])
    total = np.zeros(4)
    for b in batches:
      np.add.at(total, b.rollouts[b.sampled], b.advantages[b.sampled])
    np.testing.assert_allclose(total[1:], [8, -4 / 3, -8 / 3], rtol=1e-6)

  def test_metrics_tell_segments_from_rollouts(self):
    def metrics(*segments):
      members = {
          k: admission.Member(k, 0, None, facts.of(_rollout(k, float(k), n)))
          for k, n in enumerate(segments)
      }
      group = admission.Group(0, 0, members)
      return ingest.metrics(admission.Consumed(0, 0, (group,), (), (), 1, 2))

    found = metrics(3, 1)
    self.assertEqual(found['segments/count_mean'], 2.0)
    self.assertEqual(found['segments/count_max'], 3.0)
    self.assertEqual(found['segments/summaries_mean'], 1.0)
    self.assertEqual(found['segments/summary_tokens_mean'], 6.0)
    self.assertEqual(found['segments/tokens_max'], 24.0)
    self.assertEqual(found['segments/longest_tokens'], 8.0)
    self.assertEqual(found['length/trained_max'], 12.0)
    none = metrics(1, 1)
    self.assertEmpty([k for k in none if k.startswith('segments/')])


if __name__ == '__main__':
  absltest.main()
