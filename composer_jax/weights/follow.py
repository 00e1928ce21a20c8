"""Follower: keeps a host's weights at the newest published version.

All of a chain is fetched, checked and decoded into fresh arrays before any
of it is handed out; whatever goes wrong, the old version stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import threading

import numpy as np

from composer_jax import trace
from composer_jax.weights import arena
from composer_jax.weights import codec
from composer_jax.weights import layout
from composer_jax.weights import parallel
from composer_jax.weights import records
from composer_jax.weights import retain
from composer_jax.weights import store as store_lib

_Path = list[tuple[records.Manifest, records.Edge]]


class FollowError(RuntimeError):
  """The version on offer was refused; the one before is still in place."""


class Follower:
  """One reader of a store; thread-safe.

  Attributes:
    version: what the host has; None before the first successful poll.
    digest_mismatches: tiles in memory that were neither what a delta starts
      from nor what it leads to, and were rebuilt from a base.
  """

  def __init__(
      self,
      url: str,
      *,
      boxes: Mapping[str, layout.Box] | None = None,
      host: str | None = None,
      store: store_lib.Store | None = None,
  ):
    """Opens a store to read.

    Args:
      url: prefix of the store.
      boxes: the part of every array that this host has (`layout.hull`); only
        its tiles are fetched. By default all of all arrays.
      host: a name under which the store keeps what this host is at, for as
        long as it goes on to newer versions.
      store: an opened store to use instead of `url`.
    """
    self._store = store or store_lib.Store(url)
    self._boxes = boxes
    self._host = host
    self._lock = threading.Lock()
    self._link = None
    self._generation = None
    self._named = None
    self._spare = arena.Spare()
    self.version: trace.WeightVersion | None = None
    self.digest_mismatches = 0

  def poll(
      self,
  ) -> tuple[trace.WeightVersion, dict[str, np.ndarray]] | None:
    """Fetches the newest version if it is a new one.

    Returns:
      The version and its arrays, or the boxes of them that this host has
      (read-only; they stay valid after later polls); None if there is nothing
      new.

    Raises:
      FollowError: a version is there but cannot be trusted or fetched.
    """
    with self._lock:
      try:
        return self._poll()
      except FollowError:
        raise
      except Exception as e:
        have = 'no version' if self._link is None else self._link.version
        raise FollowError(f'still at {have}: {type(e).__name__}: {e}') from e

  def fetch(self, step: int) -> dict[str, np.ndarray]:
    """Rebuilds a published version from its nearest base, root verified.

    Args:
      step: `WeightVersion.step` of the version.

    Raises:
      FollowError: it was never published, or cannot be rebuilt exactly.
    """
    try:
      link, _ = self._store.latest()
      for at, manifest in self._store.history(link):
        if at.version == step:
          return self._cut(manifest, self._build(self._from_base(manifest)))
        if at.version < step:
          break
    except Exception as e:
      raise FollowError(f'version {step}: {type(e).__name__}: {e}') from e
    raise FollowError(f'version {step}: was never published here')

  def _poll(self):
    link, generation = self._store.latest(self._generation)
    if link is None:
      if self._link is not None and generation != self._generation:
        raise FollowError(f'{self._store.url}LATEST: gone; restore it')
      return None
    have = self._link
    if link == have:
      self._generation = generation
      return None
    if have is not None and link.version <= have.version:
      raise FollowError(
          f'LATEST names version {link.version} ({link.root[:12]}) but this'
          f' host has {have.version} ({have.root[:12]}); versions only grow:'
          ' publish old weights as a new version, or restart this host'
      )
    named = self._advance(link)
    manifest = self._store.manifest(link)
    self._link, self._generation, self._named = link, generation, named
    self.version = records.weight_version(manifest)
    if self._host is not None:
      retain.lease(self._store, self._host, link.version)
    return self.version, self._cut(manifest, named)

  def _advance(self, link: records.Link) -> dict[str, np.ndarray]:
    """Takes the cheapest way; others only if an object on it is damaged."""
    failed = None
    for path in self._paths(link):
      try:
        return self._build(path)
      except records.StoreError as e:
        failed = failed or e
    raise failed or records.StoreError(f'version {link.version}: no base')

  def _paths(self, link: records.Link) -> Iterator[_Path]:
    """Ways to a version: over skips, over deltas, from a base."""
    if self._link is not None:
      for skips in (True, False):
        try:
          path = self._from_here(link, skips)
        except records.StoreError:  # a manifest on the way
          continue
        if path is None:
          break
        yield path
    yield self._from_base(self._store.manifest(link))

  def _from_here(self, link: records.Link, skips: bool) -> _Path | None:
    """Deltas from this host's version; None if a base is the better way."""
    path, cost, cost_base = [], 0, None
    at, have = link, self._link
    while at != have:
      if at.version <= have.version:
        raise FollowError(
            f'version {link.version} does not descend from version'
            f' {have.version} of this host: the history has forked;'
            ' restart this host to join the new one'
        )
      manifest = self._store.manifest(at)
      if manifest.base is not None and cost_base is None:
        cost_base = cost + manifest.base.nbytes
      edge = manifest.delta
      far = manifest.skip
      if skips and far is not None and far.origin.version >= have.version:
        edge = far
      if edge is None:
        return None
      path.append((manifest, edge))
      cost += edge.nbytes
      if cost_base is not None and cost > cost_base:
        return None
      at = edge.origin
    return path[::-1]

  def _from_base(self, target: records.Manifest) -> _Path:
    """The nearest base and the deltas after it, skips where there are."""
    path = []
    at = target
    while at.base is None:
      edge = at.skip or at.delta
      path.append((at, edge))
      at = self._store.manifest(edge.origin)
    return [(at, at.base), *path[::-1]]

  def _view(self, table: layout.Table) -> layout.View:
    """The tiles that this host reads."""
    if self._boxes is None:
      return layout.whole(table)
    return layout.View.covering(table, self._boxes)

  def _cut(
      self, manifest: records.Manifest, named: dict[str, np.ndarray]
  ) -> dict[str, np.ndarray]:
    """The boxes of this host, out of arrays of whole tiles."""
    if self._boxes is None:
      return dict(named)
    grown = self._view(manifest.table).boxes
    return {
        name: a[layout.inside(self._boxes[name], grown[name])]
        for name, a in named.items()
    }

  def _build(self, path: _Path) -> dict[str, np.ndarray]:
    """Fresh arrays at the end of a path from a base or this host's version."""
    target = path[-1][0]
    view = self._view(target.table)
    named = self._spare.lend(view.empty())
    before = self._named  # where the first deltas start; then they go on here
    for manifest, edge in path:
      rows = self._store.index(edge, manifest.table)
      if manifest.table.root(rows['post']) != manifest.root:
        raise records.StoreError(
            f'version {manifest.version}: tiles do not add up to its root;'
            ' damaged'
        )
      strange = self._apply(view, edge, rows[view.held], before, named)
      before = named
      if strange:
        self._repair(manifest, view, strange, named)
        for i in strange:
          _check(view.read(named, i), rows[i], edge)
    for a in named.values():
      a.flags.writeable = False
    return named

  def _apply(
      self,
      view: layout.View,
      edge: records.Edge,
      rows: np.ndarray,
      before: dict[str, np.ndarray] | None,
      named: dict[str, np.ndarray],
  ) -> Sequence[int]:
    """Applies an edge to `before`; returns tiles that it does not fit.

    All tiles but those are then in `named`, which may be `before` itself.
    """

    def apply(found: tuple[np.void, memoryview]) -> int | None:
      row, payload = found
      tile, post = int(row['tile']), row['post'].tobytes()
      old = None
      if edge.origin is not None:
        old = view.read(before, tile)
        now = codec.digest(old)
        if now == post:  # a repeated delta, or an unchanged tile
          if before is not named:
            view.write(named, tile, old)
          return None
        if now[:8] != row['pre'].tobytes():
          return tile
      out = (
          old
          if old is None
          else parallel.scratch(f'tile {old.dtype}', old.size, old.dtype)
      )
      new = codec.apply(int(row['codec']), payload, old, view.word(tile), out)
      _check(new, row, edge)
      view.write(named, tile, new)
      return None

    results = parallel.ordered(apply, self._store.payloads(edge, rows))
    return [tile for tile in results if tile is not None]

  def _repair(
      self,
      manifest: records.Manifest,
      view: layout.View,
      tiles: Sequence[int],
      named: dict[str, np.ndarray],
  ) -> None:
    """Rebuilds single tiles from the nearest base, as of `manifest`."""
    self.digest_mismatches += len(tiles)
    for step, edge in self._from_base(manifest):
      rows = self._store.index(edge, step.table)[np.asarray(tiles)]
      if self._apply(view, edge, rows, named, named):
        raise records.StoreError(
            f'{edge.name}: does not continue the version before it'
        )


def _check(words: np.ndarray, row: np.void, edge: records.Edge) -> None:
  if codec.digest(words) != row['post'].tobytes():
    raise records.StoreError(
        f'{edge.name}: tile {row["tile"]} decodes to something else than was'
        ' published; publish a fresh base'
    )
