"""`small_config` on tasks that need two summaries, in a window too small."""

import dataclasses

from composer_jax import config
from composer_jax.environments import summary_repair
from tests import small_config

HARNESS = config.HarnessConfig(
    max_turns=3,
    max_turn_tokens=12,
    max_context_tokens=80,
    summary_trigger_tokens=44,
    summary_tokens=4,
)


def experiment() -> config.Experiment:
  return dataclasses.replace(
      small_config.experiment(),
      tasks=summary_repair.SummaryRepair(facts=2),
      harness=HARNESS,
  )
