"""The bit contract holds for one live sequence as for many, head tied or not.

A single block of rows compiles to another program than several do, so a
variant may keep the contract at one size and break it at another. The nightly
tests have more variants and sizes.
"""

from absl.testing import absltest
from absl.testing import parameterized
from tests import live_rows


class LiveRowsTest(parameterized.TestCase):

  @parameterized.parameters('qwen', 'dense')
  def test_decode_equals_trainer(self, variant):
    tied = {'tied': True} if variant == 'dense' else {}
    cfg = live_rows.model(variant, vocab=1024, embed=96, **tied)
    self.assertTrue(cfg.tied)
    found = live_rows.differences(cfg, (1, 7, 16, 17))
    self.assertEqual(
        {live: total for live, (total, _) in found.items()},
        {live: 8 * live for live in found},
    )
    self.assertEqual(
        {live: bad for live, (_, bad) in found.items()}, dict.fromkeys(found, 0)
    )


if __name__ == '__main__':
  absltest.main()
