"""A sparse MoE of a million parameters: the newcomer's run on a laptop CPU."""

from composer_jax import config
from composer_jax.agents import micro_repair
from composer_jax.learner import advantages
from composer_jax.learner import losses
from composer_jax.learner import optimizer
from composer_jax.rewards import verify


def experiment() -> config.Experiment:
  return config.Experiment(
      name='tiny',
      loss=losses.DppoTv(),
      advantage=advantages.GroupMean(),
      tasks=micro_repair.MicroRepair(),
      rewards=(verify.Verify(),),
      midtrain_optimizer=optimizer.AdamW(
          learning_rate=3e-3, weight_decay=0.01, warmup_steps=20
      ),
      warmup_optimizer=optimizer.AdamW(
          learning_rate=2e-3,
          weight_decay=0.01,
          warmup_steps=20,
          decay_steps=240,
      ),
      rl_optimizer=optimizer.AdamW(learning_rate=4e-4, b2=0.98, clip_norm=0.5),
      midtrain=config.PhaseConfig(100, 16, 256),
      warmup=config.PhaseConfig(260, 48, 128, demo_fraction=5 / 6),
      rl=config.RlConfig(
          steps=120,
          rows_per_batch=36,
          tokens_per_row=128,
          eval_every_steps=20,
      ),
  )
