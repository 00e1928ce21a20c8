"""The replaying policy draws what the engine drew, across swaps of weights."""

import asyncio
import dataclasses
import pathlib

from absl.testing import absltest
import jax
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.model import params as params_lib
from composer_jax.rollout import engine as engine_lib
from composer_jax.runs import replay
from tests import fresh
from tests import small_config
from tests import small_run

_CFG = dataclasses.replace(
    small_config.experiment(),
    rollout=config.RolloutConfig(slots=8, context_tokens=128),
)
_SMALLER = (
    *('rl.steps=1', 'model.embed=16', 'model.layers=1', 'model.moe_ffn=16'),
    'evaluation.tasks=1',
)
_STOP = frozenset(range(8))
_NOTHING = trace.TokenTrace(
    *(np.zeros(0, t) for t in (np.int32, np.bool_, np.float32, np.int32))
)


def _weights(version):
  params = fresh.params(_CFG.model, version)
  return replay.Weights(params_lib.publish_dtype(params), f'digest-{version}')


_WEIGHTS = {version: _weights(version) for version in range(4)}


def _version(step):
  return trace.WeightVersion(step, _WEIGHTS[step].digest, None)


def _bytes(window):
  fields = ('tokens', 'sampled', 'logps', 'versions')
  return [getattr(window, f).tobytes() for f in fields] + [
      window.routing.experts.tobytes()
  ]


class RecordedTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    calls = []

    def refresh():
      calls.append(None)
      if len(calls) % 6 or len(calls) > 18:
        return None
      step = len(calls) // 6
      return _version(step), _WEIGHTS[step].params

    self.engine = self.enterContext(
        engine_lib.Engine(
            _CFG.model,
            _CFG.rollout,
            _version(0),
            _WEIGHTS[0].params,
            devices=jax.devices()[:1],
            refresh=refresh,
        )
    )

  def _windows(self):
    """Two turns in each of a few slots, three swaps on the way."""
    rng = np.random.default_rng(0)
    windows = [
        trace.extend(_NOTHING, rng.integers(8, _CFG.model.vocab, 5 + 9 * i))
        for i in range(5)
    ]
    turns = []
    for turn in range(2):
      requests = [
          engine_lib.Request(w, 17, _STOP, 10 * turn + i, 1.0)
          for i, w in enumerate(windows)
      ]
      windows = [
          f.result(timeout=600) for f in self.engine.submit_group(requests)
      ]
      turns += zip(requests, windows, strict=True)
      windows = [trace.extend(w, [9, 10, 11]) for w in windows]
    return turns

  def _again(self, request, versions):
    policy = replay.Recorded(_CFG, _WEIGHTS, [versions])
    return asyncio.run(
        policy.complete(
            request.context,
            max_tokens=request.max_tokens,
            stop=request.stop,
            seed=request.seed,
            temperature=request.temperature,
        )
    )

  def test_windows_are_drawn_again_bit_for_bit(self):
    turns = self._windows()
    spanning = 0
    for request, window in turns:
      got = self._again(request, window.versions)
      self.assertEqual(_bytes(got), _bytes(window))
      drawn = window.versions[len(request.context) :]
      spanning += drawn[0] < drawn[-1]
    self.assertGreater(spanning, 3)
    lengths = {len(w) - len(r.context) for r, w in turns}
    self.assertGreater(len(lengths), 1)  # some were stopped by a token
    # With one token drawn a version too late or too early, it is another one.
    request, window = next(t for t in turns if t[1].versions[-2] == 1)
    versions = window.versions.copy()
    versions[-2:] = 0
    got = self._again(request, versions)
    self.assertNotEqual(got.logps.tobytes(), window.logps.tobytes())

  def test_digests_are_those_of_the_weights(self):
    policy = replay.Recorded(_CFG, _WEIGHTS, [])
    self.assertEqual(policy.digests[2], 'digest-2')


class NoPhasesTest(absltest.TestCase):

  def test_a_run_that_began_with_rl_is_replayed(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / 'bare_config.py').write_text(
        'import dataclasses\n'
        'from tests import small_config\n'
        'def experiment():\n'
        '  whole = small_config.experiment()\n'
        '  return dataclasses.replace(whole, phases=())\n'
    )
    done = small_run.run(
        'rl', folder / 'run', *_SMALLER, config=folder / 'bare_config.py'
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    done = small_run.finished(
        [
            *small_run.command('replay', folder / 'run')[:4],
            f'--compilation_cache={small_run.CACHE}',
        ]
    )
    self.assertIn('1 steps and 8 rollouts', done.stdout, done.stderr)
    self.assertIn('first difference: none', done.stdout)
    self.assertEqual(done.returncode, 0)


if __name__ == '__main__':
  absltest.main()
