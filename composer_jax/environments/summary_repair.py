"""Repairs that need more context than there is, unless a summary passes it on.

A function returns one of two constants, and both are wrong. What is right is
nowhere but in the failing test that `run` shows. With a context too small for
what it shows and the edits, an episode has to be

  run, summary, edit both and done

or, if the constants are to differ and `run` shows one after the other,

  run, summary, edit and run, summary, edit and done

where each edit is made in a window that has seen its test in a summary only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import hashlib
import random
from typing import Annotated, Protocol

from composer_jax import checks
from composer_jax import task as task_lib
from composer_jax.agents import harness
from composer_jax.agents import tools
from composer_jax.agents import windows
from composer_jax.checks import Range
from composer_jax.sandbox import child

ENTRY = 'f'
PATH = 'f.py'
_LETTERS = 'abcdeghkmnpqrsuvwyz'
_HIDDEN = 3  # cases of each branch, besides the one that `run` shows

# {0} and {1}: the constants, in the order in which `run` shows what is wrong.
FAMILIES: Mapping[str, str] = {
    'below': 'def f({x}):| if {x}[0]<{k}:|  return {0}| return {1}',
    'above': 'def f({x}):| if {x}[0]>={k}:|  return {1}| return {0}',
    # Held out: the first one, written with another operator.
    'at_most': 'def f({x}):| if {x}[0]<={j}:|  return {0}| return {1}',
}
HELDOUT = ('at_most',)

# Share of the problems that each split owns, as a range of the first byte of
# the problem's hash; 'heldout' is apart by its families.
_SPLITS = {
    'train': range(0, 128),
    'warmup': range(128, 192),
    'eval': range(192, 256),
    'heldout': range(0, 256),
}
_Constants = tuple[int, int]


class Renderer(harness.Renderer, Protocol):
  """One that can also write what a policy would."""

  def encode_turn(self, calls: Sequence[tools.ToolCall]) -> list[int]:
    ...

  def encode_summary(self, text: str) -> list[int]:
    ...


@dataclasses.dataclass(frozen=True)
class _Instance:
  task: task_lib.Task
  template: str  # lines with {0} and {1} left to fill in
  wrong: _Constants
  right: _Constants
  public: tuple[task_lib.Case, ...]
  hidden: tuple[task_lib.Case, ...]

  def source(self, constants: _Constants) -> str:
    return self.template.format(*constants)

  def edit(self, which: int, old: int, new: int) -> tools.Edit:
    """The edit of one constant."""
    lines = self.template.split('\n')
    (line,) = (n for n, text in enumerate(lines) if f'{{{which}}}' in text)
    return tools.Edit(line, str(old), str(new))

  def shown(self, constants: _Constants) -> str:
    """What `run` says about a source with these constants."""
    values = [child.canonical(c) for c in constants]
    return tools.report(self.public, values, ['', ''], '')


@dataclasses.dataclass(frozen=True)
class SummaryRepair:
  """Task source; splits are train, warmup, eval (other instances), heldout.

  Attributes:
    facts: different constants that are right, 1 or 2; as many summaries.
    inputs: length of the list that is the argument: of what `run` shows.
    seed: seed of the whole stream of tasks.
  """

  facts: Annotated[int, Range(1, 2)] = 1
  inputs: Annotated[int, Range(2, 64)] = 8
  seed: checks.Seed = 0

  def __post_init__(self):
    checks.fields(self)

  def task(self, index: int, split: str) -> task_lib.Task:
    return _instance(self, index, split).task

  def hidden(self, task: task_lib.Task) -> tuple[task_lib.Case, ...]:
    """Returns the cases that decide the reward: as many of each branch."""
    return self._instance_of(task).hidden

  def fingerprint(self, task: task_lib.Task) -> str:
    return task_lib.fingerprint(
        task.files, task.public_tests + self.hidden(task)
    )

  def solution(self, task: task_lib.Task) -> str:
    """Returns the correct source; for validation and tests only."""
    known = self._instance_of(task)
    return known.source(known.right)

  def chance(self, task: task_lib.Task) -> float:
    """Probability that guesses are right: no constant stays as it is."""
    del task
    return 1 / 9**self.facts

  def demo(
      self, task: task_lib.Task, rng: random.Random
  ) -> list[tools.ToolCall]:
    """The first turn, which is the same in every episode."""
    del task, rng
    return [tools.Run()]

  def demo_window(
      self, task: task_lib.Task, rng: random.Random, renderer: Renderer
  ) -> list[tuple[list[int], bool]]:
    """One window of an episode in the right FORMAT, as (ids, trained).

    It is the window before the first summary, or after one. A summary is any
    digit, whatever the window shows; an edit writes the digit of the summary,
    which is never the right one. So the warm start teaches that a summary is a
    digit and that edits use it. That it has to be the digit which the test
    expects is left to reinforcement learning.
    """
    known = self._instance_of(task)
    part = rng.randrange(self.facts + 1)
    query = renderer.encode_summary_query()
    turn = renderer.encode_turn
    summary = renderer.encode_summary(str(rng.randrange(10)))
    now = known.wrong
    if part == 0:
      seen = renderer.encode_observation(known.shown(now))
      return [
          (renderer.encode_task(task), False),
          (turn([tools.Run()]), True),
          (seen + query, False),
          (summary, True),
      ]
    if part == 2:  # the first constant has been changed, rightly or not
      now = rng.choice([known.right[0], _wrong(rng, known, now, 0)]), now[1]
    places = [part - 1] if self.facts == 2 else [0, 1]
    wrong = _wrong(rng, known, now, *places)
    edits = [known.edit(which, now[which], wrong) for which in places]
    state = windows.State(
        {PATH: known.source(now)}, self.facts + 1 - part, part
    )
    *passed_on, _ = renderer.encode_summary(str(wrong))
    prompt = renderer.encode_resumed(task, passed_on, state)
    if part == self.facts:
      return [(prompt, False), (turn([*edits, tools.Done()]), True)]
    shown = known.shown((wrong, now[1]))
    seen = renderer.encode_observation(f'ok\n{shown}')
    return [
        (prompt, False),
        (turn([*edits, tools.Run()]), True),
        (seen + query, False),
        (summary, True),
    ]

  def _instance_of(self, task: task_lib.Task) -> _Instance:
    _, split, index = task.id.split('/')
    return _instance(self, int(index), split)


def _wrong(
    rng: random.Random, known: _Instance, now: _Constants, *places: int
) -> int:
  """A digit that is neither there nor right in any of the places."""
  others = set(range(10))
  for which in places:
    others -= {known.right[which], now[which]}
  return rng.choice(sorted(others))


def _cases(
    rng: random.Random, inputs: int, k: int, right: _Constants
) -> tuple[list[task_lib.Case], list[task_lib.Case]]:
  """Cases of both branches, no input twice."""
  found: tuple[dict, dict] = ({}, {})
  while min(map(len, found)) <= _HIDDEN:
    values = [rng.randrange(10) for _ in range(inputs)]
    found[values[0] >= k][tuple(values)] = None
  first, second = (
      [task_lib.Case((list(v),), c) for v in branch][: _HIDDEN + 1]
      for branch, c in zip(found, right, strict=True)
  )
  return first, second


@functools.lru_cache(maxsize=8192)
def _instance(source: SummaryRepair, index: int, split: str) -> _Instance:
  if split not in _SPLITS:
    raise ValueError(f'split={split!r}: must be one of {sorted(_SPLITS)}')
  held = split == 'heldout'
  names = [f for f in FAMILIES if (f in HELDOUT) == held]
  # Every field takes part: two sources that differ share no stream. The name is
  # the one that the class had first: the tasks of older runs stay the same.
  stream = repr(source).replace(type(source).__name__, 'Relay', 1)
  rng = random.Random(f'{stream}/{split}/{index}')
  while True:
    family = rng.choice(names)
    x = rng.choice(_LETTERS)
    k = rng.randint(3, 6)
    wrong, right = (tuple(rng.sample(range(10), 2)) for _ in range(2))
    right = (right[0], right[source.facts - 1])
    if wrong[0] == right[0] or wrong[1] == right[1]:
      continue
    text = FAMILIES[family].format('{0}', '{1}', x=x, k=k, j=k - 1)
    template = text.replace('|', '\n')
    problem = f'{template} {wrong} {right}'.encode()
    if hashlib.sha256(problem).digest()[0] in _SPLITS[split]:
      break
  first, second = _cases(rng, source.inputs, k, right)
  public = first.pop(), second.pop()
  task = task_lib.Task(
      id=f'summary_repair/{split}/{index}',
      instruction='',
      files={PATH: template.format(*wrong)},
      public_tests=public,
      seed=source.seed,
      meta={
          'family': family,
          'split': split,
          'entry': ENTRY,
      },
  )
  return _Instance(task, template, wrong, right, public, (*first, *second))
