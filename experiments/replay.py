"""Replays the RL of a finished run, asynchronous or not, bit for bit.

  python3 -m experiments.replay --workdir=DIR

Reads the warm start and the ledger; plays every rollout again, each token with
the weights that drew it, trains every step again, and compares the digests of
all rollouts, of all versions of the weights and of the final state. Exit code
1 and the first difference if there is one.
"""

import itertools

from absl import flags as absl_flags
from experiments import flags

flags.define_workdir('of a run with a finished checkpoint')
flags.define_compilation_cache()


def main() -> int:
  from composer_jax.fleet import history
  from composer_jax.fleet import ledger
  from composer_jax.learner import step
  from composer_jax.runs import evaluate
  from composer_jax.runs import progress
  from composer_jax.runs import replay
  from composer_jax.weights import checkpoint
  from experiments import machine

  workdir = flags.existing_workdir()
  cfg = flags.stored_experiment(workdir)
  cache = absl_flags.FLAGS.compilation_cache
  devices = machine.setup_devices(cfg, cache)
  extra = checkpoint.read_extra(workdir / 'checkpoints' / 'rl')
  steps = history.read(workdir, ledger.from_json(extra['ledger']))
  total, done = len(steps), itertools.count(1)
  with (
      evaluate.stored_host(cfg, workdir, None, devices.rollout) as host,
      progress.Progress(total, 'step', label='replay') as bar,
  ):
    found = replay.run(
        cfg,
        workdir,
        steps,
        host,
        step.make_mesh(cfg.mesh),
        lambda: bar.update(next(done)),
    )
  print(
      f'{found.steps} steps and {found.rollouts} rollouts replayed,'
      f' {found.unverified} groups not to be verified'
  )
  print(f'first difference: {found.difference or "none"}')
  return int(bool(found.difference))


if __name__ == '__main__':
  flags.run(main)
