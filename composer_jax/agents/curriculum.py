"""Which task a prompt plays: rather a kind that is solved sometimes.

A group of rollouts that all succeed, or all fail, teaches nothing, and late in
a run most groups are like that. Every prompt has a few candidates, tasks that
no other prompt can have, and draws one of them; the odds are how often groups
of its kind were divided of late. What a kind is, is up to the task source
(`stratum` in a task's meta, or else its `family`): tasks about as hard as each
other, such as one sort of bug in one sort of function.

The odds are gentle on purpose. Undivided groups would not have been trained on
anyway, so leaving their kinds out changes little but the cost; to play only the
most divided kinds would make them most of what is learned.

Everything is a pure function of what earlier steps saw, so a run that resumes
chooses the same tasks again; and no task is played twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import random

from composer_jax.agents import tasks

_HALF_LIFE_STEPS = 20  # what was hard for the policy then may not be hard now
_LEAST = 0.02  # odds of what was never divided: it may be, later
_LEAST_VARIANCE = 1e-12

# Stratum -> (its divided groups, all its groups), decayed; '' is all strata.
Tally = Mapping[str, tuple[float, float]]
_ALL = ''


def stratum(task: tasks.Task) -> str:
  return task.meta.get('stratum') or task.meta.get('family', '?')


def fold(tally: Tally, groups: Iterable[tuple[str, float]]) -> Tally:
  """The tally after one more step.

  Args:
    tally: before.
    groups: (stratum, variance of its rewards) of every group of the step,
      trained or not, in a fixed order.
  """
  decay = 0.5 ** (1 / _HALF_LIFE_STEPS)
  out = {k: (decay * a, decay * n) for k, (a, n) in tally.items()}
  for kind, variance in groups:
    for key in (kind, _ALL):
      divided, n = out.get(key, (0.0, 0.0))
      out[key] = divided + (variance > _LEAST_VARIANCE), n + 1.0
  return out


def odds(tally: Tally, kind: str) -> float:
  """Chance that a group of a kind is divided; one never seen is average."""
  divided, n = tally.get(_ALL, (0.0, 0.0))
  average = (divided + 1.0) / (n + 1.0)
  divided, n = tally.get(kind, (0.0, 0.0))
  return max((divided + average) / (n + 1.0), _LEAST)


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
  indices = range(prompt * candidates, (prompt + 1) * candidates)
  kinds = [stratum(source.task(i, 'train')) for i in indices]
  weights = [odds(tally, kind) for kind in kinds]
  (index,) = random.Random(prompt).choices(indices, weights)
  return index
