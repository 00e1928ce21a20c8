"""What every binary shares: flags, config, work directory, exit codes.

A binary reads

    flags.define_experiment()
    flags.define_workdir()

    def main() -> int | None:
      cfg = flags.experiment()
      ...

    if __name__ == '__main__':
      flags.run(main)

and imports what needs jax inside `main`, so that --help and a mistyped flag
answer at once. Flags, environment variables and the clock are read in this
package and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import difflib
import fcntl
import functools
import importlib
import os
import pathlib
import shlex
import signal
import sys
import tempfile
import textwrap
import traceback
import types
from typing import NoReturn

from absl import flags

from composer_jax import config
from composer_jax import config_text
from composer_jax.runs import manifest
from experiments import disk
from experiments import job

USAGE_EXIT_CODE = 2
INTERRUPT_EXIT_CODE = 130

_CONFIGS = pathlib.Path(__file__).parent / 'configs'
_LOCK = '.lock'

# The flags below belong to the binary that asks for them: its --help has them.
flags.disclaim_key_flags()


def define_experiment() -> None:
  """Defines --config, --set and --seed, which `experiment` reads."""
  flags.DEFINE_string(
      'config',
      'tiny',
      f'Experiment to run: one of {", ".join(_shipped())}; or a module such as'
      ' my_package.my_config or a .py file that defines experiment().',
  )
  flags.DEFINE_multi_string(
      'set',
      [],
      'Replaces one field of the config, for instance --set=rl.steps=50 or'
      ' --set=model.layers=4',
  )
  flags.DEFINE_integer(
      'seed', None, 'Seed of the whole run. Default: the one in the config.'
  )


def define_workdir(
    what: str = 'of the run: a new one, or that of a run to continue',
) -> None:
  """Defines the required --workdir; its help is "Directory {what}."."""
  flags.DEFINE_string('workdir', None, f'Directory {what}.')
  flags.register_validator('workdir', bool, message='this flag is required')
  local('workdir')


def local(name: str) -> None:
  """Refuses a URL as the value of a flag that names a directory to make."""
  flags.register_validator(
      name,
      lambda value: '://' not in (value or ''),
      message='must be a directory of this machine, not a URL',
  )


def define_dry_run() -> None:
  """Defines --dry_run; the binary answers it with `runs.plan`."""
  flags.DEFINE_bool(
      'dry_run', False, 'Prints the resolved plan of the run and exits.'
  )


def define_compilation_cache() -> None:
  """Defines --compilation_cache, the argument of `machine.setup_devices`."""
  flags.DEFINE_string(
      'compilation_cache',
      None,
      'Directory where compiled programs are kept between runs; empty: not'
      ' kept. Default: composer_jax in $XDG_CACHE_HOME or ~/.cache.',
  )


def run(main: Callable[[], int | None]) -> NoReturn:
  """Parses the command line, calls main and exits with what it returns.

  Wrong input (a flag, a config field, a work directory, a loss that returns
  NaN) is a ValueError or a FloatingPointError: one line on stderr and exit
  code 2. A full disk is one line and exit code 1. Any other error is a fault of
  the program and keeps its traceback.
  """
  flags.DEFINE_bool('traceback', False, 'Shows where an error was raised.')
  program = pathlib.Path(sys.argv[0]).stem
  disk.quiet_threads()
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, functools.partial(_interrupted, program))
  try:
    if {'-h', '--help', '-help', '--helpfull'} & set(sys.argv[1:]):
      print(_help())
      sys.exit(0)
    extra = flags.FLAGS(sys.argv)[1:]
    if extra:
      raise ValueError(f'{extra[0]!r} is not a flag: write --name=value')
    code = main() or 0
  except (ValueError, FloatingPointError, flags.Error) as e:
    if flags.FLAGS.is_parsed() and flags.FLAGS.traceback:
      traceback.print_exc()
    _end_if_full(program, e)
    print(f'{program}: error: {" ".join(str(e).split())}', file=sys.stderr)
    code = USAGE_EXIT_CODE
  except KeyboardInterrupt:
    _abort(program)
  except Exception as e:
    _end_if_full(program, e)
    if not job.joined():
      raise
    if flags.FLAGS.traceback or not job.is_loss(e):
      traceback.print_exc()
    if job.is_loss(e):
      print(f'{program}: error: {job.loss()} ({e})', file=sys.stderr)
    code = 1
  if code and job.joined():
    if code == USAGE_EXIT_CODE:
      job.part()
    sys.stdout.flush()
    os._exit(code)  # jax would wait for the others, who wait for this one.
  sys.exit(code)


def _end_if_full(program: str, error: Exception) -> None:
  """Ends the process if the disk is full: whatever it still wrote would fail."""
  if full := disk.full(error):
    os.write(2, f'{program}: error: {full}\n'.encode())
    with contextlib.suppress(OSError):
      sys.stdout.flush()
    os._exit(1)


def _abort(program: str) -> NoReturn:
  """Ends the process; worker threads must not hold it up."""
  os.write(2, f'\n{program}: aborted\n'.encode())
  with contextlib.suppress(RuntimeError):  # a print was what was interrupted
    sys.stdout.flush()
  os._exit(INTERRUPT_EXIT_CODE)


def _interrupted(
    program: str, number: int, frame: types.FrameType | None
) -> None:
  """Raises KeyboardInterrupt, but not into an import, which may swallow it."""
  while frame is not None:
    if frame.f_code.co_filename.startswith('<frozen importlib'):
      _abort(program)
    frame = frame.f_back
  raise KeyboardInterrupt


def _help() -> str:
  """Docstring and flags of the binary."""
  out = [(sys.modules['__main__'].__doc__ or '').strip(), '', 'Flags:']
  for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
    text = ' '.join(flag.help.split())
    if flag.default not in (None, []):
      text += f' Default: {flag.default_as_str}.'
    out.append(f'  --{flag.name}')
    out.append(textwrap.indent(textwrap.fill(text, 72), ' ' * 6))
  return '\n'.join(out)


def command() -> str:
  """Returns the command line that starts this process again."""
  spec = sys.modules['__main__'].__spec__
  start = ['python3', '-m', spec.name] if spec else ['python3', sys.argv[0]]
  return shlex.join([*start, *sys.argv[1:]])


def experiment() -> config.Experiment:
  """Returns what --config, --set and --seed describe.

  Raises:
    ValueError: a mistake in one of them, or the base does not exist.
  """
  edits = list(flags.FLAGS['set'].value)
  if flags.FLAGS.seed is not None:
    edits.append(f'seed={flags.FLAGS.seed}')
  cfg = config_text.override(load(flags.FLAGS.config), *edits)
  if cfg.base is None:
    return cfg
  from composer_jax.runs import base_model

  for text in edits:
    name = text.partition('=')[0]
    if (
        name.startswith('model.')
        and name.removeprefix('model.') not in base_model.HOW
    ):
      raise ValueError(
          f'--set={text}: the base decides it; of the model, only'
          f' {", ".join(base_model.HOW)} can be set'
      )
  return base_model.adopt(cfg)


def load(name: str) -> config.Experiment:
  """Imports a config module and calls its `experiment()`.

  Args:
    name: a module of experiments/configs, a dotted module, or a .py file.

  Raises:
    ValueError: there is no such config, or it makes something else.
  """
  module = _import_file(name) if name.endswith('.py') else _import_module(name)
  make = getattr(module, 'experiment', None)
  if not callable(make):
    raise ValueError(f'--config={name}: it defines no function experiment()')
  made = make()
  if not isinstance(made, config.Experiment):
    raise ValueError(
        f'--config={name}: experiment() returned {type(made).__name__}, want'
        ' composer_jax.config.Experiment'
    )
  return made


def _shipped() -> list[str]:
  return sorted(p.stem for p in _CONFIGS.glob('[!_]*.py'))


def _import_module(name: str) -> types.ModuleType:
  full = name if '.' in name else f'experiments.configs.{name}'
  try:
    return importlib.import_module(full)
  except ModuleNotFoundError as e:
    if not (full + '.').startswith(f'{e.name}.'):
      raise  # The config is there; something that it imports is not.
    near = difflib.get_close_matches(name, _shipped(), n=1)
    cure = f'did you mean {near[0]!r}?' if near else f'have {_shipped()}'
    raise ValueError(f'--config={name}: no such module; {cure}') from e


def _import_file(name: str) -> types.ModuleType:
  """Imports a file under its own name, so that its classes can be found."""
  path = pathlib.Path(name).resolve()
  if not path.is_file():
    raise ValueError(f'--config={name}: no such file')
  sys.path.append(str(path.parent))
  module = importlib.import_module(path.stem)
  if pathlib.Path(module.__file__ or '').resolve() != path:
    raise ValueError(
        f'--config={name}: {path.stem!r} is already the name of another'
        f' module ({module.__file__}); rename the file'
    )
  return module


def workdir() -> pathlib.Path:
  """Opens --workdir: new, empty, or a run that continues.

  It stays locked until the process ends, however it ends.

  Raises:
    ValueError: it cannot be written, holds something else, or is in use.
  """
  path = pathlib.Path(flags.FLAGS.workdir)
  flag = f'--workdir={path}'
  try:
    path.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path).close()
    entries = {p.name for p in path.iterdir()} - {_LOCK}
  except OSError as e:
    raise ValueError(f'{flag}: cannot be written: {e.strerror}') from e
  if entries and not manifest.is_run(path):
    raise ValueError(
        f'{flag}: holds {min(entries)!r} but no run of composer_jax; choose a'
        ' new or empty directory'
    )
  lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as e:
    raise ValueError(f'{flag}: another process runs in it') from e
  return path


def existing_workdir() -> pathlib.Path:
  """Returns --workdir for a process that writes nothing of its own into it."""
  path = pathlib.Path(flags.FLAGS.workdir)
  if not manifest.is_run(path):
    raise ValueError(f'--workdir={path}: there is no run of composer_jax')
  return path


def store(new: bool = False) -> str:
  """Returns --store as a URL.

  Args:
    new: whether its directory may still have to be made.

  Raises:
    ValueError: there is no such directory.
  """
  value = flags.FLAGS.store
  found = url(value)
  if found != value and not new and not pathlib.Path(value).is_dir():
    raise ValueError(f'--store={value}: no such directory')
  return found


def url(value: str) -> str:
  """Returns the URL of a store that is named by its URL or its directory."""
  if '://' in value or value.startswith('{'):
    return value
  return f'file://{pathlib.Path(value).resolve()}/'


def stored_experiment(path: pathlib.Path) -> config.Experiment:
  """Returns the config of a run in a work directory.

  Raises:
    ValueError: it names a class that cannot be found, or is of another version.
  """
  stored = path / manifest.CONFIG_FILE
  try:
    return config_text.from_json(stored.read_text())
  except ValueError as e:
    raise ValueError(f'{e}; add its folder to PYTHONPATH') from e
  except TypeError as e:
    raise ValueError(
        f'{stored}: written by another version of composer_jax: {e}'
    ) from e
