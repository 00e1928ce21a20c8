"""Repairs whose facts get past the context window in summaries only.

Three arms show what self-summary learns; the controls are

  --set=harness.train_summaries=false        summaries written, in no loss
  --set=harness.summary_trigger_tokens=None  one window, which is too small
"""

import composer_jax as cj


def experiment() -> cj.Experiment:
  return cj.Experiment(
      name='summary',
      loss=cj.DppoTv(),
      advantage=cj.GroupMean(),
      tasks=cj.SummaryRepair(),
      # A branch that is right earns 0.15, both are a success.
      rewards=(cj.Verify(fraction_weight=0.3),),
      # At twice the rate, or with half the prompts, a seed may settle on one
      # digit for every summary before it has found out which one is wanted.
      rl_optimizer=cj.AdamW(learning_rate=5e-4, b2=0.98, clip_norm=0.5),
      model=cj.ModelConfig(
          vocab=384,
          layers=2,
          embed=64,
          q_heads=4,
          kv_heads=2,
          head_dim=16,
          experts=4,
          moe_ffn=96,
      ),
      mesh=cj.MeshConfig(data=1),
      corpus=cj.CorpusConfig(max_bytes=400_000),
      phases=(
          cj.PhaseConfig(
              name='midtrain',
              optimizer=cj.AdamW(
                  learning_rate=3e-3,
                  weight_decay=0.01,
                  schedule=cj.Constant(warmup_steps=20),
              ),
              steps=20,
              rows_per_step=16,
              tokens_per_row=128,
          ),
          cj.PhaseConfig(
              name='warmup',
              optimizer=cj.AdamW(
                  learning_rate=3e-3,
                  weight_decay=0.01,
                  schedule=cj.Cosine(160, warmup_steps=20),
              ),
              steps=160,
              rows_per_step=32,
              tokens_per_row=128,
              mix=(('demos', 15), ('code', 1)),
          ),
      ),
      rollout=cj.RolloutConfig(
          slots=128, context_tokens=64, prefill_tokens=1024
      ),
      harness=cj.HarnessConfig(
          max_turns=2,
          max_turn_tokens=13,
          max_context_tokens=62,
          summary_trigger_tokens=44,
          summary_tokens=2,
      ),
      rl=cj.RlConfig(
          steps=80,
          groups_per_step=16,
          rollouts_per_group=8,
          rows_per_batch=32,
          tokens_per_row=128,
          norm_tokens=16,
          workers=256,
          eval_every_steps=20,
      ),
      evaluation=cj.EvalConfig(tasks=128),
  )
