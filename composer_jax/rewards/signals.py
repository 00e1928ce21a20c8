"""How a policy behaves, whatever it is paid for, and when that is alarming.

Nothing here enters a reward. A policy that learns to ask instead of to edit,
to call tools in vain or to leave work undone is seen here first: its rates are
compared with those of the same run's first steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import io
import re
import tokenize
import typing
from typing import Any

from composer_jax import task as task_lib
from composer_jax.agents import harness
from composer_jax.agents import tools
import numpy as np

PREFIX = 'behavior/'
ALARM = 'alarm/'
_CALLS = tuple(
    f'{t.__name__.lower()}s' for t in typing.get_args(tools.ToolCall)
)
_UNFINISHED = re.compile(
    r'\b(TODO|FIXME|XXX|HACK|NotImplementedError|NotImplemented)\b', re.I
)


def calls(episode: harness.Episode) -> int:
  """Tool calls that could be read, whether or not they did anything."""
  return sum(int(episode.meta.get(name, 0)) for name in _CALLS)


def _comments(files: Mapping[str, str]) -> int:
  """Characters of comments in the Python files."""
  total = 0
  for path, source in files.items():
    if path.endswith('.py'):
      try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
          if token.type == tokenize.COMMENT:
            total += len(token.string)
      except (tokenize.TokenError, SyntaxError, ValueError):
        continue  # what came before the error counts
  return total


def _unfinished(files: Mapping[str, str]) -> int:
  return sum(len(_UNFINISHED.findall(source)) for source in files.values())


def _changed(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, str]:
  """Files of `a` that are not the same in `b`."""
  return {path: text for path, text in a.items() if b.get(path) != text}


def measure(task: task_lib.Task, episode: harness.Episode) -> dict[str, float]:
  """Behavior of one episode, for the metrics; the mean over many is a rate.

  Returns:
    `behavior/` + edits (1 if anything was changed), asks and invalid (share
    of turns), failed_calls (share of calls), comment_chars and todos (that the
    submission adds), sampled_tokens. Nothing if there is no submission.
  """
  if episode.submission is None:
    return {}
  turns = max(1, int(episode.meta.get('turns', 0)))
  after = _changed(episode.submission, task.files)
  before = _changed(task.files, episode.submission)
  out = {
      'edits': float(bool(after or before)),
      'asks': int(episode.meta.get('asks', 0)) / turns,
      'invalid': int(episode.meta.get('bad_turns', 0)) / turns,
      'failed_calls': (
          int(episode.meta.get('failed_calls', 0)) / max(1, calls(episode))
      ),
      'comment_chars': float(max(0, _comments(after) - _comments(before))),
      'todos': float(max(0, _unfinished(after) - _unfinished(before))),
      'sampled_tokens': float(sum(s.sampled.sum() for s in episode.segments)),
  }
  return {PREFIX + name: value for name, value in out.items()}


@dataclasses.dataclass(frozen=True)
class Limit:
  """How far a figure may move from where it was at the start of the run.

  Attributes:
    factor: alarming beyond so many times the start, or below it if under 1.
    slack: and only if it moved by this much.
  """

  factor: float
  slack: float

  def broken(self, start: float, now: float) -> bool:
    if self.factor < 1:
      return now < self.factor * start and now < start - self.slack
    return now > self.factor * start and now > start + self.slack


LIMITS: Mapping[str, Limit] = {
    PREFIX + 'edits': Limit(0.5, 0.1),
    PREFIX + 'asks': Limit(2.0, 0.1),
    PREFIX + 'invalid': Limit(2.0, 0.1),
    PREFIX + 'failed_calls': Limit(2.0, 0.15),
    PREFIX + 'comment_chars': Limit(2.0, 40.0),
    PREFIX + 'todos': Limit(2.0, 0.1),
    PREFIX + 'sampled_tokens': Limit(2.0, 8.0),
    'entropy': Limit(0.1, 0.05),
    'mismatch/kl_stale': Limit(10.0, 0.05),
}


# Steps in a row that teach nothing before it is an alarm, and what of a step
# says so. Unlike LIMITS, these need no usual value to compare with.
_FUTILE_STEPS = 3
FUTILE: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    'no_signal': lambda r: r.get('tokens/trained') == 0,
    'all_invalid': lambda r: r.get(PREFIX + 'invalid') == 1.0,
    'all_truncated': lambda r: r.get('rollouts/truncated_fraction') == 1.0,
}
MISMATCH = 'mismatch'  # of equal weights: of any size, it breaks the contract


def alarms(
    records: Sequence[Mapping[str, float | None]],
    *,
    reference_steps: int = 10,
    recent_steps: int = 5,
) -> dict[str, tuple[float, float]]:
  """Figures that are wrong, or have left what they were in the first steps.

  A function of what was recorded, so a run that resumes raises the same.

  Args:
    records: figures of every step since the first, in order.
    reference_steps: first steps that say what is usual.
    recent_steps: last steps that say what it is now.

  Returns:
    name -> (usual, now); of `LIMITS`, none as long as the two windows overlap.
  """
  out = {}
  last = records[-_FUTILE_STEPS:]
  for name, futile in FUTILE.items():
    if len(last) == _FUTILE_STEPS and all(map(futile, last)):
      out[name] = 0.0, 1.0
  if records and (apart := records[-1].get('mismatch/max_same_version')):
    out[MISMATCH] = 0.0, apart
  if len(records) < reference_steps + recent_steps:
    return out

  def mean(window, name):
    values = [r.get(name) for r in window]
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None

  for name, limit in LIMITS.items():
    start = mean(records[:reference_steps], name)
    now = mean(records[-recent_steps:], name)
    if start is not None and now is not None and limit.broken(start, now):
      out[name] = start, now
  return out
