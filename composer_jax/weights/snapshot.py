"""What receivers have: the words that deltas of the next version start from.

Besides the words as last published, a writer keeps the sparse steps of the
versions since the last multiple of `skip_every_versions`. Their sum, taken
back from the new words, gives the old ones that a skip delta starts from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import collections
from typing import NamedTuple

import numpy as np

from composer_jax import config
from composer_jax.weights import codec
from composer_jax.weights import layout
from composer_jax.weights import parallel
from composer_jax.weights import records
from composer_jax.weights import ulp_steps

_NO_DIGEST = bytes(8)
# Share of a tile's values whose steps are kept. A step takes 6 bytes, so this
# is 3/4 of a byte for every value.
_MOST_KEPT = 1 / 8


class Tile(NamedTuple):
  """A tile on its way with half the digest before and the one after."""

  encoded: codec.Encoded
  pre: bytes
  post: bytes


def base_tile(
    view: layout.View, named: Mapping[str, np.ndarray], tile: int
) -> Tile:
  """A tile as joiners get it."""
  new = view.read(named, tile)
  encoded = codec.encode(None, new, itemsize=view.itemsize(tile))
  return Tile(encoded, _NO_DIGEST, codec.digest(new))


class Snapshot:
  """The tiles of one writer as last published.

  Attributes:
    view: what the writer has of every array.
    tiles: numbers of the tiles it writes; arguments `i` count these.
    origin: where a skip delta would start; None if it would not pay.
  """

  def __init__(
      self,
      view: layout.View,
      tiles: np.ndarray,
      named: Mapping[str, np.ndarray],
      digests: np.ndarray,
  ):
    """Copies the tiles; `digests` are theirs [tiles 16]."""
    self.view, self.tiles = view, tiles
    self._words = [view.read(named, t).copy() for t in tiles]
    self._digests = digests.copy()
    self._values = sum(w.size for w in self._words)
    self._fresh: dict[int, ulp_steps.UlpSteps] = (
        {}
    )  # of the version being written
    self._window: list[dict[int, ulp_steps.UlpSteps]] = []
    self._kept = 0
    self.origin: records.Link | None = None
    self._origin_digests = self._digests

  def delta_tile(
      self, named: Mapping[str, np.ndarray], i: int, cfg: config.WeightsConfig
  ) -> Tile:
    """A tile as it follows from the version before."""
    old, new = self._words[i], self.view.read(named, self.tiles[i])
    pre, post = self._digests[i].tobytes(), codec.digest(new)
    if pre == post:
      return Tile(codec.unchanged(new), pre[:8], post)
    encoded = codec.encode(
        old,
        new,
        codec=codec.DELTAS[cfg.codec],
        itemsize=self.view.itemsize(self.tiles[i]),
        raw_above=cfg.raw_above_changed_fraction,
    )
    if encoded.changed <= _MOST_KEPT * new.size and encoded.steps is not None:
      self._fresh[i] = encoded.steps
    return Tile(encoded._replace(steps=None), pre[:8], post)

  def skip_tile(
      self, named: Mapping[str, np.ndarray], i: int, cfg: config.WeightsConfig
  ) -> Tile:
    """A tile as it follows from `origin`; `delta_tile(i)` comes first."""
    new = self.view.read(named, self.tiles[i])
    pre, post = self._origin_digests[i].tobytes(), codec.digest(new)
    if pre == post:
      return Tile(codec.unchanged(new), pre[:8], post)
    lost = post != self._digests[i].tobytes() and i not in self._fresh
    if lost or new.dtype != np.uint16:
      # It changed too much, or its type has no steps; few and small are those.
      encoded = codec.encode(
          None, new, itemsize=self.view.itemsize(self.tiles[i])
      )
      return Tile(encoded, pre[:8], post)
    parts = [v[i] for v in (*self._window, self._fresh) if i in v]
    old = ulp_steps.undo(new, ulp_steps.compose(parts, new.size))
    # Whoever is far behind has more to fetch than to compute.
    raw_above = cfg.raw_above_changed_fraction
    encoded = codec.encode(old, new, codec=codec.F, raw_above=raw_above)
    return Tile(encoded, pre[:8], post)

  def advance(
      self,
      named: Mapping[str, np.ndarray],
      posts: np.ndarray,
      *,
      new_origin: records.Link | None,
  ) -> None:
    """Takes over a version that has been published.

    Args:
      named: its arrays.
      posts: its digests [tiles 16], of this writer's tiles.
      new_origin: the version itself if skip deltas are to start from it.
    """

    def take_over(i: int) -> None:
      new = self.view.read(named, self.tiles[i])
      where = self._fresh[i].where if i in self._fresh else slice(None)
      self._words[i][where] = new[where]

    moved = np.flatnonzero((posts != self._digests).any(axis=1)).tolist()
    collections.deque(parallel.ordered(take_over, moved), maxlen=0)
    floats = [i for i in moved if self._words[i].dtype == np.uint16]
    self._digests = posts.copy()
    self._window.append(self._fresh)
    self._kept += sum(s.where.size for s in self._fresh.values())
    if self._kept > _MOST_KEPT * self._values or {*floats} - {*self._fresh}:
      self.origin = None  # steps of the window are missing, or too many
    if new_origin is not None:
      self.origin, self._origin_digests = new_origin, self._digests
    if new_origin is not None or self.origin is None:
      self._window, self._kept = [], 0
    self._fresh = {}

  def forget_draft(self) -> None:
    """Drops what a version left that was not published."""
    self._fresh = {}


def digests(
    view: layout.View, named: Mapping[str, np.ndarray], tiles: Sequence[int]
) -> np.ndarray:
  """Digests of some tiles, uint8 [tiles 16]."""
  out = [codec.digest(view.read(named, t)) for t in tiles]
  return np.frombuffer(b''.join(out), np.uint8).reshape(-1, 16)
