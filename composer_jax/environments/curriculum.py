"""Which task a prompt plays: rather not one of a kind that is always solved.

A group of rollouts that all succeed, or all fail, teaches nothing, and late in
a run most groups are like that. Every prompt has a few candidates, tasks that
no other prompt can have, and draws one of them, with odds of what groups of
its kind were worth of late. What a kind is, is up to the task source
(`stratum` in a task's meta, or else its `family`): tasks about as hard as each
other, such as one sort of bug in one sort of function.

A kind that is never solved keeps half of its odds: the rare success there is
how it becomes one that is solved sometimes.

Everything is a pure function of what earlier steps saw, so a run that resumes
chooses the same tasks again; and no task is played twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import random

from composer_jax import task as task_lib

_HALF_LIFE_STEPS = 10  # what was hard for the policy then may not be hard now
_NEVER_SOLVED = 0.5
_LEAST = 0.05  # odds of what is always solved, lest it be forgotten unseen
_LEAST_VARIANCE = 1e-12

# Stratum -> (worth of its groups, their number), decayed; '' is all strata.
Tally = Mapping[str, tuple[float, float]]
_ALL = ''


def stratum(task: task_lib.Task) -> str:
  return task.meta.get('stratum') or task.meta.get('family', '?')


def worth(mean: float, variance: float) -> float:
  """Worth of a group, rewards in [0, 1]: 1 if they differ, 0 if all are 1."""
  if variance > _LEAST_VARIANCE:
    return 1.0
  return _NEVER_SOLVED if mean < 0.5 else 0.0


def fold(tally: Tally, groups: Iterable[tuple[str, float]]) -> Tally:
  """The tally after one more step.

  Args:
    tally: what the steps before have shown.
    groups: (stratum, worth) of every group of the step, trained or not, in a
      fixed order.
  """
  decay = 0.5 ** (1 / _HALF_LIFE_STEPS)
  out = {k: (decay * a, decay * n) for k, (a, n) in tally.items()}
  for kind, value in groups:
    for key in dict.fromkeys((kind, _ALL)):  # a group counts once
      total, n = out.get(key, (0.0, 0.0))
      out[key] = total + value, n + 1.0
  return out


def odds(tally: Tally, kind: str) -> float:
  """What a group of a kind is worth; of one never seen, the average."""
  total, n = tally.get(_ALL, (0.0, 0.0))
  average = (total + 1.0) / (n + 1.0)
  total, n = tally.get(kind, (0.0, 0.0))
  return max((total + average) / (n + 1.0), _LEAST)


def has(source: task_lib.TaskSource, prompt: int, candidates: int) -> bool:
  """Says whether all candidates of a prompt exist."""
  try:
    source.task((prompt + 1) * candidates - 1, 'train')
  except IndexError:
    return False
  return True


def choose(
    source: task_lib.TaskSource, prompt: int, candidates: int, tally: Tally
) -> int:
  """Index of the training task of a prompt.

  Args:
    source: source of tasks.
    prompt: number of the prompt in the run.
    candidates: tasks to choose from; 1 takes them as they come.
    tally: what the steps before have shown.
  """
  indices = range(prompt * candidates, (prompt + 1) * candidates)
  kinds = [stratum(source.task(i, 'train')) for i in indices]
  weights = [odds(tally, kind) for kind in kinds]
  (index,) = random.Random(prompt).choices(indices, weights)
  return index
