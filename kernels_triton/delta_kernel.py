"""Which words of a tensor changed, and by how many steps, on a GPU.

Words are compared as integers, never as floats: -0.0 differs from 0.0 and a
NaN equals itself. Changes keep their ascending order, because every tile knows
from the counts before it where its own begin. Offsets are 64-bit.
"""

import triton
import triton.language as tl

from kernels_triton import delta
from kernels_triton import launch

CONFIGS = {
    ('uint16', 90): launch.Config({'TILE': delta.TILE}, warps=4, stages=1)
}


@triton.jit
def _to_key(word):
  """Rank in total order of a word, both i32."""
  return word ^ tl.where(word >= 0x8000, 0xFFFF, 0x8000)


@triton.jit
def _from_key(key):
  return key ^ tl.where(key >= 0x8000, 0x8000, 0xFFFF)


@triton.jit
def _tile(TILE: tl.constexpr):
  """(number of this tile, its indices), 64-bit."""
  tile = tl.program_id(0).to(tl.int64)
  return tile, tile * TILE + tl.arange(0, TILE)


@triton.jit
def _words(ptr, at, live):
  return tl.load(ptr + at, mask=live, other=0).to(tl.int32)


@triton.jit
def count_kernel(old, new, length, counts, TILE: tl.constexpr):
  """counts i32 [tiles]: words of old and new that differ; length u32 [1]."""
  n = tl.load(length).to(tl.int64)
  tile, at = _tile(TILE)
  changed = _words(old, at, at < n) != _words(new, at, at < n)
  tl.store(counts + tile, tl.sum(changed.to(tl.int32), 0))


@triton.jit
def compact_kernel(
    old, new, first, length, room, where, step, TILE: tl.constexpr
):
  """Index u32 and step u16 of every change, in ascending order.

  first u32 [tiles] says where the changes of each tile go; length u32 [1] is
  that of the words, room u32 [1] that of the results.
  """
  n = tl.load(length).to(tl.int64)
  tile, at = _tile(TILE)
  a = _words(old, at, at < n)
  b = _words(new, at, at < n)
  changed = a != b
  to = tl.load(first + tile).to(tl.int64) + tl.cumsum(changed.to(tl.int32), 0)
  keep = changed & (to <= tl.load(room).to(tl.int64))
  tl.store(where + to - 1, at.to(tl.uint32), mask=keep)
  step_at = (_to_key(b) - _to_key(a)) & 0xFFFF
  tl.store(step + to - 1, step_at.to(tl.uint16), mask=keep)


@triton.jit
def apply_kernel(words, where, step, first, length, out, TILE: tl.constexpr):
  """out: words with the steps added; first u32 [tiles + 1] bounds each tile's.

  One program owns a tile: it copies the words, then overwrites the changed.
  """
  n = tl.load(length).to(tl.int64)
  tile, at = _tile(TILE)
  live = at < n
  tl.store(out + at, tl.load(words + at, mask=live, other=0), mask=live)
  tl.debug_barrier()  # both stores may hit one address from two threads
  begin = tl.load(first + tile).to(tl.int64)
  end = tl.load(first + tile + 1).to(tl.int64)
  for start in range(begin, end, TILE):
    i = start + tl.arange(0, TILE)
    to = tl.load(where + i, mask=i < end, other=0).to(tl.int64)
    key = _to_key(_words(words, to, i < end)) + _words(step, i, i < end)
    value = _from_key(key & 0xFFFF).to(tl.uint16)
    tl.store(out + to, value, mask=i < end)
