"""Writing tiles: encoded on threads, packed in order, put as they fill up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from composer_jax.weights import codec
from composer_jax.weights import parallel
from composer_jax.weights import records
from composer_jax.weights import snapshot
from composer_jax.weights import store as store_lib


def write(
    store: store_lib.Store,
    prefix: str,
    tiles: np.ndarray,
    encode: Callable[[int], snapshot.Tile],
) -> tuple[records.Part, np.ndarray]:
  """Encodes tiles on threads and writes them as segments and an index.

  Args:
    store: store to write to.
    prefix: prefix of the new keys.
    tiles: numbers of the tiles, increasing.
    encode: called with 0..len(tiles) - 1, a few at a time.

  Returns:
    The part of an edge, and its records [tiles].
  """
  rows = np.zeros(len(tiles), records.TILE)
  written = []
  buffer = bytearray()

  def flush() -> None:
    key = f'{prefix}.seg.{len(written)}'
    written.append(store.put(key, bytes(buffer)))
    buffer.clear()

  for i, (encoded, pre, post) in enumerate(
      parallel.ordered(encode, range(len(rows)))
  ):
    rows[i] = (
        tiles[i],
        len(written),
        encoded.codec,
        len(buffer),
        len(encoded.payload),
        encoded.changed,
        np.frombuffer(codec.check(encoded.payload), np.uint8),
        np.frombuffer(pre, np.uint8),
        np.frombuffer(post, np.uint8),
    )
    buffer += encoded.payload
    if len(buffer) >= store_lib.SEGMENT_BYTES:
      flush()
  flush()
  index = store.put(f'{prefix}.idx', rows.tobytes())
  return records.Part(index, tuple(written)), rows
