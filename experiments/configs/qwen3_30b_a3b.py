"""Qwen3-30B-A3B on repository tasks, planned for 64 accelerators.

  python3 -m experiments.rl --config=qwen3_30b_a3b --workdir=DIR --dry_run
  python3 -m experiments.rl --config=qwen3_30b_a3b --workdir=DIR
      --set=base=MODEL --set=tasks.path=TASKS

The sizes are declared here, so a dry run needs no folder; those of MODEL take
their place. Everything else is that of the `coder` config. RL has one process,
so the second command needs one that has the whole mesh and a device that holds
all weights; nobody has run it yet.
"""

import dataclasses

import composer_jax as cj
from experiments.configs import coder


def experiment() -> cj.Experiment:
  whole = coder.experiment()
  return dataclasses.replace(
      whole,
      name='qwen3_30b_a3b',
      base=None,
      model=cj.ModelConfig(
          vocab=151_936,
          layers=48,
          embed=2048,
          q_heads=32,
          kv_heads=4,
          head_dim=128,
          experts=128,
          top_k=8,
          moe_ffn=768,
          qk_norm=True,
          rope_theta=1e6,
          dtype='bfloat16',
          remat=True,
      ),
      mesh=cj.MeshConfig(data=1, fsdp=32, expert=2),
      rl=dataclasses.replace(whole.rl, rows_per_batch=64),
  )
