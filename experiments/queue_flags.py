"""Flags of binaries that talk to a queue."""

from __future__ import annotations

import asyncio
import pathlib

from absl import flags as absl_flags

# The flags below belong to the binary that asks for them: its --help has them.
absl_flags.disclaim_key_flags()


def define(role: str) -> None:
  """Defines --queue and --queue_key.

  Args:
    role: whose key it is: 'trainer' or 'host'.
  """
  absl_flags.DEFINE_string(
      'queue',
      None,
      'NATS server with the tasks of a run, nats://HOST:PORT or'
      ' tls://HOST:PORT; see `python3 -m experiments.fleet --help`.',
  )
  absl_flags.DEFINE_string(
      'queue_key',
      None,
      f'File with the key for it; `experiments.fleet up` writes {role}.nk.',
  )


def key() -> str | None:
  """Returns --queue_key.

  Raises:
    ValueError: there is no such file.
  """
  path = absl_flags.FLAGS.queue_key or None
  if path is not None and not pathlib.Path(path).is_file():
    raise ValueError(f'--queue_key={path}: no such file')
  return path


def check() -> None:
  """Refuses a queue that cannot be reached, before anything is built for it.

  Raises:
    ValueError: nobody answers there, or the key is not known there.
  """
  try:
    from composer_jax.fleet import nats_client
  except ModuleNotFoundError as e:
    raise ValueError(
        f"--queue: needs the extra `fleet`: pip install -e '.[fleet]' ({e})"
    ) from e

  async def once() -> None:
    await (await nats_client.connect(absl_flags.FLAGS.queue, key())).close()

  asyncio.run(once())
