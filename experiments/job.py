"""The processes of one training job: how they meet, and how they part.

  python3 -m experiments.midtrain ... --coordinator=HOST:PORT --processes=N \\
      --process=I      # I = 0 ... N-1, one each; 0 runs on HOST

Slurm, Kubernetes and Open MPI say all of that themselves (jax reads it). A
process that dies takes the others with it, each with one line that says so;
the same commands go on from the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Generator
import contextlib
import os
import pathlib
import re
import signal
import socket
import sys
import time

from absl import flags as absl_flags

_VARIABLES = {
    'coordinator': 'JAX_COORDINATOR_ADDRESS',
    'processes': 'JAX_NUM_PROCESSES',
    'process': 'JAX_PROCESS_ID',
}
# Of collectives whose peer has closed its connection.
_LOSS = re.compile('gloo|nccl|coordination', re.IGNORECASE)
_READ_SECONDS = 5  # for the others to hear why process 0 could not start
_PART_SECONDS = 0.5  # for the others to end by themselves
_DAY_MS = 86_400_000
_DONE = 'done'
_MET = b'\0'  # no signal has this number


def define() -> None:
  """Defines the flags of a binary that may run as several processes."""
  absl_flags.disclaim_key_flags()
  absl_flags.DEFINE_string(
      'coordinator',
      None,
      'HOST:PORT of process 0 of a job of several processes. Default:'
      f' ${_VARIABLES["coordinator"]}, or what Slurm, Kubernetes or Open MPI'
      ' say.',
  )
  absl_flags.DEFINE_integer(
      'processes',
      None,
      'Number of processes of the job; 1: alone, whatever the launcher says.'
      f' Default: ${_VARIABLES["processes"]}.',
      lower_bound=1,
  )
  absl_flags.DEFINE_integer(
      'process',
      None,
      f'Number of this process, from 0. Default: ${_VARIABLES["process"]}.',
      lower_bound=0,
  )
  absl_flags.DEFINE_integer(
      'join_seconds',
      300,
      'How long the processes of a job wait for each other at the start.',
      lower_bound=1,
  )
  absl_flags.DEFINE_integer(
      'heartbeat_seconds',
      30,
      'Silence after which a process of the job counts as dead.',
      lower_bound=5,
  )


def joined() -> bool:
  """Says whether this process is one of several."""
  jax = sys.modules.get('jax')
  return jax is not None and jax.distributed.is_initialized()


def join() -> int:
  """Joins the job that flags, environment or launcher describe.

  Call it before anything asks jax for devices.

  Returns:
    Number of processes; 1 if there is no job.

  Raises:
    ValueError: the description is incomplete, or the processes do not meet.
  """
  given = _given()
  launcher = None if given else _launcher()
  if not (given or launcher):
    return 1
  wait = absl_flags.FLAGS.join_seconds
  heartbeat = absl_flags.FLAGS.heartbeat_seconds
  began = time.monotonic()
  if given:
    coordinator, processes, process = given
    arguments = dict(
        coordinator_address=coordinator,
        num_processes=processes,
        process_id=process,
        cluster_detection_method='deactivate',
    )
    if process:
      _reach(coordinator, wait)
  else:
    arguments = {}
  met = _herald(
      f'the processes of the job did not meet within {wait} s; start as many as'
      ' were announced, and see that all reach the coordinator',
      loss(),
  )
  import jax
  from jax._src import distributed  # jax shows the number only with a backend

  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  left = max(1, round(wait - (time.monotonic() - began)))
  try:
    jax.distributed.initialize(
        **arguments,
        initialization_timeout=left,
        heartbeat_timeout_seconds=heartbeat,
        shutdown_timeout_seconds=heartbeat,
    )
  except (RuntimeError, ValueError) as e:
    how = f'{launcher} job' if launcher else f'--coordinator={coordinator}'
    raise ValueError(f'{how}: jax cannot join it: {e}') from e
  os.write(met, _MET)
  if not first():
    _silence()
  return distributed.global_state.num_processes


def loss() -> str:
  """What to say when the job has lost a process."""
  return (
      'another process of the job is gone, or was silent for'
      f' {absl_flags.FLAGS.heartbeat_seconds} s; start all of them again to go'
      ' on from the last checkpoint'
  )


def is_loss(error: Exception) -> bool:
  """Says whether jax raised an error because the job has lost a process."""
  return 'jax' in type(error).__module__ and bool(_LOSS.search(str(error)))


def refuse(why: str) -> None:
  """Refuses to be one of several processes.

  Raises:
    ValueError: flags, environment or launcher describe a job.
  """
  if given := _given():
    raise ValueError(f'--processes={given[1]}: {why}')
  if launcher := _launcher():
    raise ValueError(f'{launcher} job of several processes: {why}')


def first() -> bool:
  """Says whether this is process 0, the one that writes for all."""
  if not joined():
    return True
  from jax._src import distributed

  return distributed.global_state.process_id == 0


@contextlib.contextmanager
def in_turn(name: str) -> Generator[None]:
  """Process 0 does the block first, the others when it is done with it.

  Args:
    name: name of the block, another one for each.

  Raises:
    ValueError: in the others, why process 0 could not.
  """
  if not joined():
    yield
    return
  from jax._src import distributed

  client = distributed.global_state.client
  done, heard = f'composer_jax/{name}', f'composer_jax/{name}/heard'
  if first():
    try:
      yield
    except Exception as e:
      client.key_value_set(done, str(e) or repr(e))
      with contextlib.suppress(RuntimeError):  # Then they have died, too.
        client.wait_at_barrier(heard, _READ_SECONDS * 1000)
      raise
    client.key_value_set(done, _DONE)
    return
  verdict = client.blocking_key_value_get(done, _DAY_MS)
  if verdict != _DONE:
    client.wait_at_barrier(heard, _READ_SECONDS * 1000)
    raise ValueError(f'process 0 could not start: {verdict}')
  yield


def part() -> None:
  """Lets the others say why they end, too, before process 0 ends them.

  What one process refuses, all of them mostly do, not in the same instant; jax
  aborts whoever has lost process 0.
  """
  from jax._src import distributed

  client = distributed.global_state.client
  with contextlib.suppress(RuntimeError):  # They go on, or are gone.
    client.wait_at_barrier('composer_jax/part', _READ_SECONDS * 1000)
    if first():
      time.sleep(_PART_SECONDS)


def _silence() -> None:
  """Leaves standard output to process 0; errors are everybody's."""
  sys.stdout.flush()
  with open(os.devnull, 'wb') as f:
    os.dup2(f.fileno(), 1)


