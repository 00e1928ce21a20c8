"""The machine under a run: devices, compilation cache, interrupts."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import pathlib
import platform
import signal
import typing
from typing import Any

import jax

from composer_jax import config

# A host can pretend to have any number of devices; beyond this many in one
# process they only cost time.
MAX_HOST_DEVICES = 8
# glibc's mallopt: its parameters, and the values that keep_memory gives them.
_KEEP = {
    -8: 1,  # M_ARENA_MAX: threads share one heap, which may grow to any size
    -4: 0,  # M_MMAP_MAX: no block is mapped, and unmapped, by itself
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: free bytes at its end that stay
}
_STOPPING = 'stopping after this step; once more to abort without saving'


class Devices(typing.NamedTuple):
  """Which device does what."""

  train: list[jax.Device]  # the mesh, of all processes
  rollout: jax.Device  # decodes; apart from the mesh if there are enough


def keep_memory() -> None:
  """Keeps memory that was freed for the next use, where training runs on a CPU.

  XLA allocates the temporaries of a step anew. glibc gives blocks of their size
  back to the kernel, which clears them, page by page, at every step. Call it
  before jax starts its threads. On another C library it does nothing, nor where
  jax has a plugin of an accelerator: the host's memory is for other things
  there.
  """
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
  if mallopt and importlib.util.find_spec('jax_plugins') is None:
    for parameter, value in _KEEP.items():
      mallopt(parameter, value)


def setup_devices(
    cfg: config.Experiment, cache: str | None = None, processes: int = 1
) -> Devices:
  """Starts jax: host devices, compilation cache, and the mesh check.

  On a CPU the process gets one host device per position of the mesh and one
  more for decoding, so that the two overlap; JAX_NUM_CPU_DEVICES overrules it.
  Call it before anything makes an array. Several processes make up the mesh in
  equal parts, and none decodes.

  Args:
    cfg: the resolved experiment.
    cache: directory of compiled programs; '' for none, None for the default.
    processes: number of processes of the job (`experiments.job`).

  Raises:
    ValueError: the mesh needs more devices than there are, or leaves some of
      a job of several processes without work.
  """
  want = cfg.mesh.devices
  decoders = 0
  if jax.config.jax_num_cpu_devices < 0:
    most = max(MAX_HOST_DEVICES, os.cpu_count() or 1)
    decoders = int(processes == 1)
    here = min(-(-want // processes), most) + decoders
    jax.config.update('jax_num_cpu_devices', here)
  keep_memory()
  setup_cache(cache)
  devices = jax.devices()
  kind = devices[0].platform
  mesh_devices = len(devices) - (decoders if kind == 'cpu' else 0)
  if want > mesh_devices:
    raise ValueError(
        f'{cfg.mesh.text()}: only {mesh_devices} {kind} devices here; use'
        f' --set=mesh.data={mesh_devices} or less'
    )
  if processes > 1 and want != len(devices):
    raise ValueError(
        f'{cfg.mesh.text()}: {processes} processes have {len(devices)} {kind}'
        f' devices together, and each must be in the mesh; set one of'
        f' {len(devices)} devices'
    )
  if processes > 1:
    return Devices(devices, jax.local_devices()[0])
  return Devices(devices[:want], devices[min(want, len(devices) - 1)])


def memory_bytes() -> int | None:
  """Memory of this machine; None where an accelerator would hold the model."""
  if importlib.util.find_spec('jax_plugins') is not None:
    return None
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def pretend(devices: int) -> None:
  """Starts jax with this many devices that can compile, and hold nothing."""
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', devices)


def setup_cache(cache: str | None = None) -> None:
  """Keeps compiled programs between runs; see `setup_devices`."""
  path = default_cache() if cache is None else cache
  if path:
    jax.config.update('jax_compilation_cache_dir', str(path))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


def default_cache() -> pathlib.Path:
  """Returns the user's cache directory for this jax on this processor.

  A program compiled for one processor may not run, or not give the same bits,
  on another one that shares the home directory.
  """
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  info = pathlib.Path('/proc/cpuinfo')
  features = [platform.machine()]
  if info.exists():
    keys = ('model name', 'flags', 'Features')
    lines = info.read_text().splitlines()
    features += sorted({line for line in lines if line.startswith(keys)})
  name = hashlib.sha256('\n'.join(features).encode()).hexdigest()[:12]
  return pathlib.Path(base, 'composer_jax', f'jax-{jax.__version__}-{name}')


class Interrupt:
  """Ctrl-C in two stages, as a context manager.

  The first SIGINT or SIGTERM only makes the object true when called: the loop
  finishes its step, saves, and returns. A second one aborts.

    with Interrupt() as stop:
      while step < steps and not stop():
        ...
  """

  def __init__(self, text: str = _STOPPING):
    """Describes the manager.

    Args:
      text: what to print at the first signal.
    """
    self._text = text
    self._requested = False
    self._before: dict[int, Any] = {}

  def __call__(self) -> bool:
    """Returns True once the user has asked to stop."""
    return self._requested

  def __enter__(self) -> Interrupt:
    for number in (signal.SIGINT, signal.SIGTERM):
      self._before[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *error: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _handle(self, number: int, frame: object) -> None:
    if self._requested:
      raise KeyboardInterrupt
    self._requested = True
    # Not print(): it may be what was interrupted.
    os.write(2, f'\n{self._text}\n'.encode())
