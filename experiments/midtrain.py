"""Next-token phases only, those of the config.

  python3 -m experiments.midtrain --workdir=DIR [--set=corpus.path=CODE_DIR]
      [--coordinator=HOST:PORT --processes=N --process=I]

With the default config: the standard library of the running interpreter, or any
directory of code, then format-only demonstrations. --config=midtrain reads token
shards (experiments.tokenize) in three phases. Reports bits per byte
on held-out documents, of every source. The same command continues a run that
was stopped or killed; experiments.rl takes the directory from here.
Several processes, one for each I below N, train as one (`experiments.job`).
"""

from experiments import flags
from experiments import job
from experiments import launch


def _work(run) -> bool:
  from composer_jax.runs import pipeline

  _, complete = pipeline.next_token_phases(run)
  return complete


def main() -> int:
  return launch.main(_work, rl=False, join=job.join)


if __name__ == '__main__':
  launch.define()
  job.define()
  flags.run(main)
