"""How named arrays are cut into tiles, and their canonical order.

A tile is a block of about `tile_elements` values in the LOGICAL coordinates
of its array, never in the coordinates of a device shard: a trainer and a
rollout host with different meshes both own unions of whole tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import hashlib
import itertools
import json
import math

import ml_dtypes
import numpy as np

TILE_ELEMENTS = 262_144

Box = tuple[slice, ...]


def grid(
    shape: tuple[int, ...],
    tile_elements: int,
    first: Sequence[int] | None = None,
) -> tuple[int, ...]:
  """Number of parts that every axis is cut into.

  Leading axes (layers, experts) are cut first and evenly, so that an expert's
  tiles are neighbors; the last two axes are halved, the longer edge first,
  so that cuts fall on multiples of dim / 16 until tiles get smaller than that.

  Args:
    shape: shape of the array, () included.
    tile_elements: largest wanted number of values in a tile.
    first: parts to begin with, divisors of the shape; every cut between them
      stays one. By default one part.

  Returns:
    Parts per axis; the cut points of an axis are `i * dim // parts`.
  """
  parts = list(first or [1] * len(shape))
  if 0 in shape:
    return tuple(parts)

  def edge(axis: int) -> int:
    return -(-shape[axis] // parts[axis])

  def size() -> int:
    return math.prod(edge(axis) for axis in range(len(shape)))

  for axis in range(len(shape) - 2):
    begin, dim = parts[axis], shape[axis]
    need = begin * -(-size() // tile_elements)
    even = (p for p in range(need, dim, begin) if dim % p == 0)
    parts[axis] = next(even, dim)
  while size() > tile_elements:
    axis = max(range(len(shape))[-2:], key=edge)
    parts[axis] = min(2 * parts[axis], shape[axis])
  return tuple(parts)


@dataclasses.dataclass(frozen=True)
class Param:
  """One array: its name, shape, numpy dtype name and tile grid."""

  name: str
  shape: tuple[int, ...]
  dtype: str
  grid: tuple[int, ...]

  def blocks(self) -> Iterator[tuple[slice, ...]]:
    """Index expressions of the tiles, last axis fastest."""
    axes = [
        [slice(i * dim // n, (i + 1) * dim // n) for i in range(n)]
        for dim, n in zip(self.shape, self.grid, strict=True)
    ]
    return itertools.product(*axes)


@dataclasses.dataclass(frozen=True)
class Table:
  """Every array of a version, by name, and the order of all their tiles."""

  params: tuple[Param, ...]

  @classmethod
  def of(
      cls,
      named: Mapping[str, np.ndarray],
      tile_elements: int,
      boxes: Sequence[Mapping[str, Box]] = (),
  ) -> Table:
    """The table of arrays by name; works on anything with shape and dtype.

    The edges of `boxes`, what processes have of the arrays, are cuts as well.
    """
    return cls(
        tuple(
            Param(
                name,
                tuple(map(int, a.shape)),
                str(a.dtype),
                grid(
                    tuple(a.shape),
                    tile_elements,
                    _cuts(a.shape, [b[name] for b in boxes if name in b]),
                ),
            )
            for name, a in sorted(named.items())
        )
    )

  @classmethod
  def from_json(cls, rows: list) -> Table:
    """Inverse of `to_json`."""
    return cls(tuple(Param(n, tuple(s), d, tuple(g)) for n, s, d, g in rows))

  def to_json(self) -> list:
    return [[p.name, p.shape, p.dtype, p.grid] for p in self.params]

  @functools.cached_property
  def tiles(self) -> tuple[tuple[str, tuple[slice, ...]], ...]:
    """(array name, block) of every tile; the index is the tile's number."""
    return tuple((p.name, block) for p in self.params for block in p.blocks())

  @functools.cached_property
  def itemsizes(self) -> dict[str, int]:
    """Bytes per element of every array."""
    return {p.name: dtype(p.dtype).itemsize for p in self.params}

  def _block(self, tile: int) -> tuple[str, tuple[slice, ...]]:
    """Array and index expression of a tile in the arrays at hand."""
    return self.tiles[tile]

  def word(self, tile: int) -> np.dtype:
    """Type of the words of a tile."""
    return np.dtype(np.uint16 if self.itemsize(tile) == 2 else np.uint8)

  def itemsize(self, tile: int) -> int:
    """Bytes per element of a tile."""
    return self.itemsizes[self.tiles[tile][0]]

  def read(self, named: Mapping[str, np.ndarray], tile: int) -> np.ndarray:
    """The words of a tile, flat: uint16 for 2-byte types, else uint8."""
    name, block = self._block(tile)
    array = np.ascontiguousarray(named[name][block]).reshape(-1)
    return array.view(self.word(tile))

  def write(
      self, named: Mapping[str, np.ndarray], tile: int, words: np.ndarray
  ) -> None:
    """Stores the words of a tile into its array, in place."""
    name, block = self._block(tile)
    target = named[name][block]
    named[name][block] = words.view(target.dtype).reshape(target.shape)

  def empty(self) -> dict[str, np.ndarray]:
    """Uninitialized arrays of the table."""
    return {p.name: np.empty(p.shape, dtype(p.dtype)) for p in self.params}

  def root(self, digests: np.ndarray) -> str:
    """Root digest from the digests of all tiles, uint8 [tiles 16]."""
    head = json.dumps(self.to_json(), separators=(',', ':')).encode()
    return hashlib.sha256(head + digests.tobytes()).hexdigest()


