"""Publisher: writes versions so that a reader sees all of one or none of it.

Order of writes: segments, index, manifest, then compare-and-swap of LATEST.
Until the swap wins nothing refers to the new objects, whose names hold a
nonce, so a publisher may die or lose anywhere and only leaves garbage. Several
processes each write their own tiles; process 0 checks that no tile is missing
and moves LATEST for all.
"""

from __future__ import annotations

from collections.abc import Mapping
import collections
from concurrent import futures
import dataclasses
import logging
import math
import time
from typing import Any
import uuid

import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.weights import layout
from composer_jax.weights import records
from composer_jax.weights import rendezvous
from composer_jax.weights import retain
from composer_jax.weights import segment_writer
from composer_jax.weights import snapshot as snapshot_lib
from composer_jax.weights import store as store_lib


class Conflict(RuntimeError):
  """Another trainer has published; this one must stop."""


@dataclasses.dataclass(frozen=True)
class Published:
  """What one publish wrote.

  Attributes:
    version: its number is the optimizer step, or larger after a restart from
      a checkpoint older than the last published version.
    bytes: all of the delta with its index; of the base if there is no delta.
    base_bytes: bytes of the base, 0 if this version has none.
    skip_bytes: bytes of the delta over several versions, 0 if there is none.
    full_bytes: bytes of the arrays themselves.
    elements: values in the arrays.
    changed: values that differ from the parent version.
    seconds: time from the first comparison to the swap of LATEST.
  """

  version: trace.WeightVersion
  bytes: int
  base_bytes: int
  skip_bytes: int
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


@dataclasses.dataclass(frozen=True)
class Writers:
  """Several processes that publish together.

  Attributes:
    index: which of them this one is; 0 moves LATEST.
    boxes: what each process has of every array (`layout.hull`).
    arrays: name -> anything with the shape and dtype of the whole array.
    patience_seconds: how long to wait for each other.
  """

  index: int
  boxes: tuple[Mapping[str, layout.Box], ...]
  arrays: Mapping[str, Any]
  patience_seconds: float = 120.0


