"""What `inspect weights` prints: the versions of a store, and what changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import math
import os
import pathlib
from typing import NamedTuple

import numpy as np
from rich import table as rich_table

from composer_jax.dashboard import plots
from composer_jax.inspect import tables
from composer_jax.weights import codec
from composer_jax.weights import follow
from composer_jax.weights import layout
from composer_jax.weights import records
from composer_jax.weights import store as store_lib
from composer_jax.weights import ulp_steps

# Upper ends of the classes of step sizes; the last has all larger ones.
_SIZES = (1, 2, 4, 8, 16, 64)


class Change(NamedTuple):
  """What became of one array between two versions."""

  name: str
  values: int
  changed: int
  sizes: tuple[int, ...]  # of the steps, by class; empty but for 2-byte floats


def _codec_mix(rows) -> str:
  """Share of the tiles by how they travel."""
  names = [
      codec.NAMES.get(int(r['codec']), f'#{r["codec"]}')
      if r['length']
      else 'same'
      for r in rows
  ]
  parts = (f'{k} {names.count(k) / len(names):.0%}' for k in sorted({*names}))
  return ', '.join(parts)


def _replay(
    store: store_lib.Store,
    manifest: records.Manifest,
    edge: records.Edge,
    named: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
  """Applies an edge in place, deriving every digest it claims once more.

  Returns:
    `named`.

  Raises:
    StoreError: a digest, or the root of them all, differs.
  """
  table, rows = manifest.table, store.index(edge, manifest.table)
  for row, payload in store.payloads(edge, rows):
    tile = int(row['tile'])
    old = table.read(named, tile)
    if (
        edge.origin is not None
        and codec.digest(old)[:8] != row['pre'].tobytes()
    ):
      raise records.StoreError(f'{edge.name}: tile {tile} starts elsewhere')
    new = codec.apply(int(row['codec']), payload, old)
    if codec.digest(new) != row['post'].tobytes():
      raise records.StoreError(f'{edge.name}: tile {tile} ends elsewhere')
    table.write(named, tile, new)
  if table.root(codec.digests(named, table)) != manifest.root:
    raise records.StoreError(f'version {manifest.version}: wrong root')
  return named


def _verify(
    store: store_lib.Store,
    m: records.Manifest,
    before: dict[str, np.ndarray] | None,
    origin: dict[str, np.ndarray] | None,
) -> dict[str, np.ndarray] | None:
  """Rebuilds a version on every way that is kept."""
  ways = []
  if m.base is not None:
    ways.append(_replay(store, m, m.base, m.table.empty()))
  if m.skip is not None and origin is not None:
    copy = {name: a.copy() for name, a in origin.items()}
    ways.append(_replay(store, m, m.skip, copy))
  if m.delta is not None and before is not None:
    ways.append(_replay(store, m, m.delta, before))
  return ways[-1] if ways else None


def _open(url: str) -> tuple[store_lib.Store, records.Link]:
  if '://' not in url and not url.startswith('{'):
    url = pathlib.Path(url).absolute().as_uri()
  store = store_lib.Store(url)
  link, _ = store.latest()
  if link is None:
    raise ValueError(f'store={url}: no published weights here')
  return store, link


def versions(
    url: str,
    verify: bool = False,
    track: Callable[[list], Iterable] = iter,
) -> rich_table.Table:
  """Every kept version of a store, oldest first, and what it cost.

  Args:
    url: prefix of the store; a plain path is a directory.
    verify: rebuilds every version and derives every digest once more.
    track: wraps the list of versions to show how far one is.

  Raises:
    ValueError: nothing was published there.
    StoreError: an object is missing or damaged.
  """
  store, link = _open(url)
  out = tables.grid(
      f'{store.url}, bits and ratio without bases',
      *('version', 'step', 'parent', 'changed', 'bytes', 'ratio'),
      *('bits/changed', 'tiles', 'root'),
      *(['verified'] if verify else []),
  )
  named = origin = None
  for _, m in track([*store.history(link)][::-1]):
    verified = []
    if verify:
      named = _verify(store, m, named, origin)
      verified = ['ok' if named is not None else 'needs older ones']
      if m.base is not None or m.skip is not None:  # where a skip may start
        origin = named and {name: a.copy() for name, a in named.items()}
    out.add_row(*_version(store, m), *verified)
  return out


def _version(store: store_lib.Store, m: records.Manifest) -> list[str]:
  """The cells of one version."""
  elements = sum(math.prod(p.shape) for p in m.table.params)
  full = sum(
      math.prod(p.shape) * layout.dtype(p.dtype).itemsize
      for p in m.table.params
  )
  edge = m.delta or m.base
  size = f'{edge.nbytes:,}'
  if m.skip:
    size += f' + skip {m.skip.nbytes:,}'
  if m.delta and m.base:
    size += f' + base {m.base.nbytes:,}'
  bits = f'{8 * edge.nbytes / m.changed:.2f}' if m.delta and m.changed else '-'
  return [
      str(m.version),
      str(m.step),
      '-' if m.parent is None else str(m.parent.version),
      f'{m.changed / max(elements, 1):.2%}' if m.delta else 'base',
      size,
      f'{full / max(edge.nbytes, 1):.1f}',
      bits,
      _codec_mix(store.index(edge, m.table)),
      m.root[:12],
  ]


def changes(url: str, first: int, second: int) -> list[Change]:
  """What became of every array between two kept versions.

  Raises:
    ValueError: nothing was published there.
    FollowError: a version is not kept, or is damaged.
  """
  store, _ = _open(url)
  follower = follow.Follower(store.url, store=store)
  old, new = follower.fetch(first), follower.fetch(second)
  return [
      _change(name, old[name], a)
      for name, a in sorted(new.items())
      if name in old
      and (old[name].dtype, old[name].shape) == (a.dtype, a.shape)
  ]


def _change(name: str, old: np.ndarray, new: np.ndarray) -> Change:
  words = [
      np.ascontiguousarray(a).reshape(-1).view(np.uint8).reshape(a.size, -1)
      for a in (old, new)
  ]
  if new.itemsize != 2:
    changed = int((words[0] != words[1]).any(axis=1).sum())
    return Change(name, new.size, changed, ())
  found = ulp_steps.between(*(w.reshape(-1).view(np.uint16) for w in words))
  sizes = np.abs(found.step.view(np.int16).astype(np.int32))
  classes = np.searchsorted(_SIZES, sizes)
  count = np.bincount(classes, minlength=len(_SIZES) + 1)
  return Change(name, new.size, found.where.size, tuple(count.tolist()))


def _labels() -> list[str]:
  low = [1, *(s + 1 for s in _SIZES)]
  ranges = [
      str(a) if a == b else f'{a}-{b}'
      for a, b in zip(low, _SIZES, strict=False)
  ]
  return [*ranges, f'>{_SIZES[-1]}']


def change_table(found: list[Change], title: str) -> rich_table.Table:
  """Changed fraction of every array, and how large its steps are."""
  columns = [f'{label} ulp' for label in _labels()]
  out = tables.grid(title, 'array', 'values', 'changed', *columns)
  for c in found:
    fraction = f'{c.changed / max(c.values, 1):.3%}'
    parts = [f'{n / c.changed:.1%}' if n else '-' for n in c.sizes]
    blank = ['-'] * (len(columns) - len(parts))
    out.add_row(c.name, f'{c.values:,}', fraction, *parts, *blank)
  return out


def change_plot(
    path: str | os.PathLike, found: list[Change], title: str
) -> None:
  """Draws the same: changed fraction of every array, then steps by size."""
  total = np.sum([c.sizes for c in found if c.sizes], axis=0)
  fractions = np.atleast_1d(total / max(np.sum(total), 1)).tolist()
  plots.bars(
      path,
      {
          f'{title}: changed values': {
              c.name: c.changed / max(c.values, 1) for c in found
          },
          # Nothing was counted where no array has 2-byte floats.
          'steps by size in ulp': dict(zip(_labels(), fractions, strict=False)),
      },
  )
