"""Serves a published model to rollouts elsewhere, and follows new versions.

  python3 -m experiments.rollout_host --store=URL --port=8000

An OpenAI-compatible endpoint whose keys are rollouts: POST /rollouts with the
admin key and {"id", "mode", "seed"} opens one and returns its key. Every call
is on disk, token by token, before it is answered. GET /ready, /metrics. No
trainer reads that record yet.

  python3 -m experiments.rollout_host --queue=nats://HOST:4222 --play=32

Plays the tasks of a run whose trainer was started with `experiments.rl --queue`,
with the run's own config, tasks and rewards, and gives the rollouts back. Any
number of such hosts may come and go; a Ctrl-C or SIGTERM plays what has begun
to its end, and what a killed host had begun is played by others.
"""

import os
import secrets
import sys

from absl import flags as absl_flags
from experiments import flags
from experiments import queue_flags
from experiments import serving_flags

serving_flags.define('admin_key', 'that opens rollouts', serves_only=False)
queue_flags.define('host')
absl_flags.DEFINE_integer(
    'play', 32, 'With --queue: tasks that are played at once.', lower_bound=1
)
absl_flags.DEFINE_string(
    'blobs',
    None,
    'With --queue: URL or directory where rollouts go, as this machine sees it.'
    " Default: the trainer's own name for it.",
)
absl_flags.DEFINE_string(
    'run', None, 'With --queue: id of the run. Default: the only one there is.'
)
absl_flags.DEFINE_bool(
    'accept_numeric_change',
    False,
    'With --queue: plays although this machine computes other bits than the'
    ' trainer; the loss then sees a mismatch.',
)


def _play() -> int:
  import jax

  queue_flags.check()

  from composer_jax.runs import manifest
  from composer_jax.runs import player
  from composer_jax.runs import remote_player
  from experiments import machine
  from kernels_triton import contract
  from kernels_triton import launch as kernels

  values = absl_flags.FLAGS
  print(f'sandbox: {player.isolation()}', flush=True)
  machine.setup_cache(values.compilation_cache)
  device = jax.devices()[0]

  def facts(cfg):
    return manifest.build(
        cfg,
        devices=[device],
        contract=contract.constants() | kernels.facts(cfg.model.kernels),
        xla_flags=os.environ.get('XLA_FLAGS', ''),
        command='',
    )

  text = 'stopping: what has begun is played to its end; once more to stop now'
  with machine.Interrupt(text) as stop:
    try:
      remote_player.play(
          values.queue,
          queue_flags.key(),
          run_id=values.run,
          store=flags.store() if values.store else None,
          blobs=flags.url(values.blobs) if values.blobs else None,
          count=values.play,
          device=device,
          facts=facts,
          accept=values.accept_numeric_change,
          stop=stop,
          say=lambda line: print(line, flush=True),
      )
    except OSError as e:  # a queue or a store that stays away
      print(f'rollout_host: error: {e}', file=sys.stderr)
      return 1
  return 0


def main() -> int:
  if absl_flags.FLAGS.queue:
    return _play()
  if not absl_flags.FLAGS.store:
    raise ValueError('--store: which model to serve; or --queue to play tasks')
  key = serving_flags.chosen_key('admin_key')
  fresh = key is None
  key = key or secrets.token_urlsafe(24)

  def opened(_) -> str:
    return f'admin key: {key if fresh else "as given"}'

  return serving_flags.serve(opened, admin_key=key)


if __name__ == '__main__':
  flags.run(main)
