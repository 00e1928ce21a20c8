"""Which task a prompt plays."""

import collections
import dataclasses
import random

from absl.testing import absltest
from absl.testing import parameterized

from composer_jax import task as task_lib
from composer_jax.environments import curriculum
from composer_jax.environments import micro_repair

_KINDS = ('always', 'never', 'sometimes', 'rarely')
_RATES = dict(zip(_KINDS, (1.0, 0.0, 0.4, 0.05), strict=True))


@dataclasses.dataclass(frozen=True)
class _Source:
  """Tasks of four kinds, in turn at random."""

  size: int = 10**9

  def task(self, index, split):
    if index >= self.size:
      raise IndexError(index)
    kind = random.Random(f'{index}/{split}').choice(_KINDS)
    return task_lib.Task(f'{index}', '', {}, (), meta={'family': kind})


def _play(source, rates, steps, candidates, seed=0):
  """Plays 12 groups of 16 a step; returns kinds of the last half and tasks."""
  rng = random.Random(seed)
  tally, prompt, kinds, played = {}, 0, collections.Counter(), []
  for step in range(steps):
    groups = []
    for _ in range(12):
      index = curriculum.choose(source, prompt, candidates, tally)
      kind = curriculum.stratum(source.task(index, 'train'))
      p = sum(rng.random() < rates(step)[kind] for _ in range(16)) / 16
      groups.append((kind, curriculum.worth(p, p * (1 - p))))
      kinds[kind] += step >= steps // 2
      played.append(index)
      prompt += 1
    tally = curriculum.fold(tally, groups)
  return kinds, played


class CurriculumTest(parameterized.TestCase):

  def test_what_is_solved_sometimes_is_played_more(self):
    kinds, _ = _play(_Source(), lambda _: _RATES, 40, 8)
    total = sum(kinds.values())
    # What is mastered gives way to what is not.
    self.assertLess(kinds['always'] / total, 0.1)
    self.assertBetween(kinds['never'] / total, 0.1, 0.3)
    self.assertBetween(kinds['sometimes'] / total, 0.33, 0.6)
    one, played = _play(_Source(), lambda _: _RATES, 40, 1)
    self.assertBetween(one['sometimes'] / total, 0.15, 0.35)
    self.assertEqual(played, list(range(40 * 12)))  # as they come

  def test_it_follows_the_policy(self):
    def rates(step):  # at first only one kind, later only another one
      return dict.fromkeys(_KINDS, 1.0) | (
          {'sometimes': 0.5} if step < 60 else {'never': 0.5}
      )

    kinds, _ = _play(_Source(), rates, 160, 8)
    self.assertGreater(kinds['never'], 0.5 * sum(kinds.values()))

  def test_no_task_is_played_twice(self):
    for candidates in (1, 3, 8):
      _, played = _play(_Source(), lambda _: _RATES, 30, candidates)
      self.assertLen(set(played), len(played))

  def test_equal_tallies_choose_equally(self):
    source = micro_repair.MicroRepair()
    groups = [('sum +=-=', 0.2), ('scale *+', 0.0)] * 20
    tally = curriculum.fold({}, groups)
    first = [curriculum.choose(source, p, 6, tally) for p in range(50)]
    again = curriculum.fold({}, groups)
    self.assertEqual(
        [curriculum.choose(source, p, 6, again) for p in range(50)], first
    )
    self.assertTrue(all(i // 6 == p for p, i in enumerate(first)))

  @parameterized.parameters((0.25, 0.1, 1.0), (0.0, 0.0, 0.5), (1.0, 0.0, 0.0))
  def test_worth(self, mean, variance, want):
    self.assertEqual(curriculum.worth(mean, variance), want)

  def test_odds(self):
    self.assertEqual(curriculum.odds({}, 'a'), 1.0)
    tally = curriculum.fold({}, [('a', 1.0), ('a', 0.0), ('b', 0.0)])
    self.assertEqual(tally['a'], (1.0, 2.0))
    average = 2 / 4
    self.assertEqual(curriculum.odds(tally, 'new'), average)
    self.assertAlmostEqual(curriculum.odds(tally, 'a'), (1 + average) / 3)
    self.assertAlmostEqual(curriculum.odds(tally, 'b'), average / 2)
    mastered = curriculum.fold({}, [('b', 0.0)] * 200)
    self.assertEqual(curriculum.odds(mastered, 'b'), 0.05)
    for _ in range(10):
      tally = curriculum.fold(tally, [])
    self.assertAlmostEqual(tally['a'][1], 1.0)

  def test_a_group_counts_once_whatever_its_kind(self):
    tally = curriculum.fold({}, [('', 0.5)])
    self.assertEqual(tally, {'': (0.5, 1.0)})

  def test_a_finite_source_ends(self):
    source = _Source(20)
    self.assertEqual(
        [curriculum.has(source, p, 8) for p in range(4)],
        [True, True, False, False],
    )

  def test_micro_repair_tells_kinds_of_bugs_apart(self):
    source = micro_repair.MicroRepair()
    kinds = {curriculum.stratum(source.task(k, 'train')) for k in range(2000)}
    self.assertBetween(len(kinds), 100, 600)
    two = micro_repair.MicroRepair(n_bugs=2).task(0, 'train')
    self.assertLen(curriculum.stratum(two).split(), 3)


if __name__ == '__main__':
  absltest.main()
