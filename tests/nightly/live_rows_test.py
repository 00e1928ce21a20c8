"""The bit contract over variants, sizes and numbers of live sequences."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized
from tests import live_rows

_LIVE = (1, 2, 7, 16, 17, 33, 64)
_VARIANTS = ('sigmoid', 'dense', 'qwen', 'deepseek', 'tied')
_SIZES = ((64, 96), (1024, 96), (1024, 576), (49_152, 576), (1024, 1536))


class LiveRowsTest(parameterized.TestCase):

  @parameterized.parameters(*itertools.product(_VARIANTS, _SIZES))
  def test_decode_equals_trainer(self, variant, size):
    vocab, embed = size
    kind, more = (
        ('dense', {'tied': True}) if variant == 'tied' else (variant, {})
    )
    for dtype in ('float32', 'bfloat16') if embed == 96 else ('float32',):
      cfg = live_rows.model(kind, vocab, embed, dtype=dtype, **more)
      found = live_rows.differences(cfg, _LIVE)
      self.assertEqual(
          {live: bad for live, (_, bad) in found.items()},
          dict.fromkeys(_LIVE, 0),
          f'{variant} {size} {dtype}',
      )


if __name__ == '__main__':
  absltest.main()
