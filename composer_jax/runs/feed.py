"""Weights from the store to the engine: one thread that follows, one that asks.

Downloading, verifying and decoding happen on the feed's own thread, beside
generation; the engine only takes arrays that are ready and swaps them between
two decode blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
import threading
import time

import jax
import numpy as np

from composer_jax import trace
from composer_jax.model import params as params_lib
from composer_jax.weights import follow
from composer_jax.weights import records
from composer_jax.weights import store as store_lib

_POLL_SECONDS = 0.02
_FAR_POLL_SECONDS = 0.5  # of a store that bills requests
_NEAR = ('file:', 'memory:')
_RETRY_SECONDS = 1.0


def decode_params(named: Mapping[str, np.ndarray]) -> params_lib.Params:
  """Published bf16 arrays as the tree that decode reads, held in f32.

  The values are the published ones; holding them in f32 saves converting them
  again at every decode step.
  """
  return params_lib.from_names(
      {name: array.astype(np.float32) for name, array in named.items()}
  )


def stored_versions(url: str) -> set[int]:
  """Steps of the versions that the store still holds."""
  store = store_lib.Store(url)
  link, _ = store.latest()
  return (
      set() if link is None else {at.version for at, _ in store.history(link)}
  )


def fetch(
    url: str, step: int | None = None
) -> tuple[trace.WeightVersion, dict[str, np.ndarray]]:
  """Rebuilds a version from the store, verified.

  Args:
    url: URL of the weight store.
    step: `WeightVersion.step` of the version; None for the newest.

  Returns:
    (version, its arrays by name).

  Raises:
    ValueError: it was never published there.
    StoreError, FollowError: the store is damaged.
  """
  store = store_lib.Store(url)
  link, _ = store.latest()
  if link is None:
    raise ValueError(f'{url}: no version has been published')
  found = {at.version: m for at, m in store.history(link)}
  step = link.version if step is None else step
  if step not in found:
    raise ValueError(
        f'version {step}: never published in {url}, which has'
        f' {len(found)} versions from {min(found)} to {max(found)}'
    )
  named = follow.Follower(url, store=store).fetch(step)
  return records.weight_version(found[step]), named


class WeightFeed:
  """Follows a store in the background and hands the newest version over.

  An error of the follower fences the host: the old version keeps serving until
  a later poll gets through. Whoever waits for new weights gets the error if it
  has lasted for longer than a store may be away.

  Attributes:
    first: the version and parameters to start an engine with.
    newest: step of the newest version that is decoded and verified. A request
      submitted after `newest` has reached a step runs on that step or later.
  """

  def __init__(self, url: str, *, patience_seconds: float = 120.0):
    """Waits for the first version of the store.

    Args:
      url: URL of the weight store.
      patience_seconds: how long following may fail before a wait does.

    Raises:
      ValueError: nothing has been published there.
      FollowError: what is there cannot be verified.
    """
    self._follower = follow.Follower(url)
    near = url.startswith(_NEAR)
    self._pause = _POLL_SECONDS if near else _FAR_POLL_SECONDS
    first = self._follower.poll()
    if first is None:
      raise ValueError(f'{url}: no version has been published; publish one')
    self.first = first[0], decode_params(first[1])
    self._ready = None
    self.newest = first[0].step
    self._patience = patience_seconds
    self._failed: tuple[float, Exception] | None = None  # since when, latest
    self._lock = threading.Lock()
    self._stop = threading.Event()
    self._thread = threading.Thread(
        target=self._run, name='weight-feed', daemon=True
    )
    self._thread.start()

  @property
  def digest_mismatches(self) -> int:
    return self._follower.digest_mismatches

  def _run(self) -> None:
    while not self._stop.wait(_RETRY_SECONDS if self._failed else self._pause):
      try:
        fresh = self._follower.poll()
        ready = fresh and (fresh[0], decode_params(fresh[1]))
      except Exception as error:
        since = self._failed[0] if self._failed else time.monotonic()
        self._failed = since, error
        continue
      self._failed = None
      if ready is not None:
        with self._lock:
          self._ready = ready
          self.newest = ready[0].step

  def refresh(self) -> tuple[trace.WeightVersion, params_lib.Params] | None:
    """The newest version that has not been taken yet; for the engine."""
    with self._lock:
      ready, self._ready = self._ready, None
    if ready is not None:
      jax.block_until_ready(ready[1])
    return ready

  async def wait_for(self, step: int) -> None:
    """Waits until `newest` is at least `step`.

    Raises:
      FollowError: nothing could be fetched or verified for too long.
    """
    while self.newest < step:
      failed = self._failed
      if failed and time.monotonic() - failed[0] > self._patience:
        raise failed[1]
      await asyncio.sleep(_POLL_SECONDS / 4)

  def close(self) -> None:
    self._stop.set()
    self._thread.join()


class FixedFeed:
  """One published version for good: what evaluation feeds an engine.

  Attributes:
    first: the version and its parameters.
    newest: step of that version.
  """

  def __init__(self, url: str, step: int | None = None):
    """Takes a version; the arguments and errors are those of `fetch`."""
    version, named = fetch(url, step)
    self.first = version, decode_params(named)
    self.newest = version.step

  def refresh(self) -> None:
    """Nothing newer, ever."""

  async def wait_for(self, step: int) -> None:
    """Returns at once, or raises: what is newer will not come."""
    if step > self.newest:
      raise ValueError(f'version {step}: this host stays at {self.newest}')

  def close(self) -> None:
    """Has nothing to close."""
