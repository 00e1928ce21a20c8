"""Weights that drift like f32 masters under a small learning rate."""

import contextlib
import pathlib

import ml_dtypes
import numpy as np

from composer_jax import config
from composer_jax.weights import store

SHAPES = {
    'embed': (64, 24),
    'layers/moe/w_up': (2, 4, 24, 32),
    'layers/norm': (2, 24),
    'scale': (),
}
CFG = config.WeightsConfig(tile_elements=512, base_every_versions=4)


def versions(count, seed=0, shapes=SHAPES, lr=1e-4):
  """Yields `count` successive sets of bf16 arrays and an f32 router bias."""
  rng = np.random.default_rng(seed)
  masters = {k: rng.normal(0, 0.02, s) for k, s in shapes.items()}
  bias = np.zeros((2, 4), np.float32)
  for _ in range(count):
    named = {
        k: np.asarray(a).astype(ml_dtypes.bfloat16) for k, a in masters.items()
    }
    yield named | {'layers/moe/bias': bias.copy()}
    for k, a in masters.items():
      masters[k] = a + lr * rng.choice([-1, 1], a.shape)
    bias += rng.normal(0, 1e-3, bias.shape).astype(np.float32)


def same(a, b):
  """True if two sets of named arrays have the same types and bits."""
  return a.keys() == b.keys() and all(
      a[k].dtype == b[k].dtype
      and a[k].shape == b[k].shape
      and a[k].tobytes() == b[k].tobytes()
      for k in a
  )


def files(root):
  """Stored objects under a directory, by relative name, sorted."""
  root = pathlib.Path(root)
  found = (p for p in root.rglob('*') if p.is_file())
  return sorted(
      str(p.relative_to(root)) for p in found if not p.name.endswith('__lock')
  )


@contextlib.contextmanager
def restored(path):
  """Puts a file back afterwards as it was."""
  data = path.read_bytes()
  try:
    yield data
  finally:
    path.write_bytes(data)


class CountingStore(store.Store):
  """A store that notes what it reads."""

  def __init__(self, url):
    super().__init__(url)
    self._futures = []
    self._kv = _Counting(self._kv, self._futures)

  @property
  def reads(self):
    """(key, bytes) of every read; they have to be over."""
    return [(key, len(f.result().value)) for key, f in self._futures]

  def forget(self):
    self._futures.clear()


class _Counting:

  def __init__(self, kv, futures):
    self._kv, self._futures = kv, futures

  def read(self, key, **kw):
    future = self._kv.read(key, **kw)
    self._futures.append((key, future))
    return future

  def __getattr__(self, name):
    return getattr(self._kv, name)


class DyingStore(store.Store):
  """A store whose n-th write, counted from `arm`, does not happen."""

  left = None
  on_death = staticmethod(lambda: None)

  def arm(self, n, *, lands=False):
    """Dies at write n (from 0); with `lands` just after it took effect."""
    self.left, self._lands = n, lands

  def _dies(self):
    if self.left is None:
      return False
    self.left -= 1
    return self.left < 0

  def _die(self):
    self.on_death()
    raise OSError('store unreachable')

  def put(self, key, data):
    dies = self._dies()
    if dies and not self._lands:
      self._die()
    blob = super().put(key, data)
    if dies:
      self._die()
    return blob

  def swap(self, key, data, generation):
    dies = self._dies()
    if dies and not self._lands:
      self._die()
    won = super().swap(key, data, generation)
    if dies:
      self._die()
    return won
