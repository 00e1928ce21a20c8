"""A sparse MoE of a million parameters: the newcomer's run on a laptop CPU."""

from composer_jax import config
from composer_jax.environments import micro_repair
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
      rl_optimizer=optimizer.AdamW(learning_rate=4e-4, b2=0.98, clip_norm=0.5),
      phases=(
          config.PhaseConfig(
              name='midtrain',
              optimizer=optimizer.AdamW(
                  learning_rate=3e-3,
                  weight_decay=0.01,
                  schedule=optimizer.Constant(warmup_steps=20),
              ),
              steps=100,
              rows_per_step=16,
              tokens_per_row=256,
          ),
          config.PhaseConfig(
              name='warmup',
              optimizer=optimizer.AdamW(
                  learning_rate=2e-3,
                  weight_decay=0.01,
                  schedule=optimizer.Cosine(240, warmup_steps=20),
              ),
              steps=260,
              rows_per_step=48,
              tokens_per_row=128,
              mix=(('demos', 5), ('code', 1)),
          ),
      ),
      rl=config.RlConfig(
          steps=120,
          rows_per_batch=36,
          tokens_per_row=128,
          eval_every_steps=20,
      ),
  )
