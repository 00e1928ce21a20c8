"""Strict numerics, four fake devices and repeatable examples for every test."""

import gc
import os
import pathlib

from absl import flags
import hypothesis
import jax
import pytest

# A red test says something about the change, not about the day's examples.
# --hypothesis-profile=default looks for new ones.
hypothesis.settings.register_profile(
    'repeatable', derandomize=True, deadline=None
)
hypothesis.settings.load_profile('repeatable')

_MAPPINGS = 15_000
_WORKERS = 2  # each takes up to 3 GB, and a core and a half
# They take minutes: left to the end, one process would wait for another.
_FIRST = ('binaries', 'bitwise', 'determinism', 'mesh', 'step', 'variants')


def pytest_configure(config):
  flags.FLAGS.mark_as_parsed()  # absltest keeps its temporary directory there.
  # Before anything starts a backend: tests of the mesh need real devices.
  jax.config.update('jax_num_cpu_devices', 4)
  jax.config.update('jax_numpy_rank_promotion', 'raise')
  # Compiled programs outlive the process, so a second run is quick.
  jax.config.update('jax_compilation_cache_dir', str(config.cache.mkdir('jax')))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


def pytest_xdist_auto_num_workers(config):
  """Files of a directory are shared out; what was named runs right here.

  A process that uses a GPU takes all of it.
  """
  whole = any(pathlib.Path(name).is_dir() for name in config.args)
  if not whole or pathlib.Path('/dev/nvidia0').exists():
    return 0
  return min(_WORKERS, os.cpu_count() or 1)


def pytest_collection_modifyitems(items):
  items.sort(key=lambda item: not item.path.name.startswith(_FIRST))


@pytest.fixture(scope='module', autouse=True)
def _room_for_programs():
  """Forgets compiled programs before they are too many for one process.

  Each takes some memory mappings, of which Linux grants a process 65530; with
  none left the compiler aborts.
  """
  yield
  maps = pathlib.Path('/proc/self/maps')
  if maps.exists() and maps.read_bytes().count(b'\n') > _MAPPINGS:
    jax.clear_caches()
    gc.collect()
