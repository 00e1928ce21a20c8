"""Serves a published model to rollouts elsewhere, and follows new versions.

  python3 -m experiments.rollout_host --store=URL --port=8000

An OpenAI-compatible endpoint whose keys are rollouts: POST /rollouts with the
admin key and {"id", "mode", "seed"} opens one and returns its key. Every call
is on disk, token by token, before it is answered. GET /ready, /metrics. No
trainer reads that record yet.
"""

import secrets

from experiments import flags
from experiments import serving_flags

serving_flags.define('admin_key', 'that opens rollouts')


def main() -> int:
  key = serving_flags.chosen_key('admin_key')
  fresh = key is None
  key = key or secrets.token_urlsafe(24)

  def opened(_) -> str:
    return f'admin key: {key if fresh else "as given"}'

  return serving_flags.serve(opened, admin_key=key)


if __name__ == '__main__':
  flags.run(main)
