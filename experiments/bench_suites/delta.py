"""Delta weights: size against learning rate, speed against a generic codec.

Weights are f32 masters under a simulated AdamW, and those of a small model
under real gradients, both published as bf16. Sizes are exact: the same seed
gives the same bytes. The peer is XOR with the last version through zstd 1.
"""

from __future__ import annotations

import html
import math
import tempfile

import ml_dtypes
import numpy as np
import zstandard

from composer_jax import config
from composer_jax.weights import codec
from composer_jax.weights import follow
from composer_jax.weights import layout
from composer_jax.weights import publish
from composer_jax.weights import store as store_lib
from experiments.bench_suites import masters
from experiments.bench_suites import paired

_TILE = layout.TILE_ELEMENTS
_RATES = (1e-7, 1e-6, 3e-6, 1e-5)
_CODECS = {'D2': codec.D2, 'E': codec.E, 'F': codec.F}
# Name, times smaller than all weights; as published by others.
_ANCHORS = (('vendor blog', 50), ('SparrowRL', 79), ('PULSE', 130))

Pair = tuple[np.ndarray, np.ndarray]


def _tiles(pair: Pair) -> list[Pair]:
  cuts = range(0, pair[0].size, _TILE)
  return [(pair[0][i : i + _TILE], pair[1][i : i + _TILE]) for i in cuts]


def _xor(old: np.ndarray, new: np.ndarray) -> bytes:
  return _COMPRESS.compress((old ^ new).tobytes())


def _unxor(payload: bytes, old: np.ndarray) -> np.ndarray:
  return old ^ np.frombuffer(_EXPAND.decompress(payload), np.uint16)


_COMPRESS = zstandard.ZstdCompressor(level=1)
_EXPAND = zstandard.ZstdDecompressor()


def sizes_of(name: str, pair: Pair, strict: bool) -> list[paired.Figure]:
  """Size figures of one pair of versions; `strict` if the bars apply."""
  tiles = _tiles(pair)
  full, changed = pair[0].nbytes, int((pair[0] != pair[1]).sum())
  out = [paired.Figure(f'{name} changed', 100 * changed / pair[0].size, '%')]
  sizes = {'int32+bf16': 6 * changed}
  sizes['xor+zstd1'] = sum(len(_xor(*t)) for t in tiles)
  for label, kind in _CODECS.items():
    sizes[label] = sum(len(codec.encode(*t, codec=kind).payload) for t in tiles)
  limit = codec.bound(*pair)
  bits = {'D2': 11.5, 'E': 8.5, 'F': 7.4} if strict else {}
  bound = {'E': 0.82, 'F': 0.92} if strict else {}
  smaller = {'E': 2.5, 'D2': 1.9} if strict else {}
  for label, size in sizes.items():
    least = 150 if strict and label == 'E' else None
    out += [
        paired.Figure(f'{name} {label} ratio', full / size, 'x', least),
        paired.Figure(
            f'{name} {label} per change',
            8 * size / changed,
            'bits',
            most=bits.get(label),
        ),
        paired.Figure(
            f'{name} {label} of the bound',
            limit / (8 * size),
            '',
            bound.get(label),
        ),
    ]
    if label in _CODECS:
      ratio = sizes['xor+zstd1'] / size
      out.append(
          paired.Figure(
              f'{name} {label} against xor', ratio, 'x', smaller.get(label)
          )
      )
  return out