@dataclasses.dataclass(frozen=True)
class View(Table):
  """A table of which a process has one box of each array, or none.

  Its `read`, `write` and `empty` work on arrays of the size of these boxes.
  """

  boxes: Mapping[str, Box]

  @classmethod
  def covering(cls, table: Table, boxes: Mapping[str, Box]) -> View:
    """The smallest view of whole tiles that has all of `boxes`."""
    grown = {}
    for p in table.params:
      if p.name in boxes:
        axes = zip(p.shape, p.grid, boxes[p.name], strict=True)
        grown[p.name] = tuple(_grown(*axis) for axis in axes)
    return cls(table.params, grown)

  @functools.cached_property
  def held(self) -> np.ndarray:
    """Numbers of the tiles that lie in a box as a whole."""
    return np.array(
        [i for i, (name, b) in enumerate(self.tiles) if self._has(name, b)],
        np.int64,
    )

  def _has(self, name: str, block: Box) -> bool:
    return name in self.boxes and all(
        box.start <= b.start and b.stop <= box.stop
        for b, box in zip(block, self.boxes[name], strict=True)
    )

  def _block(self, tile: int) -> tuple[str, tuple[slice, ...]]:
    name, block = self.tiles[tile]
    return name, inside(block, self.boxes[name])

  def empty(self) -> dict[str, np.ndarray]:
    return {
        p.name: np.empty(
            [s.stop - s.start for s in self.boxes[p.name]], dtype(p.dtype)
        )
        for p in self.params
        if p.name in self.boxes
    }


def whole(table: Table) -> View:
  """The view of a process that has everything."""
  return View(
      table.params,
      {p.name: tuple(slice(0, dim) for dim in p.shape) for p in table.params},
  )


def hull(indices: Iterable[tuple[slice, ...]], shape: tuple[int, ...]) -> Box:
  """The smallest box around some shards of an array.

  Args:
    indices: parts of the array, such as the values of a jax sharding's
      `addressable_devices_indices_map(shape)`.
    shape: shape of the whole array.
  """
  shards = [
      [s.indices(dim) for s, dim in zip(index, shape, strict=True)]
      for index in indices
  ]
  return tuple(
      slice(min(a[0] for a in axis), max(a[1] for a in axis))
      for axis in zip(*shards, strict=True)
  )


def inside(block: Box, box: Box) -> Box:
  """`block` in coordinates that begin where `box` does."""
  return tuple(
      slice(b.start - o.start, b.stop - o.start)
      for b, o in zip(block, box, strict=True)
  )


def owners(views: Sequence[View]) -> np.ndarray:
  """Which process writes which tile, the same on every process.

  Args:
    views: what each process has, in the order of the processes.

  Returns:
    Number of the owner of every tile [tiles]; copies take turns.

  Raises:
    ValueError: no process has all of some tile.
  """
  have = np.zeros((len(views), len(views[0].tiles)), bool)
  for row, view in zip(have, views, strict=True):
    row[view.held] = True
  count = have.sum(axis=0)
  if not count.all():
    name, block = views[0].tiles[int(np.argmin(count))]
    raise ValueError(
        f'{name}{list(block)}: no process has this tile; the boxes of all'
        ' processes have to cover every array'
    )
  turn = np.arange(count.size) % count
  return np.argmax(np.cumsum(have, axis=0) > turn, axis=0)


def _cuts(shape: tuple[int, ...], boxes: Sequence[Box]) -> list[int]:
  """The fewest even parts of every axis that have all edges of the boxes."""
  parts = []
  for axis, dim in enumerate(shape):
    edges = {e for box in boxes for e in (box[axis].start, box[axis].stop)}
    common = math.gcd(dim, *edges)
    parts.append(dim // common if common else 1)
  return parts


def _grown(dim: int, parts: int, wanted: slice) -> slice:
  """`wanted`, out to the next cuts of its axis."""
  cuts = [i * dim // parts for i in range(parts + 1)]
  start = max(c for c in cuts if c <= wanted.start)
  return slice(start, min(c for c in cuts if c >= wanted.stop))


def dtype(name: str) -> np.dtype:
  """The numpy type of that name, ml_dtypes' small floats included."""
  return np.dtype(getattr(ml_dtypes, name, name))