class Publisher:
  """A writer of a store. Not thread-safe; see `BackgroundPublisher`."""

  def __init__(
      self,
      url: str,
      cfg: config.WeightsConfig,
      incarnation: str,
      *,
      writers: Writers | None = None,
      store: store_lib.Store | None = None,
  ):
    """Opens the store and checks that it can arbitrate between writers.

    Args:
      url: prefix of the store.
      cfg: tile size, spacing of bases and skips, when deltas are given up.
      incarnation: names this run of the trainer, the same in all processes.
      writers: the processes of this trainer, if there are several; `named`
        is then the boxes that this process has.
      store: an opened store to use instead of `url`.
    """
    self._store = store or store_lib.Store(url)
    self._cfg = cfg
    self._incarnation = incarnation
    self._writers = writers
    self._me = writers.index if writers else 0
    self._rounds = rendezvous.Rounds(
        self._store,
        incarnation,
        self._me,
        len(writers.boxes) if writers else 1,
        writers.patience_seconds if writers else 0.0,
    )
    self._store.probe()
    self._link, self._generation = self._store.latest()
    self._last = self._link and self._store.manifest(self._link)
    self._unsure = False  # whether the last publish moved LATEST
    self._snapshot: snapshot_lib.Snapshot | None = None

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
      view, owner = self._layout(named)
      mine = np.flatnonzero(owner == self._me)
      found = snapshot_lib.digests(view, named, mine)
      self._rounds.next_call()
      all_found = np.empty((owner.size, 16), np.uint8)
      record = {'digests': found.tobytes().hex()}
      for i, r in enumerate(self._rounds.gather('resume', record)):
        data = np.frombuffer(bytes.fromhex(r['digests']), np.uint8)
        all_found[owner == i] = data.reshape(-1, 16)
      if view.root(all_found) == self._link.root:
        self._snapshot = snapshot_lib.Snapshot(view, mine, named, found)
        return records.weight_version(self._last)
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
    view, owner = self._layout(named)
    mine = np.flatnonzero(owner == self._me)
    parent, snapshot = self._link, self._snapshot
    version = step if parent is None else max(step, parent.version + 1)
    since = 0 if parent is None else self._last.since_base + 1
    every = self._cfg.skip_every_versions
    warm = snapshot is not None and snapshot.view == view
    origin = snapshot.origin if warm and since % every == 0 else None
    plans = self._rounds.gather(
        'plan',
        {
            'version': [step, parent and parent.manifest.sha256],
            'warm': warm,
            'origin': origin and origin.manifest.sha256,
        },
    )
    if any(p['version'] != plans[0]['version'] for p in plans):
      raise Conflict(f'writers disagree on what to publish: {plans}; stop all')
    warm = all(p['warm'] for p in plans)
    if any(p['origin'] != plans[0]['origin'] for p in plans):
      origin = None
    rebase = not warm or since >= self._cfg.base_every_versions

    nonce = f'{uuid.uuid4().hex[:12]}.{self._me}'
    wanted = {}  # edge -> (key, where it starts, how to encode tile i)
    if warm:
      snapshot.forget_draft()
      wanted['delta'] = (
          f'd/{parent.version}-{version}/{nonce}',
          parent,
          lambda i: snapshot.delta_tile(named, i, self._cfg),
      )
    if warm and origin is not None:
      wanted['skip'] = (
          f'd/{origin.version}-{version}/{nonce}',
          origin,
          lambda i: snapshot.skip_tile(named, i, self._cfg),
      )
    if rebase:
      wanted['base'] = (
          f'base/{version}/{nonce}',
          None,
          lambda i: snapshot_lib.base_tile(view, named, mine[i]),
      )
    parts, rows = {}, None
    for kind, (prefix, _, encode) in wanted.items():
      parts[kind], written = segment_writer.write(
          self._store, prefix, mine, encode
      )
      rows = written if rows is None else rows
    met = self._rounds.gather(
        'parts', {k: dataclasses.asdict(p) for k, p in parts.items()}
    )
    edges = {
        kind: records.Edge(start, tuple(records.part(m[kind]) for m in met))
        for kind, (_, start, _) in wanted.items()
    }
    self._unsure = True
    manifest = records.Manifest(
        version=version,
        step=step,
        root='',
        incarnation=self._incarnation,
        parent=parent,
        since_base=0 if rebase else since,
        changed=0,
        table=layout.Table(view.params),
        delta=edges.get('delta'),
        skip=edges.get('skip'),
        base=edges.get('base'),
    )
    self._move_latest(manifest, rows if len(met) == 1 else None)
    # Only now have receivers got these bytes: a snapshot that ran ahead of
    # them would make every later delta wrong.
    link, manifest = self._link, self._last
    if snapshot is None or snapshot.view != view:
      snapshot = snapshot_lib.Snapshot(view, mine, named, rows['post'])
    snapshot.advance(
        named,
        rows['post'],
        new_origin=link if manifest.since_base % every == 0 else None,
    )
    self._snapshot, self._unsure = snapshot, False
    if rebase and self._me == 0:
      self._collect()
    sizes = {kind: edge.nbytes for kind, edge in edges.items()}
    return Published(
        version=records.weight_version(manifest),
        bytes=sizes.get('delta', sizes.get('base')) + link.manifest.length,
        base_bytes=sizes.get('base', 0),
        skip_bytes=sizes.get('skip', 0),
        full_bytes=sum(
            math.prod(p.shape) * view.itemsizes[p.name] for p in view.params
        ),
        elements=sum(math.prod(p.shape) for p in view.params),
        changed=manifest.changed,
        seconds=time.perf_counter() - begin,
    )

  def _collect(self) -> None:
    """Removes old objects; trouble with that is no trouble of the version."""
    try:
      retain.collect(self._store, self._link, self._cfg.keep_bases)
    except (OSError, ValueError) as e:
      logging.warning('old weights stay until the next base: %s', e)

  def _layout(self, named) -> tuple[layout.View, np.ndarray]:
    """What this process has, and the owner of every tile."""
    arrays = self._writers.arrays if self._writers else named
    boxes = self._writers.boxes if self._writers else ()
    table = layout.Table.of(arrays, self._cfg.tile_elements, boxes)
    if not boxes:
      return layout.whole(table), np.zeros(len(table.tiles), np.int64)
    views = [layout.View(table.params, b) for b in boxes]
    return views[self._me], layout.owners(views)

  def _settle(self) -> None:
    """Finds out, after a publish of unknown end, whether it won after all.

    If so the snapshot is behind, and the next version has to be a base.
    """
    self._rounds.next_call()
    if self._unsure:
      link, generation = self._store.latest()
      if link is not None and link != self._link:
        manifest = self._store.manifest(link)
        ours = manifest.incarnation == self._incarnation
        if ours and manifest.parent == self._link:
          self._link, self._last = link, manifest
          self._generation, self._snapshot = generation, None
      self._unsure = False

  def _move_latest(
      self, manifest: records.Manifest, rows: np.ndarray | None
  ) -> None:
    """Writer 0 completes the manifest and swaps LATEST; the others wait."""
    verdict = {}
    if self._me == 0:
      if rows is None:  # other writers' tiles: each must be there, once
        edges = [e for e in (manifest.delta, manifest.base, manifest.skip) if e]
        rows = [self._store.index(e, manifest.table) for e in edges][0]
      manifest = dataclasses.replace(
          manifest,
          root=manifest.table.root(rows['post']),
          changed=int(rows['changed'].sum()),
      )
      key = f'm/{manifest.version}.{uuid.uuid4().hex[:12]}.json'
      blob = self._store.put(key, manifest.to_bytes())
      link = records.Link(manifest.version, manifest.root, blob)
      generation = self._store.advance(
          link, self._incarnation, self._generation
      )
      if generation:
        self._generation = generation
        verdict = dataclasses.asdict(link)
    verdict = self._rounds.gather('verdict', verdict)[0]
    if not verdict:
      self._unsure = False
      raise Conflict(
          f'{self._store.url}LATEST: moved by another trainer while'
          f' {self._incarnation!r} published version {manifest.version}; stop'
          ' this one'
      )
    self._link = records.link(verdict)
    self._last = self._store.manifest(self._link) if self._me else manifest


def _host(named: Mapping[str, Any]) -> dict[str, np.ndarray]:
  return {name: np.asarray(a) for name, a in named.items()}


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
