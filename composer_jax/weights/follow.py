"""Follower: keeps a host's weights at the newest published version.

All of a chain is fetched, checked and decoded into fresh arrays before any
of it is handed out; whatever goes wrong, the old version stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
import threading

import numpy as np

from composer_jax import trace
from composer_jax.weights import codec
from composer_jax.weights import layout
from composer_jax.weights import store as store_lib

_Path = list[tuple[store_lib.Manifest, store_lib.Edge]]


class FollowError(RuntimeError):
  """The version on offer was refused; the one before is still in place."""


class Follower:
  """One reader of a store; thread-safe.

  Attributes:
    version: what the host has; None before the first successful poll.
    digest_mismatches: tiles in memory that were neither what a delta starts
      from nor what it leads to, and were rebuilt from a base.
  """

  def __init__(self, url: str, *, store: store_lib.Store | None = None):
    self._store = store or store_lib.Store(url)
    self._lock = threading.Lock()
    self._link = None
    self._generation = None
    self._named = None
    self.version: trace.WeightVersion | None = None
    self.digest_mismatches = 0

  def poll(
      self,
  ) -> tuple[trace.WeightVersion, dict[str, np.ndarray]] | None:
    """Fetches the newest version if it is a new one.

    Returns:
      The version and its arrays (read-only; they stay valid after later
      polls), or None if there is nothing new.

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
          return self._build(self._from_base(manifest), None)
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
    self._link, self._generation, self._named = link, generation, named
    self.version = store_lib.weight_version(self._store.manifest(link))
    return self.version, dict(named)

  def _advance(self, link: store_lib.Link) -> dict[str, np.ndarray]:
    """Takes the deltas, or a base if that is less to fetch or they fail."""
    target = self._store.manifest(link)
    try:
      deltas = self._from_here(link)
      if deltas is None:
        return self._build(self._from_base(target), None)
      return self._build(deltas, self._named)
    except store_lib.StoreError:
      rescue = self._from_base(target)
      if self._link is None or rescue[0][0].version <= self._link.version:
        raise  # that path holds the same damaged object
      return self._build(rescue, None)

  def _from_here(self, link: store_lib.Link) -> _Path | None:
    """Deltas from this host's version; None if a base is the better way."""
    if self._link is None:
      return None
    path, cost, cost_base = [], 0, None
    for at, manifest in self._store.history(link):
      if at == self._link:
        return path[::-1]
      if at.version <= self._link.version:
        raise FollowError(
            f'version {link.version} does not descend from version'
            f' {self._link.version} of this host: the history has forked;'
            ' restart this host to join the new one'
        )
      if manifest.base is not None and cost_base is None:
        cost_base = cost + manifest.base.nbytes
      if manifest.delta is None:
        return None
      path.append((manifest, manifest.delta))
      cost += manifest.delta.nbytes
      if cost_base is not None and cost > cost_base:
        return None
    raise FollowError(
        f'version {link.version} does not descend from version'
        f' {self._link.version} of this host; restart this host to join it'
    )

  def _from_base(self, target: store_lib.Manifest) -> _Path:
    """The nearest base and the deltas after it."""
    path = []
    at = target
    while at.base is None:
      path.append((at, at.delta))
      at = self._store.manifest(at.parent)
    return [(at, at.base), *path[::-1]]

  def _build(self, path: _Path, named) -> dict[str, np.ndarray]:
    """Fresh arrays at the end of a path that starts at `named` or a base."""
    target = path[-1][0]
    if named is None:
      named = target.table.empty()
    else:
      named = {name: a.copy() for name, a in named.items()}
    for manifest, edge in path:
      rows = self._store.index(edge, manifest.table)
      strange = self._apply(manifest.table, edge, rows, named)
      if strange:
        self._repair(manifest, strange, named)
        for i in strange:
          _check(manifest.table.read(named, i), rows[i], edge)
    if target.table.root(rows['post']) != target.root:
      raise store_lib.StoreError(
          f'version {target.version}: tiles do not add up to its root; damaged'
      )
    for a in named.values():
      a.flags.writeable = False
    return named

  def _apply(
      self,
      table: layout.Table,
      edge: store_lib.Edge,
      rows: np.ndarray,
      named: dict[str, np.ndarray],
  ) -> Sequence[int]:
    """Applies an edge in place; returns tiles that it does not fit."""
    strange = []
    for row, payload in self._store.payloads(edge, rows):
      tile, post = int(row['tile']), row['post'].tobytes()
      old = table.read(named, tile)
      if not edge.base:
        now = codec.digest(old)
        if now == post:  # a repeated delta, or an unchanged tile
          continue
        if now != row['pre'].tobytes():
          strange.append(tile)
          continue
      new = codec.apply(int(row['codec']), payload, old)
      _check(new, row, edge)
      table.write(named, tile, new)
    return strange

  def _repair(
      self,
      manifest: store_lib.Manifest,
      tiles: Sequence[int],
      named: dict[str, np.ndarray],
  ) -> None:
    """Rebuilds single tiles from the nearest base, as of `manifest`."""
    self.digest_mismatches += len(tiles)
    for step, edge in self._from_base(manifest):
      rows = self._store.index(edge, step.table)[np.asarray(tiles)]
      if self._apply(step.table, edge, rows, named):
        raise store_lib.StoreError(
            f'{edge.index.key}: does not continue the version before it'
        )


def _check(words: np.ndarray, row: np.void, edge: store_lib.Edge) -> None:
  if codec.digest(words) != row['post'].tobytes():
    raise store_lib.StoreError(
        f'{edge.index.key}: tile {row["tile"]} decodes to something else than'
        ' was published; publish a fresh base'
    )
