"""Layout of published weights on any TensorStore key-value store.

  base/{V}/{nonce}.seg.{i}, .idx   every tile raw: where joiners start
  d/{V}-{W}/{nonce}.seg.{i}, .idx  tiles that lead from version V to W
  m/{W}.{nonce}.json               immutable manifest; names its parent's
  LATEST                           the only mutable key

Segments pack tiles in canonical order, so that neighbors are one range read.
LATEST holds the sha256 of its manifest, a manifest those of its index, its
segments and its parent's manifest, an index the digest of every tile: nothing
is decoded that this chain does not vouch for. A base is an edge of the same
format whose tiles are all raw, so joiners and followers share one reader.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import hashlib
import json
import uuid

import numpy as np
import tensorstore as ts

from composer_jax import trace
from composer_jax.weights import codec
from composer_jax.weights import layout

SCHEMA = 1
SEGMENT_BYTES = 1 << 26
LATEST = 'LATEST'
TILE = np.dtype(
    [
        ('tile', '<u4'),  # number in `layout.Table.tiles`
        ('segment', '<u2'),
        ('codec', '<u2'),
        ('offset', '<u8'),
        ('length', '<u4'),
        ('changed', '<u4'),
        ('payload', 'u1', (16,)),  # digest of the stored bytes
        ('pre', 'u1', (16,)),  # digest of the tile before; zeros in a base
        ('post', 'u1', (16,)),  # digest of the tile after
    ]
)

# One context: `memory://` stores of a process are then the same store.
_context = ts.Context()


class StoreError(RuntimeError):
  """An object is missing, damaged or contradicts another one."""


@dataclasses.dataclass(frozen=True)
class Blob:
  """An immutable object and what its content must be."""

  key: str
  length: int
  sha256: str


@dataclasses.dataclass(frozen=True)
class Edge:
  """Tiles that lead to a version from its parent, or from nothing (base)."""

  base: bool
  index: Blob
  segments: tuple[Blob, ...]

  @property
  def nbytes(self) -> int:
    return self.index.length + sum(s.length for s in self.segments)


@dataclasses.dataclass(frozen=True)
class Link:
  """Names one published version and its exact manifest."""

  version: int
  root: str
  manifest: Blob


@dataclasses.dataclass(frozen=True)
class Manifest:
  """One published version; `delta` and `base` are ways to get it."""

  version: int
  step: int  # optimizer step of the trainer
  root: str
  incarnation: str
  parent: Link | None
  since_base: int  # versions published since one with a base
  changed: int
  table: layout.Table
  delta: Edge | None
  base: Edge | None

  def to_bytes(self) -> bytes:
    head = dataclasses.asdict(dataclasses.replace(self, table=None))
    head |= {'schema': SCHEMA, 'table': self.table.to_json()}
    return json.dumps(head, sort_keys=True, indent=1).encode()


def weight_version(manifest: Manifest) -> trace.WeightVersion:
  """The version as samples and hosts name it; no parent without a delta."""
  parent = manifest.parent.root if manifest.delta else None
  return trace.WeightVersion(manifest.version, manifest.root, parent)


def _link(value: dict) -> Link:
  return Link(value['version'], value['root'], Blob(**value['manifest']))


def _edge(value: dict | None) -> Edge | None:
  if value is None:
    return None
  segments = tuple(Blob(**s) for s in value['segments'])
  return Edge(value['base'], Blob(**value['index']), segments)


def _manifest(data: bytes, key: str) -> Manifest:
  head = json.loads(data)
  schema = head.pop('schema')
  if schema != SCHEMA:
    raise StoreError(f'{key}: schema={schema}, this reader knows {SCHEMA}')
  head['table'] = layout.Table.from_json(head['table'])
  head['parent'] = head['parent'] and _link(head['parent'])
  return Manifest(**head | {k: _edge(head[k]) for k in ('delta', 'base')})


class Store:
  """Verified reads and conditional writes under one URL prefix."""

  def __init__(self, url: str):
    """Opens `url` (file, memory, s3, gs; http to read), ending in a slash."""
    self.url = url if url.endswith('/') else url + '/'
    self._kv = ts.KvStore.open(self.url, context=_context).result()
    self._manifests = {}

  def put(self, key: str, data: bytes) -> Blob:
    """Writes a new object."""
    self._kv.write(key, data).result()
    return Blob(key, len(data), hashlib.sha256(data).hexdigest())

  def swap(self, key: str, data: bytes, generation: bytes) -> bytes:
    """Writes only over `generation`; returns the new one, b'' if it lost."""
    return self._kv.write(key, data, if_equal=generation).result().generation

  def read(
      self, key: str, if_not_equal: bytes | None = None
  ) -> tuple[str, bytes, bytes]:
    """State ('value', 'missing', 'unspecified'), value and generation."""
    r = self._kv.read(key, if_not_equal=if_not_equal).result()
    return r.state, r.value, r.stamp.generation

  def get(self, blob: Blob) -> bytes:
    """Reads an object and checks it against its length and sha256."""
    state, data, _ = self.read(blob.key)
    if state != 'value':
      raise StoreError(f'{self.url}{blob.key}: missing; restore it from a copy')
    if (
        len(data) != blob.length
        or hashlib.sha256(data).hexdigest() != blob.sha256
    ):
      raise StoreError(
          f'{self.url}{blob.key}: {len(data)} bytes do not match the sha256 in'
          ' its manifest; damaged, restore it from a copy'
      )
    return data

  def probe(self) -> None:
    """Refuses a store that does not really do conditional writes.

    Raises:
      StoreError: a second create, or a write over a stale generation, won.
    """
    key = f'probe/{uuid.uuid4().hex}'
    absent = self.read(key)[2]
    first = self.swap(key, b'1', absent)
    second = self.swap(key, b'2', absent)
    third = self.swap(key, b'3', first)
    stale = self.swap(key, b'4', first)
    self._kv.write(key, None).result()
    if not first or second or not third or stale:
      raise StoreError(
          f'{self.url}: conditional writes are not honored (two racing'
          ' trainers could both win); use a store that supports them'
      )

  def latest(
      self, if_not_equal: bytes | None = None
  ) -> tuple[Link | None, bytes]:
    """The newest version, None if absent or unchanged, and the generation."""
    state, data, generation = self.read(LATEST, if_not_equal)
    if state != 'value':
      return None, generation
    text, _, check = data.rpartition(b'\n')
    if hashlib.sha256(text).hexdigest().encode() != check:
      raise StoreError(
          f'{self.url}{LATEST}: content does not match its sha256; damaged,'
          ' point it at the last good manifest'
      )
    return _link(json.loads(text)), generation

  def advance(self, link: Link, incarnation: str, generation: bytes) -> bytes:
    """Compare-and-swap of LATEST; returns the new generation, b'' if lost.

    A write whose answer got lost is looked up by its nonce: it may have won.
    """
    head = dataclasses.asdict(link)
    # The nonce keeps the content unique where a generation is a content hash.
    head |= {'incarnation': incarnation, 'nonce': uuid.uuid4().hex}
    text = json.dumps(head, sort_keys=True).encode()
    data = text + b'\n' + hashlib.sha256(text).hexdigest().encode()
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

  def manifest(self, link: Link) -> Manifest:
    """The manifest that a link names; immutable, hence cached."""
    found = self._manifests.get(link)
    if found is None:
      found = _manifest(self.get(link.manifest), link.manifest.key)
      if (found.version, found.root) != (link.version, link.root):
        raise StoreError(f'{link.manifest.key}: not version {link.version}')
      self._manifests[link] = found
    return found

  def history(self, link: Link) -> Iterator[tuple[Link, Manifest]]:
    """Published versions from `link` back to the first."""
    at = link
    while at is not None:
      manifest = self.manifest(at)
      yield at, manifest
      at = manifest.parent

  def index(self, edge: Edge, table: layout.Table) -> np.ndarray:
    """The tile records [tiles] of an edge, in canonical order.

    Raises:
      StoreError: damaged, or tiles are missing, doubled or out of range.
    """
    data = self.get(edge.index)
    if len(data) != len(table.tiles) * TILE.itemsize:
      raise StoreError(f'{edge.index.key}: not one record per tile')
    rows = np.frombuffer(data, TILE)
    sizes = np.array([s.length for s in edge.segments], np.uint64)
    if (
        not np.array_equal(rows['tile'], np.arange(rows.size))
        or (rows['segment'] >= sizes.size).any()
        or (rows['offset'] + rows['length'] > sizes[rows['segment']]).any()
    ):
      raise StoreError(f'{edge.index.key}: tiles do not cover every array once')
    return rows

  def payloads(
      self, edge: Edge, rows: np.ndarray
  ) -> Iterator[tuple[np.void, memoryview]]:
    """Verified payloads of some tile records, in their order.

    Adjacent tiles are fetched by one range read; the reads of a segment go
    out together.
    """
    for i, segment in enumerate(edge.segments):
      mine = rows[rows['segment'] == i]
      ends = mine['offset'] + mine['length']
      cuts = np.flatnonzero(mine['offset'][1:] != ends[:-1]) + 1
      runs = [r for r in np.split(mine, cuts) if r.size]
      batch = ts.Batch()
      reads = []
      for run in runs:
        end = int(run[-1]['offset']) + int(run[-1]['length'])
        span = slice(int(run[0]['offset']), end)
        if span.start < span.stop:  # unchanged tiles have no bytes at all
          read = self._kv.read(segment.key, batch=batch, byte_range=span)
          reads.append(read)
        else:
          reads.append(None)
      batch.submit()
      for run, read in zip(runs, reads, strict=True):
        yield from self._verified(segment.key, run, read)

  def _verified(self, key: str, run: np.ndarray, read):
    first = int(run[0]['offset'])
    data = b''
    if read is not None:
      try:
        result = read.result()
      except ValueError as e:  # a range beyond the end of the object
        raise StoreError(f'{self.url}{key}: truncated; {e}') from e
      if result.state != 'value':
        raise StoreError(f'{self.url}{key}: missing; restore it from a copy')
      data = result.value
    view = memoryview(data)
    for row in run:
      begin = int(row['offset']) - first
      payload = view[begin : begin + int(row['length'])]
      if codec.digest(payload) != row['payload'].tobytes():
        raise StoreError(
            f'{self.url}{key}: tile {row["tile"]} does not match its digest;'
            ' damaged, restore it from a copy'
        )
      yield row, payload
