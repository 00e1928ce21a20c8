"""What the serving binaries share: flags, keys, and how they end."""

from __future__ import annotations

import os
import pathlib
import sys
import time

from absl import flags as absl_flags
from experiments import flags

_POLL_SECONDS = 0.2

# The flags below belong to the binary that asks for them: its --help has them.
absl_flags.disclaim_key_flags()


def define(key: str, what: str, serves_only: bool = True) -> None:
  """Defines the flags.

  Args:
    key: name of the key that the operator may choose.
    what: it is for.
    serves_only: whether the binary cannot do without a store.
  """
  absl_flags.DEFINE_string(
      'store', None, 'URL or directory of the weight store of a run.'
  )
  absl_flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on.')
  absl_flags.DEFINE_integer('port', 8000, 'Port to listen on; 0: any.')
  absl_flags.DEFINE_string(
      'capture', 'calls', 'Directory of the record of all calls.'
  )
  flags.local('capture')
  absl_flags.DEFINE_string(
      f'{key}_file',
      None,
      f'File with the key {what}. Default: ${_variable(key)}, or a new one,'
      ' which is printed.',
  )
  absl_flags.DEFINE_integer(
      'slots', 64, 'Calls that are sampled together.', lower_bound=1
  )
  absl_flags.DEFINE_integer(
      'max_waiting', 256, 'Calls that may wait for a slot.', lower_bound=0
  )
  absl_flags.DEFINE_integer(
      'context_tokens',
      None,
      'Longest window. Default: what the model was made for.',
      lower_bound=2,
  )
  absl_flags.DEFINE_enum(
      'swap',
      'async',
      ['async', 'sync'],
      'What new weights do to a running reply: it goes on with them, or ends on'
      ' the old ones while new calls wait.',
  )
  absl_flags.DEFINE_string('name', None, 'Of the model. Default: its own.')
  absl_flags.DEFINE_float(
      'drain_seconds', 30.0, 'For running calls, after a Ctrl-C or SIGTERM.'
  )
  if serves_only:
    absl_flags.register_validator(
        'store', bool, message='this flag is required'
    )
  flags.define_compilation_cache()


def _variable(key: str) -> str:
  return f'COMPOSER_{key.upper()}'


def chosen_key(key: str) -> str | None:
  """The key that the operator has chosen.

  Raises:
    ValueError: its file cannot be read, or is empty.
  """
  path = absl_flags.FLAGS[f'{key}_file'].value
  if path is None:
    return os.environ.get(_variable(key)) or None
  try:
    text = pathlib.Path(path).read_text().strip()
  except OSError as e:
    raise ValueError(f'--{key}_file={path}: {e.strerror}') from e
  if not text:
    raise ValueError(f'--{key}_file={path}: is empty; put a key into it')
  return text


def serve(opened, **settings) -> int:
  """Serves until Ctrl-C or SIGTERM.

  Args:
    opened: called with the host once it is ready; returns a line to print.
    **settings: fields of `serving.host.Settings`, beyond what the flags say.

  Returns:
    Exit code.
  """
  import jax

  from composer_jax.serving import host as host_lib
  from experiments import machine

  values = absl_flags.FLAGS
  machine.setup_cache(values.compilation_cache)
  names = ('host', 'port', 'slots', 'max_waiting', 'context_tokens')
  names += ('swap', 'name', 'drain_seconds')
  asked = host_lib.Settings(
      url=flags.store(),
      capture=pathlib.Path(values.capture),
      clock=time.time,
      **{name: values[name].value for name in names},
      **settings,
  )
  print(
      f'starting: fetches {asked.url} and compiles what is new to this machine',
      file=sys.stderr,
      flush=True,
  )
  text = 'stopping: running calls may end; once more to stop at once'
  with machine.Interrupt(text) as stop:
    with host_lib.Host(asked, devices=jax.devices()) as host:
      print(host.describe())
      print(opened(host), flush=True)
      while not stop():
        time.sleep(_POLL_SECONDS)
        try:
          for line in host.news():
            print(line, flush=True)
        except RuntimeError as e:
          print(e, file=sys.stderr)
          return 1
  return 0