def _speeds(pair: Pair, pairs: int) -> list[paired.Result]:
  """GB/s of weights on one core, against the XOR peer."""
  tiles = _tiles(pair)
  xor = [_xor(*t) for t in tiles]
  targets = {'D2': (1.2, 1.5), 'E': (0.4, 0.25), 'F': (0.0, 0.0)}
  out = []
  for label, kind in _CODECS.items():
    payloads = [codec.encode(*t, codec=kind).payload for t in tiles]

    def encode(kind=kind):
      for t in tiles:
        codec.encode(*t, codec=kind)

    def decode(kind=kind, payloads=payloads):
      for p, (old, _) in zip(payloads, tiles, strict=True):
        codec.apply(kind, p, old)

    def unxor():
      for p, (old, _) in zip(xor, tiles, strict=True):
        _unxor(p, old)

    rounds = (
        ('encode', encode, lambda: [_xor(*t) for t in tiles]),
        ('decode', decode, unxor),
    )
    for (what, ours, peer), target in zip(rounds, targets[label], strict=True):
      out.append(
          paired.measure(
              f'{label} {what}',
              ours,
              {'xor+zstd1': peer},
              work=pair[0].nbytes / 1e6,
              unit='MB/s',
              pairs=pairs,
              target=target,
          )
      )

  def verified():
    for p, (old, new) in zip(payloads_e, tiles, strict=True):
      codec.digest(old)
      codec.check(p)
      if codec.digest(codec.apply(codec.E, p, old)) != codec.digest(new):
        raise ValueError('decoded words differ')

  payloads_e = [codec.encode(*t).payload for t in tiles]
  out.append(
      paired.measure(
          'E apply + verify, one core',
          verified,
          {},
          work=pair[0].nbytes / 1e6,
          unit='MB/s',
          pairs=pairs,
          target=1000,
      )
  )
  return out


def _as_named(words: np.ndarray) -> dict[str, np.ndarray]:
  return {'w': words.reshape(-1, 512, 512).view(ml_dtypes.bfloat16)}


def _end_to_end(pair: Pair, pairs: int) -> paired.Result:
  """Publish until applied and verified, against all bytes there and back."""
  named = [_as_named(words) for words in pair]
  with tempfile.TemporaryDirectory() as folder:
    url = f'file://{folder}/'
    cfg = config.WeightsConfig(base_every_versions=1_000_000)
    publisher = publish.Publisher(url, cfg, 'bench')
    follower = follow.Follower(url)
    plain = store_lib.Store(f'file://{folder}/full/')
    count = iter(range(1_000_000))

    def delta():
      i = next(count)
      publisher.publish(i, named[i % 2])
      follower.poll()

    def full():
      blob = plain.put('weights', named[0]['w'].tobytes())
      np.frombuffer(plain.get(blob), np.uint16)

    delta()
    return paired.measure(
        'publish to applied',
        delta,
        {'full write + read': full},
        work=pair[0].nbytes / 1e6,
        unit='MB/s',
        pairs=pairs,
        target=5.0,
    )


def _chain(versions: int, values: int) -> list[paired.Figure]:
  """Bytes to join at the end of a chain, and amortised over it."""
  url = 'memory://bench-chain/'
  publisher = publish.Publisher(url, config.WeightsConfig(), 'bench')
  done = []
  for i, words in zip(
      range(versions), masters.simulate(1e-6, values), strict=False
  ):
    done.append(publisher.publish(i, _as_named(words)))
  store = store_lib.Store(url)
  fetched = []
  index = store.index
  store.index = lambda edge, table: (fetched.append(edge), index(edge, table))[
      1
  ]
  follow.Follower(url, store=store).poll()
  base = done[0].base_bytes
  sent = sum(d.bytes + d.skip_bytes for d in done[1:]) + base
  join = sum(edge.nbytes for edge in fetched)
  return [
      paired.Figure(
          f'join after {versions - 1} deltas', join / base, 'bases', most=1.3
      ),
      paired.Figure('ratio with bases and skips', versions * base / sent, 'x'),
      paired.Figure(
          'ratio of deltas alone',
          base * (versions - 1) / sum(d.bytes for d in done[1:]),
          'x',
      ),
  ]


