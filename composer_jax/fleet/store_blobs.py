"""Payloads on any TensorStore key-value store, beside the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
import json

import tensorstore as ts

from composer_jax.fleet import blobs

# A store that stays away becomes an error within a minute, not within hours.
_RETRIES = {'max_retries': 6, 'initial_delay': '200ms', 'max_delay': '10s'}
_context = ts.Context(
    {f'{driver}_request_retries': _RETRIES for driver in ('s3', 'gcs')}
)


class StoreBlobs:
  """`blobs.Blobs` under a URL."""

  def __init__(self, url: str):
    """Opens a prefix.

    Args:
      url: file, s3 or gs; or the JSON spec of a TensorStore key-value store.

    Raises:
      ValueError: it is none of these.
    """
    self._url = url
    try:
      spec = json.loads(url) if url.startswith('{') else url.rstrip('/') + '/'
      self._kv = ts.KvStore.open(spec, context=_context).result()
    except ValueError as e:
      raise ValueError(f'blobs={url}: {e}') from e

  async def _done(self, name: str, future: ts.Future):
    try:
      return await future
    except ValueError as e:
      raise OSError(f'{self._url}{name}: {e}; is the store in reach?') from e

  async def put(self, name: str, data: bytes) -> blobs.BlobRef:
    await self._done(name, self._kv.write(name, data))
    return blobs.BlobRef.of(name, data)

  async def get(self, ref: blobs.BlobRef) -> bytes:
    found = await self._done(ref.name, self._kv.read(ref.name))
    return ref.check(found.value if found.state == 'value' else None)

  async def delete(self, names: Iterable[str]) -> None:
    await asyncio.gather(
        *(self._done(n, self._kv.write(n, None)) for n in names)
    )

  async def names(self, prefix: str) -> list[str]:
    last = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    keys = self._kv.list(ts.KvStore.KeyRange(prefix, last))
    return sorted(k.decode() for k in await self._done(prefix, keys))
