"""Nothing that a policy writes ends a run, or leaves a rollout half booked."""

from absl.testing import absltest
from absl.testing import parameterized
from tests import hostile_turns


class HostileTurnsTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  def test_every_rollout_is_booked_once_and_valid(self, chat):
    with self.assertNoLogs(level='ERROR'):  # the last resort was not needed
      turns, booked = hostile_turns.play(100, seed=3, chat=chat)
    self.assertGreaterEqual(turns, 100)
    self.assertGreater(booked, 12)


if __name__ == '__main__':
  absltest.main()
