"""Asynchronous machinery at staleness 0 is the plain synchronous loop."""

import pathlib

from absl.testing import absltest
import jax
import numpy as np

from composer_jax import config_text
from composer_jax.fleet import admission
from composer_jax.learner import advantages
from composer_jax.learner import items
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.runs import pipeline
from composer_jax.runs import player
from composer_jax.runs import rl
from composer_jax.runs import run_digest
from composer_jax.weights import publish
from kernels_triton import contract
from tests import small_config

_RUN = 'run'
_STEPS = 3


def _config(*edits):
  return config_text.override(
      small_config.experiment(),
      f'rl.steps={_STEPS}',
      'rl.max_staleness_versions=0',
      'rl.candidates_per_prompt=1',  # the plain loop takes tasks as they come
      *edits,
  )


def _run(cfg, workdir):
  return pipeline.open_run(
      cfg,
      pathlib.Path(workdir),
      run_id=_RUN,
      mesh=step.make_mesh(cfg.mesh),
      decoder=jax.devices()[3],
      stop=lambda: False,
  )


def _plain(cfg, run, state):
  """Sample a batch, train on it, publish, wait; nothing overlaps."""
  tx = cfg.rl_optimizer.build()
  state = step.restart(state.params, tx, run.mesh)
  publisher = publish.Publisher(run.store, cfg.weights, 'plain')
  publisher.publish(0, rl.published_arrays(state.params))
  shape = packing.Shape(
      cfg.rl.rows_per_batch, cfg.rl.tokens_per_row, contract.KEY_BLOCK
  )
  refills = admission.Pacing.of(cfg.rl).max_refill_groups
  prompt = 0
  with player.Player(cfg, run.store, run.renderer, device=run.decoder) as host:
    for version in range(_STEPS):
      groups, spent = [], 0
      while len(groups) < cfg.rl.groups_per_step and spent <= refills:
        members = [
            host.call(
                host.rollout(
                    cfg.tasks.task(prompt, 'train'),
                    admission.task_id(_RUN, prompt, m),
                    seed=admission.rollout_seed(cfg.seed, prompt, m),
                    oldest_version=version,
                )
            )
            for m in range(cfg.rl.rollouts_per_group)
        ]
        prompt += 1
        a = advantages.group_advantages(members, cfg.advantage)
        if a is None:
          spent += 1
        else:
          groups.append((members, a))
      rollouts = [t for members, _ in groups for t in members]
      weights = [x for _, a in groups for x in a]
      if rollouts:
        batches, _ = packing.pack_all(
            items.from_trajectories(rollouts, weights),
            shape,
            now=version,
            replay=cfg.model,
        )
        state, _ = step.train_step(
            state,
            batches,
            float(len(rollouts) * cfg.rl.norm_tokens),
            cfg=cfg.model,
            loss=cfg.loss,
            tx=tx,
            mesh=run.mesh,
        )
      publisher.publish(version + 1, rl.published_arrays(state.params))
  return state, prompt


class SynchronousTest(absltest.TestCase):

  def test_staleness_0_equals_the_plain_loop_bit_for_bit(self):
    cfg = _config()
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / 'loop').mkdir()
    run = _run(cfg, folder / 'loop')
    warm, _ = pipeline.next_token_phases(run)
    before = jax.device_get(warm)
    trained, complete = pipeline.reinforcement(run, warm)
    run.writer.close()
    self.assertTrue(complete)

    (folder / 'plain').mkdir()
    plain_run = _run(cfg, folder / 'plain')
    again = jax.device_put(before, warm.step.sharding)
    plain, prompts = _plain(cfg, plain_run, again)
    plain_run.writer.close()
    self.assertGreaterEqual(prompts, _STEPS * cfg.rl.groups_per_step)
    want = run_digest.of_state(plain)
    got = run_digest.of_state(trained)
    self.assertEqual(got, want)
    moved = np.abs(
        jax.device_get(trained.params.embedding) - before.params.embedding
    )
    self.assertGreater(moved.max(), 0.0)


if __name__ == '__main__':
  absltest.main()