def _given() -> tuple[str, int, int] | None:
  """(coordinator, processes, process) by flags or environment, or None."""
  values = {}
  for name, variable in _VARIABLES.items():
    value = absl_flags.FLAGS[name].value
    values[name] = os.environ.get(variable) if value is None else value
  lacking = [name for name, value in values.items() if value is None]
  if len(lacking) == len(values) or values['processes'] in (1, '1'):
    return None
  if lacking:
    have = next(n for n in values if n not in lacking)
    raise ValueError(
        f'--{have}={values[have]}: a process of a job also needs'
        f' {" and ".join(f"--{n}" for n in lacking)}'
    )
  coordinator = values['coordinator']
  host, _, port = coordinator.rpartition(':')
  if not host or not port.isdecimal():
    raise ValueError(f'--coordinator={coordinator}: want HOST:PORT')
  try:
    processes, process = int(values['processes']), int(values['process'])
  except ValueError as e:
    raise ValueError(f'{_VARIABLES["processes"]}, ...: {e}') from e
  if not 0 <= process < processes:
    raise ValueError(f'--process={process}: must be below {processes=}')
  return coordinator, processes, process


def _launcher() -> str | None:
  """Who started several processes, if jax knows how to ask it."""
  env = os.environ
  if 'SLURM_STEP_NODELIST' in env and int(env.get('SLURM_NTASKS', 1)) > 1:
    return 'Slurm'
  if int(env.get('OMPI_COMM_WORLD_SIZE', 1)) > 1:
    return 'Open MPI'
  if {'KUBERNETES_SERVICE_HOST', 'JOB_COMPLETION_INDEX'} <= env.keys():
    return 'Kubernetes'
  return None


def _reach(coordinator: str, seconds: float) -> None:
  """Waits until the coordinator's port is open."""
  host, _, port = coordinator.rpartition(':')
  end = time.monotonic() + seconds
  while True:
    try:
      socket.create_connection((host.strip('[]'), int(port)), 1).close()
      return
    except OSError as e:
      if time.monotonic() > end:
        raise ValueError(
            f'--coordinator={coordinator}: no answer within {seconds} s ({e});'
            ' process 0 must run there and its port be open'
        ) from e
    time.sleep(0.1)


def _herald(alone: str, bereaved: str) -> int:
  """Leaves a process behind that says why jax has aborted this one.

  jax ends a process whose job has failed by abort(), from a thread of its own:
  nothing of Python runs any more but the C handler of the signal, which writes
  its number into a pipe.

  Args:
    alone: said of an abort before the processes have met.
    bereaved: said of an abort after that.

  Returns:
    The pipe; `_MET` tells that the processes have met.
  """
  program = pathlib.Path(sys.argv[0]).stem
  read, write = os.pipe()
  if not os.fork():
    os.close(write)
    os.setsid()  # A Ctrl-C is not for it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    seen = b''
    while part := os.read(read, 4096):
      seen += part
    if signal.SIGABRT in seen:
      text = bereaved if _MET in seen else alone
      os.write(2, f'{program}: error: {text}\n'.encode())
    os._exit(0)
  os.close(read)
  os.set_blocking(write, False)
  signal.set_wakeup_fd(write, warn_on_full_buffer=False)
  signal.signal(signal.SIGABRT, lambda *_: None)
  return write
