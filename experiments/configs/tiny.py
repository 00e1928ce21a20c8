"""A sparse MoE of a million parameters: the newcomer's run on a laptop CPU."""

import composer_jax as cj


def experiment() -> cj.Experiment:
  return cj.Experiment(
      name='tiny',
      loss=cj.DppoTv(),
      advantage=cj.GroupMean(),
      tasks=cj.MicroRepair(),
      rewards=(cj.Verify(),),
      rl_optimizer=cj.AdamW(learning_rate=4e-4, b2=0.98, clip_norm=0.5),
      phases=(
          cj.PhaseConfig(
              name='midtrain',
              optimizer=cj.AdamW(
                  learning_rate=3e-3,
                  weight_decay=0.01,
                  schedule=cj.Constant(warmup_steps=20),
              ),
              steps=100,
              rows_per_step=16,
              tokens_per_row=256,
          ),
          cj.PhaseConfig(
              name='warmup',
              optimizer=cj.AdamW(
                  learning_rate=2e-3,
                  weight_decay=0.01,
                  schedule=cj.Cosine(240, warmup_steps=20),
              ),
              steps=260,
              rows_per_step=48,
              tokens_per_row=128,
              mix=(('demos', 5), ('code', 1)),
          ),
      ),
      rl=cj.RlConfig(
          steps=120,
          rows_per_batch=36,
          tokens_per_row=128,
          eval_every_steps=20,
      ),
  )
