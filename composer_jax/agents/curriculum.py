"""Which task a prompt plays: the kind of task that is solved sometimes.

A group of rollouts that all succeed, or all fail, teaches nothing. Every
prompt has a few candidates, tasks that no other prompt can have; it plays the
one of the kind whose groups were most divided of late. What a kind is, is up
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
_MOST_VARIANCE = 0.25  # of rewards in [0, 1]: half of them 0, half 1

# Stratum -> (sum of how divided its groups were, number of groups), decayed.
Tally = Mapping[str, tuple[float, float]]


def stratum(task: tasks.Task) -> str:
  return task.meta.get('stratum') or task.meta.get('family', '')


def fold(tally: Tally, groups: Iterable[tuple[str, float]]) -> Tally:
  """The tally after one more step.

  Args:
    tally: before.
    groups: (stratum, variance of its rewards) of every group of the step,
      trained or not, in a fixed order.
  """
  decay = 0.5 ** (1 / _HALF_LIFE_STEPS)
  out = {k: (decay * total, decay * n) for k, (total, n) in tally.items()}
  for kind, variance in groups:
    total, n = out.get(kind, (0.0, 0.0))
    out[kind] = total + min(variance / _MOST_VARIANCE, 1.0), n + 1.0
  return out


def promise(tally: Tally, kind: str) -> float:
  """How divided a group of this kind will be, in [0, 1]."""
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
