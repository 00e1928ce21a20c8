"""Removal of what nobody needs any more, and leases on what somebody does.

Kept are the last bases and all versions since, further back if a host has a
lease there. What else lies in the store is condemned by one collection and
removed by a later one, so a reader has as long as a base lives to finish, and
nothing here depends on a clock. A lease ends when its host has not renewed it
between two collections that came after one another.
"""

from __future__ import annotations

import json
import uuid

from composer_jax.weights import records
from composer_jax.weights import store as store_lib

_KINDS = ('m/', 'd/', 'base/')


def lease(store: store_lib.Store, host: str, version: int) -> None:
  """Keeps a version, and what it is built from, as long as it is renewed."""
  value = {'version': version, 'nonce': uuid.uuid4().hex}
  store.put(f'lease/{host}', json.dumps(value).encode())


def collect(
    store: store_lib.Store, latest: records.Link, keep_bases: int
) -> list[str]:
  """Removes what the collection before has condemned, if still unneeded.

  Args:
    store: store whose only publisher calls this.
    latest: its newest version.
    keep_bases: how many versions with a base stay, the newest ones.

  Returns:
    The keys that were removed; none as long as a manifest is damaged.
  """
  state, data, _ = store.read(store_lib.HORIZON)
  before = {'horizon': 0, 'condemned': [], 'leases': {}}
  if state == 'value':
    before = json.loads(data)
  leases = {key: json.loads(store.read(key)[1]) for key in store.keys('lease/')}
  dead = [k for k, v in leases.items() if before['leases'].get(k) == v]
  pinned = [v['version'] for k, v in leases.items() if k not in dead]
  try:
    horizon, kept = _kept(store, latest, keep_bases, pinned)
  except records.StoreError:
    return []
  present = {key for kind in _KINDS for key in store.keys(kind)}
  condemned = present - kept if horizon is not None else set()
  removed = sorted(condemned & set(before['condemned']), key=_order)
  state = {
      'horizon': horizon if condemned else before['horizon'],
      'condemned': sorted(condemned - set(removed)),
      'leases': {k: v for k, v in leases.items() if k not in dead},
  }
  if state == before:
    return []
  store.put(store_lib.HORIZON, json.dumps(state, sort_keys=True).encode())
  # The horizon is out already: a reader that meets a gap finds why.
  for key in removed + dead:
    store.delete(key)
  return removed


def _kept(
    store: store_lib.Store,
    latest: records.Link,
    keep_bases: int,
    pinned: list[int],
) -> tuple[int | None, set[str]]:
  """The oldest version to keep, None if all, and the keys of those kept."""
  kept, bases = set(), 0
  for link, manifest in store.history(latest):
    kept |= {link.manifest.key, *(b.key for b in manifest.blobs())}
    if manifest.base is not None:
      bases += 1
      if bases >= keep_bases and link.version <= min(pinned + [link.version]):
        return link.version, kept
  return None, kept


def _order(key: str) -> tuple[int, str]:
  """Manifests first, then indices, then segments."""
  return (0 if key.startswith('m/') else 1 if key.endswith('.idx') else 2, key)
