"""The plan's arithmetic, against numbers worked out by hand."""

from absl.testing import absltest
from absl.testing import parameterized
import jax

from composer_jax import config
from composer_jax import config_text
from composer_jax.learner import losses
from composer_jax.learner import optimizer
from composer_jax.model import params
from composer_jax.runs import plan


def _experiment(*edits):
  adam = optimizer.AdamW()
  out = config.Experiment(
      name='plan',
      loss=losses.NextToken(),
      advantage=None,
      tasks=None,
      rewards=(),
      rl_optimizer=adam,
      phases=(
          config.PhaseConfig('midtrain', adam, 10, 4, 64),
          config.PhaseConfig(
              'warmup', adam, 5, 8, 64, mix=(('demos', 3), ('code', 1))
          ),
      ),
      rl=config.RlConfig(
          steps=20,
          groups_per_step=3,
          rollouts_per_group=4,
          rows_per_batch=8,
          tokens_per_row=64,
          norm_tokens=16,
          eval_every_steps=10,
      ),
      rollout=config.RolloutConfig(slots=8, context_tokens=96),
      harness=config.HarnessConfig(max_context_tokens=64),
  )
  return config_text.override(out, *edits)


class PlanTest(parameterized.TestCase):

  @parameterized.parameters(
      r'midtrain +10 steps x 4 rows x 64 tokens = 2,560 tokens \(256 per step',
      r'warmup +5 steps x 8 rows x 64 tokens = 2,560 tokens \(512 per step\): '
      r'75% demos, 25% code',
      r'rl +20 steps x 12 rollouts = 240 rollouts',
      r'batch +3 prompts x 4 rollouts = 12 rollouts',
      r'capacity +8 rows x 64 tokens = 512 tokens per program call',
      r'at most +12 windows x 96 tokens = 1,152 tokens = 3 calls',
      r'denominator Z +12 rollouts x norm_tokens 16 = 192',
      r'evaluation +256 tasks, 3 times',
      r'warmup step +tokens \[8 64\]',
      r'rl step +tokens \[8 64\]',
      r'decode +up to 8 slots',
      r'loss +NextToken\(',
  )
  def test_says(self, pattern):
    self.assertRegex(plan.text(_experiment()), pattern)

  def test_summaries_make_more_windows(self):
    edits = [
        f'harness.{edit}'
        for edit in (
            'max_turns=9',
            'max_context_tokens=60',
            'max_turn_tokens=9',
            'summary_tokens=9',
            'summary_trigger_tokens=40',
        )
    ]
    text = plan.text(_experiment(*edits, 'rl.tokens_per_row=128'))
    self.assertRegex(text, r'at most +108 windows x 96 tokens')
    with self.assertRaisesRegex(ValueError, r'up to 9 windows, 1 in a row'):
      plan.check(_experiment(*edits))

  def test_counts_and_sizes_are_those_of_the_arrays(self):
    cfg = _experiment()
    made = jax.tree.leaves(
        jax.eval_shape(lambda k: params.init(cfg.model, k), jax.random.key(0))
    )
    count = sum(x.size for x in made)
    text = plan.text(cfg)
    self.assertIn(f'{count:,} (', text)
    self.assertRegex(text, rf'masters \(f32\) +{4 * count / 2**20:,.1f} MiB')
    # Keys and values: layers, slots, kv heads, positions, width, f32.
    cache = 2 * 3 * 8 * 2 * 96 * 32 * 4
    self.assertRegex(text, rf'KV cache +{cache / 2**20:,.1f} MiB')

  @parameterized.parameters(
      ('phases.midtrain.rows_per_step=3', r'rows_per_step=3: .* mesh.data=2'),
      ('rl.rows_per_batch=1', r'rl.rows_per_batch=1: must be a positive'),
      (
          'phases.warmup.tokens_per_row=80',
          r'phases.warmup.tokens_per_row=80: .* of 32',
      ),
  )
  def test_refuses_shapes_that_cannot_be_cut(self, edit, message):
    with self.assertRaisesRegex(ValueError, message):
      plan.text(_experiment(edit))

  def test_refuses_clocks_at_odds(self):
    plan.check(_experiment('harness.episode_seconds=60'))
    plan.check(_experiment('rl.lease_seconds=3'))  # less than a turn may take
    with self.assertRaisesRegex(
        ValueError, 'episode_seconds=15.0: .* above 15'
    ):
      plan.check(  # 3 turns of 5 s
          _experiment('rl.lease_seconds=1', 'harness.episode_seconds=15')
      )
    with self.assertRaisesRegex(ValueError, 'lease_seconds=60.0: .* most .*59'):
      plan.check(_experiment('harness.episode_seconds=59'))


if __name__ == '__main__':
  absltest.main()
