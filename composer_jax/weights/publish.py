"""Publisher: writes versions so that a reader sees all of one or none of it.

Order of writes: segments, index, manifest, then compare-and-swap of LATEST.
Until the swap wins nothing refers to the new objects, whose names hold a
nonce, so a publisher may die or lose anywhere and only leaves garbage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import collections
from concurrent import futures
import dataclasses
import time
from typing import Any
import uuid

import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.weights import codec
from composer_jax.weights import layout
from composer_jax.weights import store as store_lib

_NO_DIGEST = np.zeros(16, np.uint8)
_ENCODE_THREADS = 4


class Conflict(RuntimeError):
  """Another trainer has published; this one must stop."""


@dataclasses.dataclass(frozen=True)
class Published:
  """What one publish wrote.

  Attributes:
    version: its number is the optimizer step, or larger after a restart from
      a checkpoint older than the last published version.
    bytes: all of the delta with its index; of the base if there is no delta.
    base_bytes: of the base, 0 if this version has none.
    full_bytes: of the arrays themselves.
    elements: values in the arrays.
    changed: values that differ from the parent version.
    seconds: from the first comparison to the swap of LATEST.
  """

  version: trace.WeightVersion
  bytes: int
  base_bytes: int
  full_bytes: int
  elements: int
  changed: int
  seconds: float

  @property
  def changed_fraction(self) -> float:
    return self.changed / max(self.elements, 1)

  @property
  def bits_per_changed(self) -> float:
    return 8 * self.bytes / max(self.changed, 1)

  @property
  def ratio(self) -> float:
    """How many times smaller than sending every value."""
    return self.full_bytes / max(self.bytes, 1)


class Publisher:
  """The one writer of a store. Not thread-safe; see `BackgroundPublisher`."""

  def __init__(
      self,
      url: str,
      cfg: config.WeightsConfig,
      incarnation: str,
      *,
      store: store_lib.Store | None = None,
  ):
    """Opens the store and checks that it can arbitrate between writers.

    Args:
      url: of the store's prefix.
      cfg: tile size, spacing of bases, when deltas are given up.
      incarnation: names this run of the trainer in manifests.
      store: an opened store to use instead of `url`.
    """
    self._store = store or store_lib.Store(url)
    self._cfg = cfg
    self._incarnation = incarnation
    self._store.probe()
    self._link, self._generation = self._store.latest()
    self._last = self._link and self._store.manifest(self._link)
    self._unsure = None  # a version whose swap of LATEST gave no answer
    self._table = None  # of the snapshot; None as long as there is none
    self._snapshot = []  # words of every tile, as last published
    self._digests = np.empty((0, 16), np.uint8)

  def resume(
      self, named: Mapping[str, np.ndarray], step: int = 0
  ) -> trace.WeightVersion:
    """Continues a store after a restart from a checkpoint.

    Args:
      named: bf16 rounding of the restored masters.
      step: optimizer step of the checkpoint.

    Returns:
      The version that rollouts now have: the last one if `named` equals it
      bit for bit, else a fresh base made of `named`.
    """
    named = _host(named)
    if self._link is not None:
      table = layout.Table.of(named, self._cfg.tile_elements)
      digests = codec.digests(named, table)
      if table.root(digests) == self._link.root:
        self._remember(named, table, digests)
        return store_lib.weight_version(self._last)
    return self.publish(step, named).version

  def publish(self, step: int, named: Mapping[str, np.ndarray]) -> Published:
    """Publishes arrays as the next version.

    Args:
      step: optimizer step they belong to.
      named: arrays by name (bf16, or any other type, all lossless); they must
        not be written to before this returns.

    Returns:
      The version and what it cost.

    Raises:
      Conflict: another trainer has moved LATEST.
    """
    begin = time.perf_counter()
    named = _host(named)
    self._settle()
    table = layout.Table.of(named, self._cfg.tile_elements)
    parent = self._link
    version = step if parent is None else max(step, parent.version + 1)
    since = 0 if parent is None else self._last.since_base + 1
    warm = parent is not None and table == self._table
    rebase = not warm or since >= self._cfg.base_every_versions
    nonce = uuid.uuid4().hex[:12]

    delta = base = None
    if warm:
      prefix = f'd/{parent.version}-{version}/{nonce}'
      delta, rows = self._write(prefix, table, named, base=False)
    if rebase:
      base, base_rows = self._write(
          f'base/{version}/{nonce}', table, named, base=True
      )
      rows = rows if warm else base_rows
    changed = int(rows['changed'].sum())
    manifest = store_lib.Manifest(
        version=version,
        step=step,
        root=table.root(rows['post']),
        incarnation=self._incarnation,
        parent=parent,
        since_base=0 if rebase else since,
        changed=changed,
        table=table,
        delta=delta,
        base=base,
    )
    blob = self._store.put(f'm/{version}.{nonce}.json', manifest.to_bytes())
    link = store_lib.Link(version, manifest.root, blob)
    self._unsure = link, manifest
    generation = self._store.advance(link, self._incarnation, self._generation)
    self._unsure = None
    if not generation:
      raise Conflict(
          f'{self._store.url}LATEST: moved by another trainer while'
          f' {self._incarnation!r} published version {version}; stop this one'
      )
    # Only now have receivers got these bytes: a snapshot that ran ahead of
    # them would make every later delta wrong.
    self._link, self._generation, self._last = link, generation, manifest
    self._remember(named, table, rows['post'])
    return Published(
        version=store_lib.weight_version(manifest),
        bytes=(delta or base).nbytes + blob.length,
        base_bytes=base.nbytes if base else 0,
        full_bytes=sum(a.nbytes for a in named.values()),
        elements=sum(a.size for a in named.values()),
        changed=changed,
        seconds=time.perf_counter() - begin,
    )

  def _settle(self) -> None:
    """After a swap without an answer: finds out whether it won after all.

    If so the snapshot is behind, and the next version has to be a base.
    """
    if self._unsure is not None:
      link, generation = self._store.latest()
      if link == self._unsure[0]:
        self._link, self._last = self._unsure
        self._generation, self._table = generation, None
      self._unsure = None

  def _remember(self, named, table, digests) -> None:
    if table == self._table:
      fresh = (digests != self._digests).any(axis=1)
      for i in np.flatnonzero(fresh):
        self._snapshot[i][:] = table.read(named, i)
    else:
      self._table = table
      self._snapshot = [
          table.read(named, i).copy() for i in range(len(table.tiles))
      ]
    self._digests = np.array(digests)

  def _write(
      self, prefix: str, table, named, *, base: bool
  ) -> tuple[store_lib.Edge, np.ndarray]:
    """Writes the segments and the index of one edge."""
    rows = np.zeros(len(table.tiles), store_lib.TILE)
    itemsize = [named[name].itemsize for name, _ in table.tiles]
    segments = []
    buffer = bytearray()

    def encode(i: int) -> tuple[codec.Encoded, bytes]:
      new = table.read(named, i)
      post = codec.digest(new)
      if base:
        return codec.encode(None, new, itemsize=itemsize[i]), post
      if post == self._digests[i].tobytes():
        return codec.unchanged(new), post
      old = self._snapshot[i]
      raw_above = self._cfg.raw_above_changed_fraction
      return (
          codec.encode(old, new, itemsize=itemsize[i], raw_above=raw_above),
          post,
      )

    def flush() -> None:
      key = f'{prefix}.seg.{len(segments)}'
      segments.append(self._store.put(key, bytes(buffer)))
      buffer.clear()

    for i, (encoded, post) in enumerate(_map(encode, len(rows))):
      rows[i] = (
          i,
          len(segments),
          encoded.codec,
          len(buffer),
          len(encoded.payload),
          encoded.changed,
          np.frombuffer(codec.digest(encoded.payload), np.uint8),
          _NO_DIGEST if base else self._digests[i],
          np.frombuffer(post, np.uint8),
      )
      buffer += encoded.payload
      if len(buffer) >= store_lib.SEGMENT_BYTES:
        flush()
    flush()
    index = self._store.put(f'{prefix}.idx', rows.tobytes())
    return store_lib.Edge(base, index, tuple(segments)), rows


def _host(named: Mapping[str, Any]) -> dict[str, np.ndarray]:
  return {name: np.asarray(a) for name, a in named.items()}


def _map(fn, count: int) -> Iterable:
  """Ordered results of fn(0..count-1), a few of them ahead, on threads."""
  with futures.ThreadPoolExecutor(_ENCODE_THREADS) as pool:
    ahead = collections.deque()
    for i in range(count):
      ahead.append(pool.submit(fn, i))
      if len(ahead) > 4 * _ENCODE_THREADS:
        yield ahead.popleft().result()
    while ahead:
      yield ahead.popleft().result()


class BackgroundPublisher:
  """Publishes on a thread of its own, so that the train step does not wait.

  At most one version is being written and one is waiting; handing over a
  third waits for the first. `seconds_waited` is how long that took in total.
  """

  def __init__(self, publisher: Publisher):
    self._publisher = publisher
    self._pool = futures.ThreadPoolExecutor(1, 'publish')
    self._pending = collections.deque()
    self.seconds_waited = 0.0

  def submit(
      self, step: int, named: Mapping[str, Any]
  ) -> futures.Future[Published]:
    """Queues `Publisher.publish`; device arrays are fetched by the thread.

    Raises:
      Exception: what an earlier publish failed with.
    """
    begin = time.perf_counter()
    while self._pending and (len(self._pending) > 1 or self._pending[0].done()):
      self._pending.popleft().result()
    self.seconds_waited += time.perf_counter() - begin
    self._pending.append(
        self._pool.submit(self._publisher.publish, step, named)
    )
    return self._pending[-1]

  def close(self) -> None:
    """Waits for what was queued; raises what it failed with."""
    self._pool.shutdown(wait=True)
    while self._pending:
      self._pending.popleft().result()
