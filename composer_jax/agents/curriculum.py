"""Which task a prompt plays: the kind of task that is solved sometimes.

A group of rollouts that all succeed, or all fail, teaches nothing; one in which
few succeed teaches most. Every prompt has a few candidates, tasks that no other
prompt can have; it plays the one whose kind has taught most of late. What a kind is, is up
to the task source (`stratum` in a task's meta, or else its `family`): tasks
about as hard as each other, such as one sort of bug in one sort of function.

Everything is a pure function of what earlier steps saw, so a run that resumes
chooses the same tasks again; and no task is played twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from composer_jax.agents import tasks

_HALF_LIFE_STEPS = 20  # what was hard for the policy then may not be hard now
_EXPECTED = 0.5  # of a kind never seen: high, so that it will be
_LEAST_VARIANCE = 1e-12

# Stratum -> (sum of its groups' lessons, number of groups), decayed.
Tally = Mapping[str, tuple[float, float]]


def stratum(task: tasks.Task) -> str:
  return task.meta.get('stratum') or task.meta.get('family', '')


def lesson(mean: float, variance: float) -> float:
  """What a group taught, from the mean and variance of rewards in [0, 1].

  Nothing if it was of one mind; else the share that failed, so that training
  does not stay with what is nearly mastered.
  """
  return min(max(1.0 - mean, 0.0), 1.0) if variance > _LEAST_VARIANCE else 0.0


def fold(tally: Tally, groups: Iterable[tuple[str, float]]) -> Tally:
  """The tally after one more step.

  Args:
    tally: before.
    groups: (stratum, lesson) of every group of the step, trained or not, in a
      fixed order.
  """
  decay = 0.5 ** (1 / _HALF_LIFE_STEPS)
  out = {k: (decay * total, decay * n) for k, (total, n) in tally.items()}
  for kind, learned in groups:
    total, n = out.get(kind, (0.0, 0.0))
    out[kind] = total + learned, n + 1.0
  return out


def promise(tally: Tally, kind: str) -> float:
  """What a group of this kind will teach, in [0, 1]."""
  total, n = tally.get(kind, (0.0, 0.0))
  return (total + _EXPECTED) / (n + 1.0)


def has(source: tasks.TaskSource, prompt: int, candidates: int) -> bool:
  """Says whether all candidates of a prompt exist."""
  try:
    source.task((prompt + 1) * candidates - 1, 'train')
  except IndexError:
    return False
  return True


def choose(
    source: tasks.TaskSource, prompt: int, candidates: int, tally: Tally
) -> int:
  """Index of the training task of a prompt.

  Args:
    source: of tasks.
    prompt: number of the prompt in the run.
    candidates: tasks to choose from; 1 takes them as they come.
    tally: of the steps before.
  """

  def rank(index: int) -> tuple[float, int]:
    kind = stratum(source.task(index, 'train'))
    return promise(tally, kind), -index

  first = prompt * candidates
  return max(range(first, first + candidates), key=rank)
