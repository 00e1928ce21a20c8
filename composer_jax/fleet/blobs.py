"""Store of payloads: written once under a name, verified on read."""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import hashlib
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class BlobRef:
  """A payload in the store.

  Attributes:
    name: its name; slashes make folders.
    size: bytes.
    sha256: digest, hex.
  """

  name: str
  size: int
  sha256: str

  @classmethod
  def of(cls, name: str, data: bytes) -> BlobRef:
    return cls(name, len(data), hashlib.sha256(data).hexdigest())

  def check(self, data: bytes | None) -> bytes:
    """Returns the data.

    Raises:
      ValueError: it is missing (None), or not what was stored.
    """
    if data is None:
      raise ValueError(f'blob {self.name!r}: missing')
    if self.of(self.name, data) != self:
      raise ValueError(f'blob {self.name!r}: size or sha256 differs; damaged')
    return data


class Blobs(Protocol):
  """Payloads by name."""

  async def put(self, name: str, data: bytes) -> BlobRef:
    """Stores a payload; once it returns, nothing loses it."""
    ...

  async def get(self, ref: BlobRef) -> bytes:
    """Returns a payload.

    Raises:
      ValueError: it is missing, or not what was stored.
    """
    ...

  async def delete(self, names: Iterable[str]) -> None:
    """Removes payloads; a name that is not there is no error."""
    ...

  async def names(self, prefix: str) -> list[str]:
    """Names that begin with `prefix`, sorted."""
    ...


class MemoryBlobs:
  """`Blobs` of one process."""

  def __init__(self):
    self._data: dict[str, bytes] = {}

  async def put(self, name: str, data: bytes) -> BlobRef:
    self._data[name] = data
    return BlobRef.of(name, data)

  async def get(self, ref: BlobRef) -> bytes:
    return ref.check(self._data.get(ref.name))

  async def delete(self, names: Iterable[str]) -> None:
    for name in names:
      self._data.pop(name, None)

  async def names(self, prefix: str) -> list[str]:
    return sorted(name for name in self._data if name.startswith(prefix))
