"""Serves a published model to people and programs, and follows new versions.

  python3 -m experiments.serve --store=URL --port=8000

An OpenAI-compatible endpoint under one API key. Requests choose temperature,
seed, stop strings and n. Every call is on disk before it is answered.
"""

import uuid

from experiments import flags
from experiments import serving_flags

serving_flags.define('api_key', 'of clients')


def main() -> int:
  key = serving_flags.chosen_key('api_key')

  def opened(served) -> str:
    secret = served.open(f'serve-{uuid.uuid4().hex[:12]}', 'serve', key)
    return f'API key: {secret if key is None else "as given"}'

  return serving_flags.serve(opened)


if __name__ == '__main__':
  flags.run(main)
