"""What the objects of a store say: versions, their edges, their tiles.

LATEST holds the sha256 of its manifest, a manifest those of its indices, its
segments and the manifests before it, an index the digest of every tile:
nothing is decoded that this chain does not vouch for. What stands outside of
it, LATEST and what describes the model, is sealed: it ends in its own sha256.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np

from composer_jax import trace
from composer_jax.weights import layout

SCHEMA = 2
TILE = np.dtype(
    [
        ('tile', '<u4'),  # number in `layout.Table.tiles`
        ('segment', '<u2'),  # of this index's writer
        ('codec', '<u2'),
        ('offset', '<u4'),
        ('length', '<u4'),
        ('changed', '<u4'),
        ('payload', 'u1', (8,)),  # xxh3-64 of the stored bytes
        ('pre', 'u1', (8,)),  # half of the digest before; zeros in a base
        ('post', 'u1', (16,)),  # digest of the tile after
    ]
)


class StoreError(RuntimeError):
  """An object is missing, damaged or contradicts another one."""


def sealed(text: bytes) -> bytes:
  """A JSON object and, on a line of its own, its sha256."""
  return text + b'\n' + hashlib.sha256(text).hexdigest().encode()


def opened(data: bytes, name: str, cure: str) -> bytes:
  """Inverse of `sealed`.

  Args:
    data: what the store has.
    name: names the object in errors.
    cure: what to do if it is damaged.

  Raises:
    StoreError: it is not what was sealed.
  """
  text, _, check = data.rpartition(b'\n')
  if hashlib.sha256(text).hexdigest().encode() != check:
    raise StoreError(
        f'{name}: content does not match its sha256; damaged, {cure}'
    )
  return text


@dataclasses.dataclass(frozen=True)
class Blob:
  """An immutable object and what its content must be."""

  key: str
  length: int
  sha256: str


@dataclasses.dataclass(frozen=True)
class Link:
  """Names one published version and its exact manifest."""

  version: int
  root: str
  manifest: Blob


@dataclasses.dataclass(frozen=True)
class Part:
  """What one writer wrote of an edge."""

  index: Blob
  segments: tuple[Blob, ...]


@dataclasses.dataclass(frozen=True)
class Edge:
  """Tiles that lead to a version from an earlier one, or from nothing."""

  origin: Link | None  # None for a base
  parts: tuple[Part, ...]

  @property
  def name(self) -> str:
    return self.parts[0].index.key

  @property
  def segments(self) -> tuple[Blob, ...]:
    return tuple(s for part in self.parts for s in part.segments)

  @property
  def nbytes(self) -> int:
    blobs = (*self.segments, *(part.index for part in self.parts))
    return sum(b.length for b in blobs)


@dataclasses.dataclass(frozen=True)
class Manifest:
  """One published version; `delta`, `skip` and `base` are ways to get it."""

  version: int
  step: int  # optimizer step of the trainer
  root: str
  incarnation: str
  parent: Link | None
  since_base: int  # versions published since one with a base
  changed: int
  table: layout.Table
  delta: Edge | None  # from the parent
  skip: Edge | None  # from some versions before the parent
  base: Edge | None

  def to_bytes(self) -> bytes:
    head = dataclasses.asdict(dataclasses.replace(self, table=None))
    head |= {'schema': SCHEMA, 'table': self.table.to_json()}
    return json.dumps(head, sort_keys=True, indent=1).encode()

  @classmethod
  def from_bytes(cls, data: bytes, key: str) -> Manifest:
    """Inverse of `to_bytes`; `key` names it in errors."""
    head = json.loads(data)
    schema = head.pop('schema')
    if schema != SCHEMA:
      raise StoreError(f'{key}: schema={schema}, this reader knows {SCHEMA}')
    head['table'] = layout.Table.from_json(head['table'])
    head['parent'] = head['parent'] and link(head['parent'])
    for kind in ('delta', 'skip', 'base'):
      head[kind] = head[kind] and _edge(head[kind])
    return cls(**head)

  def blobs(self) -> list[Blob]:
    """Every object that this version refers to, but for earlier versions."""
    edges = [e for e in (self.delta, self.skip, self.base) if e]
    parts = [part for edge in edges for part in edge.parts]
    return [b for part in parts for b in (*part.segments, part.index)]


def link(value: dict[str, Any]) -> Link:
  """A link from its JSON value."""
  return Link(value['version'], value['root'], Blob(**value['manifest']))


def part(value: dict[str, Any]) -> Part:
  """A part of an edge from its JSON value."""
  segments = tuple(Blob(**s) for s in value['segments'])
  return Part(Blob(**value['index']), segments)


def _edge(value: dict[str, Any]) -> Edge:
  parts = tuple(part(p) for p in value['parts'])
  return Edge(value['origin'] and link(value['origin']), parts)


def weight_version(manifest: Manifest) -> trace.WeightVersion:
  """The version as samples and hosts name it; no parent without a delta."""
  parent = manifest.parent.root if manifest.delta else None
  return trace.WeightVersion(manifest.version, manifest.root, parent)