def slice_of(pair: Pair) -> list[paired.Figure]:
  """An eighth of the tiles, as a share of the bytes of all of them."""
  named = [_as_named(words) for words in pair]
  url = 'memory://bench-slice/'
  publisher = publish.Publisher(url, config.WeightsConfig(), 'bench')
  publisher.publish(0, named[0])
  experts = named[0]['w'].shape[0]
  box = slice(0, experts // 8), slice(0, 512), slice(0, 512)
  readers = {}
  for boxes in (None, {'w': box}):
    store = store_lib.Store(url)
    reads = []
    follower = follow.Follower(url, boxes=boxes, store=store)
    follower.poll()
    store._kv = _Counting(store._kv, reads)
    readers[boxes is None] = follower, reads
  publisher.publish(1, named[1])
  sizes, requests = {}, {}
  for whole, (follower, reads) in readers.items():
    follower.poll()
    found = [(k, len(f.result().value)) for k, f in reads]
    sizes[whole] = sum(n for k, n in found if k.startswith('d/'))
    requests[whole] = len(found)
  return [
      paired.Figure(
          'bytes of an eighth', sizes[False] / sizes[True], '', most=0.145
      ),
      paired.Figure('requests of an eighth', requests[False], '', most=4),
      paired.Figure('requests of all', requests[True], '', most=4),
  ]


class _Counting:
  """Notes the reads of a key-value store."""

  def __init__(self, kv, reads: list):
    self._kv, self._reads = kv, reads

  def read(self, key: str, **options):
    future = self._kv.read(key, **options)
    self._reads.append((key, future))
    return future


def run(
    *, pairs: int, values: int = 1 << 23
) -> list[paired.Figure | paired.Result]:
  """All figures; `values` weights for sizes and speeds."""
  out = []
  reference = None
  for rate in _RATES:
    versions = masters.simulate(rate, values)
    pair = next(versions), next(versions)
    out += sizes_of(f'lr {rate:g}', pair, strict=rate == 1e-6)
    if rate == 1e-6:
      reference = pair
  out += sizes_of('real gradients, lr 1e-06', masters.real(1e-6), strict=False)
  out += slice_of(reference)
  out += _chain(100, values // 4)
  out += _speeds(reference, pairs)
  large = tuple(np.tile(words, 8) for words in reference)
  out.append(_end_to_end(large, pairs))
  return out


def plot(results: list[paired.Figure | paired.Result]) -> str:
  """Ratio against learning rate as an SVG, with what others published."""
  lines = {
      label: [
          next(
              r.value for r in results if r.name == f'lr {rate:g} {label} ratio'
          )
          for rate in _RATES
      ]
      for label in ('F', 'E', 'D2', 'xor+zstd1', 'int32+bf16')
  }

  def x(rate: float) -> float:
    low, high = math.log(_RATES[0]), math.log(_RATES[-1])
    return 60 + 480 * (math.log(rate) - low) / (high - low)

  def y(ratio: float) -> float:
    return 380 - 110 * math.log10(max(ratio, 1))

  parts = []
  for name, ratio in _ANCHORS:
    parts.append(
        f'<path d="M60 {y(ratio):.1f}H540" stroke="#bbb" stroke-dasharray="4"/>'
    )
    parts.append(_text(62, y(ratio) - 3, f'{name} {ratio}x', '#888'))
  colors = ('#882255', '#4477aa', '#228833', '#ccbb44', '#aa3377')
  for color, (label, ratios) in zip(colors, lines.items(), strict=True):
    points = ' '.join(
        f'{x(r):.1f},{y(v):.1f}' for r, v in zip(_RATES, ratios, strict=True)
    )
    parts.append(
        f'<polyline points="{points}" fill="none" stroke="{color}"'
        ' stroke-width="2"/>'
    )
    parts.append(_text(546, y(ratios[-1]) + 4, label, color))
  for rate in _RATES:
    parts.append(_text(x(rate) - 14, 400, f'{rate:g}', '#000'))
  for power in range(4):
    parts.append(_text(20, y(10**power) + 4, f'{10**power}x', '#000'))
  title = 'times smaller than all weights, against AdamW learning rate'
  parts.append(_text(60, 20, title, '#000'))
  return (
      '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 410"'
      ' font-family="sans-serif" font-size="12"><rect width="640" height="410"'
      f' fill="white"/>{"".join(parts)}</svg>\n'
  )


def _text(x: float, y: float, text: str, color: str) -> str:
  text = html.escape(text)
  return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}">{text}</text>'
