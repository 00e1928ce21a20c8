"""Pages of a lane's slots: the page table, and what may be found again.

A page of prompt or sample is published under two keys: with the routes as the
request recorded them (blank where it let the router choose), which the same
request finds again, and with the routes in use, which the next turn of the
session finds. Both start from the digest of the weights, so pages never serve
other weights than those that filled them; a sequence that has seen a swap
publishes nothing more.
"""

from __future__ import annotations

import numpy as np

from composer_jax.rollout import pages as pages_lib
from kernels_triton import contract

_SIZE = contract.KEY_BLOCK


def count(tokens: int) -> int:
  """Pages that hold so many tokens."""
  return -(-tokens // _SIZE)


class SlotCache:
  """Which slot holds which pages.

  Attributes:
    pool: pages of the lane.
    table: i32 [N W], for the device; `pool.count` where there is no page.
    held: i32 [N], pages of each slot.
  """

  def __init__(self, slots: int, width: int, pages: int, root: bytes) -> None:
    self.pool = pages_lib.PagePool(pages)
    self.table = np.full((slots, width), pages, np.int32)
    self.held = np.zeros(slots, np.int32)
    self._root = root
    # Of pages that were published (or tried): their number, and the two keys
    # of the last one. A stale slot never publishes again.
    self._published = np.zeros(slots, np.int32)
    self._keys = [(root, root)] * slots
    self._stale = np.ones(slots, bool)

  def pages(self, slot: int) -> list[int]:
    return self.table[slot, : self.held[slot]].tolist()

  def give(self, slot: int, pages: list[int]) -> None:
    """Appends pages that are already held for the slot."""
    n = self.held[slot]
    self.table[slot, n : n + len(pages)] = pages
    self.held[slot] += len(pages)

  def drop(self, slot: int) -> None:
    """Gives up all pages of the slot."""
    self.pool.drop(self.pages(slot))
    self.table[slot] = self.pool.count
    self.held[slot] = 0

  def start(self, slot: int) -> None:
    """A new sequence begins in the slot, with the weights in use."""
    self._published[slot], self._stale[slot] = 0, False
    self._keys[slot] = self._root, self._root

  def follow(self, slot: int, leader: int) -> None:
    """The slot's sequence equals the leader's as far as it is published."""
    self._published[slot] = self._published[leader]
    self._keys[slot] = self._keys[leader]

  def exchange(self, a: int, b: int) -> None:
    """The two slots change pages."""
    pair = [a, b]
    self.table[pair], self.held[pair] = (
        self.table[pair[::-1]],
        self.held[[b, a]],
    )

  def find(self, tokens: np.ndarray, routing: np.ndarray) -> list[int]:
    """Pages with the longest known prefix of whole pages.

    Args:
      tokens: i32 [T].
      routing: [T L K] as recorded, blank where it is not.
    """

    def keys():
      key = self._root
      for end in range(_SIZE, len(tokens) + 1, _SIZE):
        span = slice(end - _SIZE, end)
        key = pages_lib.chain(
            key, tokens[span].tobytes(), routing[span].tobytes()
        )
        yield key

    return self.pool.find(keys())

  def grown(self, slots: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Those of `slots` that have a full page to publish; stored i32 [n]."""
    more = stored // _SIZE > self._published[slots]
    return slots[more & ~self._stale[slots]]

  def unpublished(self, slot: int) -> int:
    """First token of the first page that `publish` has not seen."""
    return int(self._published[slot]) * _SIZE

  def publish(
      self, slot: int, tokens: np.ndarray, asked: np.ndarray, used: np.ndarray
  ) -> None:
    """Publishes full pages.

    Args:
      slot: slot whose pages they are.
      tokens: i32 [T], what is stored from `unpublished` on.
      asked: [T L K], routes as recorded.
      used: [T L K], routes in use.
    """
    pages = self.pages(slot)
    for start in range(0, len(tokens) - _SIZE + 1, _SIZE):
      span = slice(start, start + _SIZE)
      self._keys[slot] = tuple(
          pages_lib.chain(key, tokens[span].tobytes(), rows[span].tobytes())
          for key, rows in zip(self._keys[slot], (asked, used), strict=True)
      )
      page = pages[self._published[slot]]
      self.pool.publish(page, self._keys[slot], used[span].copy())
      self._published[slot] += 1

  def forget(self, root: bytes) -> None:
    """Lets other weights fill the pages from now on."""
    self.pool.forget()
    self._root = root
    self._stale[:] = True
