"""Who holds which page of the key-value cache, and whose content can be found.

Bookkeeping only: a page is a number. A full page may be published under keys
that say all its content depends on: weights, tokens and routes up to its end.
It stays findable after its last holder is gone, until the room is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import hashlib
from typing import Any


def chain(key: bytes, *content: bytes) -> bytes:
  """Key of a page, from that of the page before it and what it holds.

  Args:
    key: key of the page before; of the weights for the first one.
    *content: bytes of fixed sizes.
  """
  return hashlib.blake2b(b''.join((key, *content)), digest_size=16).digest()


class PagePool:
  """A fixed number of pages, counted references, least recently used out.

  Every page is exactly one of: free, held, idle (published but not held).
  """

  def __init__(self, count: int) -> None:
    self.count = count
    self._free = list(range(count))[::-1]
    self._holders: dict[int, int] = {}
    self._idle: dict[int, None] = {}  # longest idle first
    self._found: dict[bytes, int] = {}
    self._published: dict[int, tuple[list[bytes], Any]] = {}

  @property
  def available(self) -> int:
    """Pages that `take` could give."""
    return len(self._free) + len(self._idle)

  def take(self, count: int) -> list[int]:
    """Gives pages of undefined content, held once.

    Raises:
      ValueError: more than `available`.
    """
    if count > self.available:
      raise ValueError(f'{count} pages: only {self.available} available')
    taken = []
    for _ in range(count):
      if not self._free:
        page = next(iter(self._idle))
        del self._idle[page]
        self._retract(page)
      taken.append(self._free.pop())
      self._holders[taken[-1]] = 1
    return taken

  def hold(self, pages: Iterable[int]) -> None:
    """Adds a holder to each page, which must be held or found."""
    for page in pages:
      if page not in self._holders:
        del self._idle[page]
      self._holders[page] = self._holders.get(page, 0) + 1

  def drop(self, pages: Sequence[int]) -> None:
    """Takes a holder from each page of a sequence.

    The last page goes out of use first: it is of no use without those before.
    """
    for page in reversed(pages):
      self._holders[page] -= 1
      if not self._holders[page]:
        del self._holders[page]
        if page in self._published:
          self._idle[page] = None
        else:
          self._free.append(page)

  def publish(self, page: int, keys: Iterable[bytes], payload: Any) -> None:
    """Makes a held page findable; keys that already find one are skipped."""
    # Keys may be equal: all routes of the page were recorded, or there are none.
    fresh = [key for key in dict.fromkeys(keys) if key not in self._found]
    if fresh:
      known = self._published.setdefault(page, ([], payload))
      known[0].extend(fresh)
      self._found.update(dict.fromkeys(fresh, page))

  def find(self, keys: Iterable[bytes]) -> list[int]:
    """Pages of the longest prefix of `keys` that are all published."""
    pages = []
    for key in keys:
      if key not in self._found:
        break
      pages.append(self._found[key])
    return pages

  def payload(self, page: int) -> Any:
    """What a found page was published with."""
    return self._published[page][1]

  def forget(self) -> None:
    """Nothing that is published now will be found again."""
    self._found.clear()
    self._published.clear()
    self._free += self._idle
    self._idle.clear()

  def _retract(self, page: int) -> None:
    for key in self._published.pop(page)[0]:
      del self._found[key]
    self._free.append(page)
