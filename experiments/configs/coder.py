"""A published model on repository tasks, in its own chat format.

  python3 -m experiments.build_tasks --out=TASKS
  python3 -m experiments.rl --config=coder --workdir=DIR
      --set=base=MODEL --set=tasks.path=TASKS

MODEL is a folder as on the Hugging Face hub, with a chat template that shows
tools. Sized for one accelerator and a model of a few billion parameters; there
is no next-token phase before RL unless `phases` names one.
"""

import composer_jax as cj


def experiment() -> cj.Experiment:
  window = 16_384
  return cj.Experiment(
      name='coder',
      base='model',
      loss=cj.DppoTv(),
      advantage=cj.GroupMean(),
      tasks=cj.HarborDirectory('tasks'),
      rewards=(cj.Verify(),),
      phases=(),
      rl_optimizer=cj.AdamW(
          learning_rate=1e-6,
          b2=0.98,
          schedule=cj.Constant(warmup_steps=5),
      ),
      model=cj.ModelConfig(dtype='bfloat16', remat=True),
      mesh=cj.MeshConfig(data=1),
      rollout=cj.RolloutConfig(
          slots=64,
          context_tokens=window,
          prefill_tokens=8192,
          cache_tokens=64 * 8192,
      ),
      harness=cj.HarnessConfig(
          max_turns=24,
          max_turn_tokens=1024,
          max_context_tokens=window,
          tool_output_bytes=8000,
          tool_seconds=20.0,
          episode_seconds=2 * 3600.0,
      ),
      rl=cj.RlConfig(
          steps=200,
          groups_per_step=16,
          rollouts_per_group=16,
          rows_per_batch=4,
          tokens_per_row=window,
          norm_tokens=4096,
          workers=128,
          checkpoint_every_steps=10,
          eval_every_steps=20,
      ),
      evaluation=cj.EvalConfig(tasks=64),
  )
