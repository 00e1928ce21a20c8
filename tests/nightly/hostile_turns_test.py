"""20,000 turns that a policy might write: none ends the run."""

from absl.testing import absltest
from absl.testing import parameterized
from tests import hostile_turns

_TURNS = 10_000  # of each renderer


class HostileTurnsTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  def test_every_rollout_is_booked_once_and_valid(self, chat):
    with self.assertNoLogs(level='ERROR'):  # the last resort was not needed
      turns, booked = hostile_turns.play(_TURNS, seed=11, chat=chat)
    print(f'{turns} turns in {booked} rollouts')
    self.assertGreaterEqual(turns, _TURNS)
    self.assertGreater(booked, _TURNS / 4)


if __name__ == '__main__':
  absltest.main()
