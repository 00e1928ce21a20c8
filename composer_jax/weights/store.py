"""Layout of published weights on any TensorStore key-value store.

  base/{V}/{nonce}.{writer}.seg.{i}, .idx    every tile raw: for joiners
  d/{V}-{W}/{nonce}.{writer}.seg.{i}, .idx   tiles from version V to W
  m/{W}.{nonce}.json                         immutable manifest
  LATEST                                     the newest version
  lease/{host}, gc.json, round/              see `retain` and `rendezvous`

Segments pack tiles in canonical order, so that neighbors are one range read.
A base is an edge of the same format whose tiles are all raw, so joiners and
followers share one reader. Only LATEST decides what is published.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import dataclasses
import hashlib
import json
import uuid

import numpy as np
import tensorstore as ts

from composer_jax.weights import codec
from composer_jax.weights import layout
from composer_jax.weights import records

SEGMENT_BYTES = 1 << 26
LATEST = 'LATEST'
HORIZON = 'gc.json'

_MANIFESTS_KEPT = 256
# One context: `memory://` stores of a process are then the same store. A store
# that stays away becomes an error within a minute, not within hours.
_RETRIES = {'max_retries': 6, 'initial_delay': '200ms', 'max_delay': '10s'}
_context = ts.Context(
    {f'{driver}_request_retries': _RETRIES for driver in ('s3', 'gcs', 'http')}
)


class Store:
  """Verified reads and conditional writes under one URL prefix."""

  def __init__(self, url: str):
    """Opens a prefix.

    Args:
      url: file, memory, s3 or gs, http to read; or the JSON spec of a
        TensorStore key-value store, for what a URL cannot say (endpoints).
    """
    if url.startswith('{'):
      spec = json.loads(url)
      self.url = f'{spec["driver"]}:{spec.get("bucket", "")}/{spec["path"]}'
    else:
      self.url = spec = url if url.endswith('/') else url + '/'
    self._kv = ts.KvStore.open(spec, context=_context).result()
    self._manifests = {}

  def put(self, key: str, data: bytes) -> records.Blob:
    """Writes a new object."""
    self._done(key, self._kv.write(key, data))
    return records.Blob(key, len(data), hashlib.sha256(data).hexdigest())

  def _done(self, key: str, future: ts.Future):
    """The result of a request, or an error that names its object."""
    try:
      return future.result()
    except ValueError as e:
      if 'OUT_OF_RANGE' in str(e):
        raise records.StoreError(f'{self.url}{key}: truncated; {e}') from e
      raise OSError(f'{self.url}{key}: {e}; is the store in reach?') from e

  def delete(self, key: str) -> None:
    """Removes an object; nothing happens if it is not there."""
    self._done(key, self._kv.write(key, None))

  def keys(self, prefix: str) -> list[str]:
    """The keys that start with a prefix."""
    last = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    keys = self._done(prefix, self._kv.list(ts.KvStore.KeyRange(prefix, last)))
    return sorted(k.decode() for k in keys)

  def swap(self, key: str, data: bytes, generation: bytes) -> bytes:
    """Writes only over `generation`; returns the new one, b'' if it lost."""
    write = self._kv.write(key, data, if_equal=generation)
    return self._done(key, write).generation

  def read(
      self, key: str, if_not_equal: bytes | None = None
  ) -> tuple[str, bytes, bytes]:
    """State ('value', 'missing', 'unspecified'), value and generation."""
    r = self._done(key, self._kv.read(key, if_not_equal=if_not_equal))
    return r.state, r.value, r.stamp.generation

  def get(self, blob: records.Blob) -> bytes:
    """Reads an object and checks it against its length and sha256."""
    state, data, _ = self.read(blob.key)
    if state != 'value':
      raise records.StoreError(
          f'{self.url}{blob.key}: missing; restore it from a copy'
      )
    if (
        len(data) != blob.length
        or hashlib.sha256(data).hexdigest() != blob.sha256
    ):
      raise records.StoreError(
          f'{self.url}{blob.key}: {len(data)} bytes do not match the sha256 in'
          ' its manifest; damaged, restore it from a copy'
      )
    return data

  def probe(self) -> None:
    """Refuses a store that does not really do conditional writes.

    Raises:
      records.StoreError: a second create, or a write over a stale generation, won.
    """
    key = f'probe/{uuid.uuid4().hex}'
    absent = self.read(key)[2]
    first = self.swap(key, b'1', absent)
    second = self.swap(key, b'2', absent)
    third = self.swap(key, b'3', first)
    stale = self.swap(key, b'4', first)
    self.delete(key)
    if not first or second or not third or stale:
      raise records.StoreError(
          f'{self.url}: conditional writes are not honored (two racing'
          ' trainers could both win); use a store that supports them'
      )

  def latest(
      self, if_not_equal: bytes | None = None
  ) -> tuple[records.Link | None, bytes]:
    """The newest version, None if absent or unchanged, and the generation."""
    state, data, generation = self.read(LATEST, if_not_equal)
    if state != 'value':
      return None, generation
    text = records.opened(
        data, self.url + LATEST, 'point it at the last good manifest'
    )
    return records.link(json.loads(text)), generation

  def advance(
      self, link: records.Link, incarnation: str, generation: bytes
  ) -> bytes:
    """Compare-and-swap of LATEST; returns the new generation, b'' if lost.

    A write whose answer got lost is looked up by its nonce: it may have won.
    """
    head = dataclasses.asdict(link)
    # The nonce keeps the content unique where a generation is a content hash.
    head |= {'incarnation': incarnation, 'nonce': uuid.uuid4().hex}
    data = records.sealed(json.dumps(head, sort_keys=True).encode())
    try:
      if won := self.swap(LATEST, data, generation):
        return won
    except Exception:
      _, value, now = self.read(LATEST)
      if value == data:
        return now
      raise
    _, value, now = self.read(LATEST)
    return now if value == data else b''

  def manifest(self, link: records.Link) -> records.Manifest:
    """The manifest that a link names; immutable, hence cached."""
    found = self._manifests.get(link)
    if found is None:
      found = records.Manifest.from_bytes(
          self.get(link.manifest), link.manifest.key
      )
      if (found.version, found.root) != (link.version, link.root):
        raise records.StoreError(
            f'{link.manifest.key}: not version {link.version}'
        )
      while len(self._manifests) >= _MANIFESTS_KEPT:
        del self._manifests[next(iter(self._manifests))]
      self._manifests[link] = found
    return found

  def history(
      self, link: records.Link
  ) -> Iterator[tuple[records.Link, records.Manifest]]:
    """Published versions from `link` back to the first that is kept."""
    at = link
    while at is not None:
      try:
        manifest = self.manifest(at)
      except records.StoreError:
        if at.version < self.horizon():
          return
        raise
      yield at, manifest
      at = manifest.parent

  def digest(self, version: int) -> str | None:
    """Root digest of a version; None: the store does not have it."""
    link, _ = self.latest()
    for at, _ in self.history(link) if link else ():
      if at.version <= version:
        return at.root if at.version == version else None
    return None

  def horizon(self) -> int:
    """Versions before this one may have been removed."""
    state, data, _ = self.read(HORIZON)
    return json.loads(data)['horizon'] if state == 'value' else 0

  def index(self, edge: records.Edge, table: layout.Table) -> np.ndarray:
    """The tile records [tiles] of an edge, in canonical order.

    `segment` counts the segments of the whole edge.

    Raises:
      StoreError: damaged, or tiles are missing, doubled or out of range.
    """
    found, first = [], 0
    for part in edge.parts:
      data = self.get(part.index)
      if len(data) % records.TILE.itemsize:
        raise records.StoreError(f'{part.index.key}: not a list of tiles')
      rows = np.frombuffer(data, records.TILE).copy()
      rows['segment'] += first
      first += len(part.segments)
      found.append(rows)
    rows = np.concatenate(found)
    rows = rows[np.argsort(rows['tile'], kind='stable')]
    sizes = np.array([s.length for s in edge.segments], np.int64)
    if (
        not np.array_equal(rows['tile'], np.arange(len(table.tiles)))
        or (rows['segment'] >= sizes.size).any()
        or (_ends(rows) > sizes[rows['segment']]).any()
    ):
      raise records.StoreError(
          f'{edge.name}: tiles do not cover every array once'
      )
    return rows

  def payloads(
      self, edge: records.Edge, rows: np.ndarray
  ) -> Iterator[tuple[np.void, memoryview]]:
    """Verified payloads of some tile records, segment after segment.

    Adjacent tiles are fetched by one range read; the reads of a segment go
    out together, and while the caller works on the tiles of one segment those
    of the next are on their way.
    """
    ahead = None
    for i, segment in enumerate(edge.segments):
      fetched = self._fetch(segment.key, rows[rows['segment'] == i])
      if ahead is not None:
        yield from self._checked(*ahead)
      ahead = segment.key, fetched
    yield from self._checked(*ahead)

  def _fetch(self, key: str, rows: np.ndarray) -> list:
    """Starts to read tiles of a segment, as few ranges as possible."""
    cuts = np.flatnonzero(rows['offset'][1:] != _ends(rows)[:-1]) + 1
    batch = ts.Batch()
    fetched = []
    for run in np.split(rows, cuts) if rows.size else []:
      span = slice(int(run[0]['offset']), int(_ends(run)[-1]))
      read = None
      if span.start < span.stop:  # unchanged tiles have no bytes at all
        read = self._kv.read(key, batch=batch, byte_range=span)
      fetched.append((run, read))
    batch.submit()
    return fetched

  def _checked(
      self, key: str, fetched: list
  ) -> Iterable[tuple[np.void, memoryview]]:
    while fetched:
      yield from self._verified(key, *fetched.pop(0))

  def _verified(self, key: str, run: np.ndarray, read):
    first = int(run[0]['offset'])
    data = b''
    if read is not None:
      result = self._done(key, read)
      if result.state != 'value':
        raise records.StoreError(
            f'{self.url}{key}: missing; restore it from a copy'
        )
      data = result.value
    view = memoryview(data)
    for row in run:
      begin = int(row['offset']) - first
      payload = view[begin : begin + int(row['length'])]
      if codec.check(payload) != row['payload'].tobytes():
        raise records.StoreError(
            f'{self.url}{key}: tile {row["tile"]} does not match its digest;'
            ' damaged, restore it from a copy'
        )
      yield row, payload


def _ends(rows: np.ndarray) -> np.ndarray:
  """Where the tiles end in their segments."""
  return rows['offset'].astype(np.int64) + rows['length']
