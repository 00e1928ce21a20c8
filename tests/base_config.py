"""The small run, made to start from a published model and to play in chats."""

import dataclasses

from composer_jax import config
from tests import small_config


def experiment() -> config.Experiment:
  cfg = small_config.experiment()
  midtrain, _ = cfg.phases
  window = 2560  # the tools of a prompt, in a tokenizer of few merges
  return dataclasses.replace(
      cfg,
      mesh=config.MeshConfig(data=1),
      phases=(midtrain,),
      rollout=config.RolloutConfig(
          slots=8, context_tokens=window, prefill_tokens=512
      ),
      harness=config.HarnessConfig(
          max_turns=2, max_turn_tokens=8, max_context_tokens=window
      ),
      rl=dataclasses.replace(
          cfg.rl,
          steps=1,
          groups_per_step=1,
          rollouts_per_group=2,
          candidates_per_prompt=1,
          rows_per_batch=2,
          tokens_per_row=window,
          workers=8,
      ),
      evaluation=config.EvalConfig(tasks=2, showcase=1),
  )
