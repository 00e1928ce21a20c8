"""Reinforcement learning; synchronous with --set=rl.max_staleness_versions=0.

  python3 -m experiments.rl --workdir=DIR [--config=my_config.py]

Starts from the warm-up in DIR (and makes it first if there is none). The same
command continues a run that was stopped or killed; no prompt is trained twice
and none is skipped. It is one process: a job of several is refused.
"""

from experiments import flags
from experiments import job
from experiments import launch


def _work(run) -> bool:
  from composer_jax.runs import pipeline
  from composer_jax.runs import player

  print(f'sandbox: {player.isolation()}', flush=True)
  state, complete = pipeline.next_token_phases(run)
  return complete and pipeline.reinforcement(run, state)[1]


def main() -> int:
  job.refuse(
      'reinforcement learning has one process; give that one the whole mesh'
  )
  return launch.main(_work)


if __name__ == '__main__':
  launch.define()
  job.define()
  flags.run(main)
