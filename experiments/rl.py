"""Reinforcement learning; synchronous with --set=rl.max_staleness_versions=0.

  python3 -m experiments.rl --workdir=DIR [--config=my_config.py]

Starts from the warm-up in DIR (and makes it first if there is none). The same
command continues a run that was stopped or killed; no prompt is trained twice
and none is skipped. It is one process: a job of several is refused.

With --queue, tasks are played by other processes, here or on other machines:

  python3 -m experiments.fleet up --dir=BROKER
  python3 -m experiments.rl --workdir=DIR --queue=nats://127.0.0.1:4222
  python3 -m experiments.rollout_host --queue=nats://127.0.0.1:4222 --play=32
"""

import dataclasses
import json
import pathlib

from absl import flags as absl_flags
from experiments import flags
from experiments import job
from experiments import launch
from experiments import queue_flags


def _define() -> None:
  queue_flags.define('trainer')
  absl_flags.DEFINE_string(
      'store',
      None,
      'With --queue: URL or directory of the weight store, which all hosts can'
      ' reach. Default: weights/ in the work directory.',
  )
  absl_flags.DEFINE_string(
      'blobs',
      None,
      'With --queue: URL or directory where hosts put rollouts until they are'
      ' trained on. Default: blobs/ beside the weight store.',
  )


def _fleet(workdir: pathlib.Path):
  """Where tasks are played, or None for here."""
  from composer_jax.runs import fleet
  from composer_jax.runs import manifest

  values = absl_flags.FLAGS
  if values.queue is None:
    for name in ('store', 'blobs', 'queue_key'):
      if values[name].value is not None:
        raise ValueError(
            f'--{name}={values[name].value}: only with --queue=nats://HOST:PORT'
        )
    return None
  weights = fleet.weights(workdir)
  if values.store is not None:
    weights = flags.store(new=True)
    known = workdir / 'checkpoints' / 'rl'
    if weights.rstrip('/') != fleet.weights(workdir).rstrip('/') and any(
        known.glob('*')
    ):
      raise ValueError(
          f'--store={values.store}: this run publishes to'
          f' {fleet.weights(workdir)}; leave the flag out'
      )
  blobs = flags.url(values.blobs) if values.blobs else _beside(weights)
  queue_flags.check()
  from composer_jax.runs import nats_fleet

  fleet.keep(workdir, weights=weights, blobs=blobs)
  return nats_fleet.Fleet(
      queue=values.queue,
      key=queue_flags.key(),
      blobs=blobs,
      weights=weights,
      facts=json.loads((workdir / manifest.FILE).read_text()),
  )


def _beside(weights: str) -> str:
  """URL of blobs/ in the folder, or the bucket, that the weights lie in.

  Raises:
    ValueError: they are not in a folder.
  """
  scheme, _, path = weights.rstrip('/').partition('://')
  folder, _, name = path.rpartition('/')
  if weights.startswith('{') or not (folder and name):
    raise ValueError(
        f'--store={weights}: there is no folder around it; say with --blobs=URL'
        ' where hosts shall put rollouts'
    )
  return f'{scheme}://{folder}/blobs/'


def _work(run) -> bool:
  from composer_jax.runs import pipeline
  from composer_jax.runs import player

  fleet = _fleet(run.workdir)
  print(f'sandbox: {player.isolation()}', flush=True)
  if fleet is not None:
    print(
        f'tasks are played by hosts at {fleet.queue}, of run {run.run_id}; start'
        f' some: python3 -m experiments.rollout_host --queue={fleet.queue}'
        ' --play=32',
        flush=True,
    )
  run = dataclasses.replace(run, fleet=fleet)
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
  _define()
  flags.run(main)
