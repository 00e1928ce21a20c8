"""Kimi-K2 on repository tasks, planned for 512 accelerators of 140 GB.

  python3 -m experiments.rl --config=kimi_k2 --workdir=DIR --dry_run

The sizes are declared here, so a dry run needs no folder; with --set=base=MODEL
those of a folder take their place. Everything else is that of the `coder` config.
RL cannot run at this size yet: decode is not split, and no device holds all
weights. The dry run shows what the train step takes.
"""

import dataclasses

import composer_jax as cj
from experiments.configs import coder


def experiment() -> cj.Experiment:
  whole = coder.experiment()
  return dataclasses.replace(
      whole,
      name='kimi_k2',
      base=None,
      model=cj.ModelConfig(
          vocab=163_840,
          layers=61,
          embed=7168,
          q_heads=64,
          kv_heads=1,
          head_dim=128,
          kv_latent=512,
          q_latent=1536,
          rope_dim=64,
          value_dim=128,
          experts=384,
          top_k=8,
          moe_ffn=2048,
          shared_experts=1,
          dense_layers=1,
          dense_ffn=18_432,
          router='sigmoid',
          routed_scale=2.827,
          rope_theta=5e4,
          rope_scaling=cj.Yarn(
              32.0,
              4096,
              beta_fast=1.0,
              beta_slow=1.0,
              mscale=1.0,
              mscale_all_dim=1.0,
          ),
          norm_eps=1e-6,
          dtype='bfloat16',
          remat=True,
      ),
      mesh=cj.MeshConfig(data=1, fsdp=32, expert=2, tensor=8),
      rl=dataclasses.replace(whole.rl, rows_per_batch=64),
  )
