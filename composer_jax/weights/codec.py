"""Lossless delta codec of weight tiles, and the digests that guard it.

A tile travels as (codec id, payload); ids are part of the stored format and
are never reused. D2, E and F carry the same steps of 2-byte floats: D2 needs
the fewest instructions, F the fewest bits, E is close to both.
"""

from __future__ import annotations

from collections.abc import Mapping
import struct
import threading
from typing import NamedTuple

import numpy as np
import xxhash
import zstandard

from composer_jax.weights import buckets
from composer_jax.weights import layout
from composer_jax.weights import numba_kernels
from composer_jax.weights import range_coder
from composer_jax.weights import reference
from composer_jax.weights import rice_coder
from composer_jax.weights import ulp_steps

RAW = 0  # the tile's bytes
D2 = 1  # `reference.Streams`, zstd per stream
E = 2  # `buckets.Changes` in the bits of `rice_coder`
F = 3  # `buckets.Changes` in the bytes of `range_coder`
XOR = 4  # any other type than 2-byte floats: XOR of the bytes, zstd
NAMES = {RAW: 'raw', D2: 'D2', E: 'E', F: 'F', XOR: 'xor'}

DELTAS = {NAMES[i]: i for i in (D2, E, F)}

_PACKERS = {E: rice_coder, F: range_coder}

_LEVEL = 1
_HEAD = struct.Struct('<7I')  # changed, 3 lengths, 3 stored sizes
_local = threading.local()


class Encoded(NamedTuple):
  """A tile on its way; an empty payload of a delta codec means no change."""

  codec: int
  payload: bytes
  changed: int  # elements
  steps: ulp_steps.UlpSteps | None = None  # that the payload has; 2-byte floats


def _zstd() -> tuple[zstandard.ZstdCompressor, zstandard.ZstdDecompressor]:
  """This thread's contexts: they are costly to make and not thread-safe."""
  if not hasattr(_local, 'zstd'):
    _local.zstd = (
        zstandard.ZstdCompressor(level=_LEVEL, write_content_size=False),
        zstandard.ZstdDecompressor(),
    )
  return _local.zstd


def _pack(data: np.ndarray) -> bytes:
  """zstd, or the bytes themselves if that is not smaller."""
  raw = data.tobytes()
  packed = _zstd()[0].compress(raw)
  return packed if len(packed) < len(raw) else raw


def _unpack(packed: bytes, length: int) -> bytes:
  """Inverse of `_pack` for a stream of `length` bytes."""
  if len(packed) == length:
    return packed
  try:
    # A damaged frame may claim any size, and would be given the memory.
    if zstandard.frame_content_size(packed) > 0:
      raise zstandard.ZstdError('frame names its size')
    raw = _zstd()[1].decompress(packed, max_output_size=length)
  except zstandard.ZstdError as e:
    raise ValueError(f'delta payload: {e}; damaged') from e
  if len(raw) != length:
    raise ValueError(f'delta payload: {len(raw)} bytes, want {length}; damaged')
  return raw


def _pack_d2(found: ulp_steps.UlpSteps) -> bytes:
  changed, *streams = numba_kernels.split(*found)
  packed = [_pack(s) for s in streams]
  gaps, _, skips, magnitudes = streams
  lengths = (changed, gaps.nbytes, skips.nbytes, magnitudes.nbytes)
  sizes = [len(p) for p in packed[:3]]
  return b''.join((_HEAD.pack(*lengths, *sizes), *packed))


