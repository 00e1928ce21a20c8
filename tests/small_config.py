"""A whole run in seconds: the shipped experiment, made very small.

A model of this size solves nothing, so a second reward, which an untrained
policy can earn too, gives every group a lesson.
"""

import dataclasses
import functools

import numpy as np

from composer_jax import config
from composer_jax.rewards import hierarchy
from composer_jax.rewards import verify
from experiments.configs import tiny


@dataclasses.dataclass(frozen=True)
class SmallIds:
  """Share of sampled tokens in the lower half of the vocabulary, times 0.3."""

  half: int = 192

  async def __call__(self, task, episode):
    del task
    drawn = [s.tokens[s.sampled] for s in episode.segments]
    share = float(np.mean(np.concatenate(drawn) < self.half))
    score = hierarchy.INFLUENCE * share
    return verify.RewardResult(score, True, parts={'small_ids': score})


def experiment() -> config.Experiment:
  whole = tiny.experiment()
  midtrain, warmup = whole.phases
  small = functools.partial(
      dataclasses.replace, rows_per_step=4, tokens_per_row=128
  )
  return dataclasses.replace(
      whole,
      rewards=(verify.Verify(), SmallIds()),
      model=config.ModelConfig(
          vocab=384,
          layers=2,
          embed=32,
          q_heads=2,
          kv_heads=1,
          head_dim=16,
          experts=4,
          moe_ffn=32,
      ),
      corpus=config.CorpusConfig(max_bytes=150_000),
      phases=(
          small(midtrain, steps=2),
          small(warmup, steps=4, mix=(('demos', 1), ('code', 1))),
      ),
      rollout=config.RolloutConfig(slots=32, prefill_tokens=512),
      rl=config.RlConfig(
          steps=4,
          groups_per_step=2,
          rollouts_per_group=4,
          candidates_per_prompt=4,
          rows_per_batch=8,
          tokens_per_row=128,
          workers=32,
          checkpoint_every_steps=1,
          eval_every_steps=2,
      ),
      evaluation=config.EvalConfig(tasks=4, showcase=2),
  )