def _apply_d2(
    payload: bytes, old: np.ndarray, out: np.ndarray | None
) -> np.ndarray:
  if len(payload) < _HEAD.size:
    raise ValueError(f'delta payload: {len(payload)} bytes; truncated')
  changed, gaps, skips, magnitudes, *sizes = _HEAD.unpack_from(payload)
  # Bounds first: lengths of a damaged head must not decide an allocation.
  most = old.size + old.size // 255 + 1
  if max(changed, gaps, skips, magnitudes // 2) > most or magnitudes % 2:
    raise ValueError('delta payload: lengths exceed the tile; damaged')
  view, at, streams = memoryview(payload), _HEAD.size, []
  lengths = (gaps, -(-changed // 8), skips, magnitudes)
  for size, length in zip((*sizes, len(payload)), lengths, strict=True):
    streams.append(np.frombuffer(_unpack(view[at : at + size], length), 'u1'))
    at += size
  streams[3] = streams[3].view('<u2')
  return numba_kernels.merge(old, reference.Streams(changed, *streams), out)


def _encode_words(
    codec: int, old: np.ndarray, new: np.ndarray
) -> tuple[bytes, ulp_steps.UlpSteps]:
  """Payload and steps between words of 2-byte floats."""
  if codec == D2:
    found = ulp_steps.between(old, new)
    return _pack_d2(found) if found.where.size else b'', found
  changes, found = buckets.between(old, new)
  return _PACKERS[codec].pack(changes) if found.where.size else b'', found


def encode(
    old: np.ndarray | None,
    new: np.ndarray,
    *,
    codec: int = E,
    itemsize: int = 2,
    raw_above: float = 1.0,
) -> Encoded:
  """Encodes one tile.

  Args:
    old: the words the receiver has (`layout.Table.read`); None for a base.
    new: the words it shall have, same shape: uint16 [n], or uint8 [bytes].
    codec: D2, E or F for uint16 words; all else travels as XOR.
    itemsize: bytes per element.
    raw_above: changed fraction above which deltas are not worth their time.

  Returns:
    The payload of the smaller of delta and raw.
  """
  values, found = new.nbytes // itemsize, None
  if old is None:
    return Encoded(RAW, new.tobytes(), values)
  if new.dtype == np.uint16:
    payload, found = _encode_words(codec, old, new)
    changed = found.where.size
  else:
    codec = XOR
    mask = old ^ new
    changed = int(mask.reshape(-1, itemsize).any(axis=1).sum())
    payload = _pack(mask) if changed else b''
  if not changed:
    return unchanged(new)
  if changed > raw_above * values or len(payload) >= new.nbytes:
    return Encoded(RAW, new.tobytes(), changed, found)
  return Encoded(codec, payload, changed, found)


def unchanged(words: np.ndarray) -> Encoded:
  """What `encode` says of a tile that stayed as it was."""
  return Encoded(E if words.dtype == np.uint16 else XOR, b'', 0)


def apply(
    codec: int,
    payload: bytes,
    old: np.ndarray | None,
    dtype: np.dtype | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
  """Decodes one tile.

  Args:
    codec: id from `encode`.
    payload: bytes from `encode`, already checked against their digest.
    old: the words `encode` saw; may be None for `RAW` if dtype is given.
    dtype: word type, uint16 or uint8; that of `old` by default.
    out: array like `old` to decode a delta into, a fresh one by default.
      Memory that was used before is several times faster than new pages.

  Returns:
    The new words, flat: in `out`, or a view of a raw payload.

  Raises:
    ValueError: unknown codec or damaged payload.
  """
  if codec == RAW:
    return np.frombuffer(payload, old.dtype if dtype is None else dtype)
  if codec not in NAMES:
    raise ValueError(f'codec={codec}: unknown; this reader is too old')
  if codec == D2 and payload:
    return _apply_d2(payload, old, out)
  if codec in _PACKERS and payload:
    changes = _PACKERS[codec].unpack(payload, old.size)
    return buckets.apply(old, changes, out)
  mask = _unpack(payload, old.nbytes) if payload else bytes(old.nbytes)
  return np.bitwise_xor(old, np.frombuffer(mask, old.dtype), out=out)


def bound(old: np.ndarray, new: np.ndarray) -> float:
  """Bits below which no code of these changes goes that knows the exponents.

  The entropy of which words change and of their steps, both given the
  exponent of the old word, with the odds of these very arrays.

  Args:
    old: words the receiver has, uint16 [n].
    new: words it shall have, uint16 [n].
  """
  bucket = (old >> buckets.SHIFT & 255).astype(np.int64)
  where = np.flatnonzero(old != new)
  step = reference.to_key(new[where]) - reference.to_key(old[where])
  words = np.bincount(bucket, minlength=buckets.BUCKETS)
  changed = np.bincount(bucket[where], minlength=buckets.BUCKETS)
  kinds = np.unique(bucket[where] << 16 | step, return_counts=True)[1]

  def bits(counts: np.ndarray) -> float:
    """sum of n log2 n."""
    return float((counts * np.log2(np.maximum(counts, 1))).sum())

  where_bits = bits(words) - bits(changed) - bits(words - changed)
  return where_bits + bits(changed) - bits(kinds)


def digest(words: np.ndarray | bytes) -> bytes:
  """xxh3-128 of the bytes: 16 bytes that find damage, not malice."""
  return xxhash.xxh3_128_digest(words)


def check(payload: bytes | memoryview) -> bytes:
  """xxh3-64 of stored bytes, against damage on their way."""
  return xxhash.xxh3_64_digest(payload)


def digests(named: Mapping[str, np.ndarray], table: layout.Table) -> np.ndarray:
  """Digest of every tile, uint8 [tiles 16]."""
  out = [digest(table.read(named, i)) for i in range(len(table.tiles))]
  return np.frombuffer(b''.join(out), np.uint8).reshape(-1, 16)


def root(
    named: Mapping[str, np.ndarray],
    tile_elements: int = layout.TILE_ELEMENTS,
) -> str:
  """Root digest of named arrays: the `WeightVersion.digest` they carry.

  It covers names, shapes, types, tile grid and every bit.

  Args:
    named: arrays by name.
    tile_elements: tile size of the store's config; the digest depends on it.
  """
  table = layout.Table.of(named, tile_elements)
  return table.root(digests(named, table))
