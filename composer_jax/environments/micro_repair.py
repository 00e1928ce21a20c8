"""Procedural repair tasks that a model of a million parameters can learn.

Each task is a function of 3-8 lines with `n_bugs` tokens swapped for another
token of the same group, and one example it gets wrong. The right token follows
from the other lines and that example. Reward comes from other inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import hashlib
import random
import re
from typing import Annotated, Any

from composer_jax import checks
from composer_jax import task as task_lib
from composer_jax.agents import tools
from composer_jax.checks import Range

ENTRY = 'f'
PATH = 'f.py'
_LETTERS = 'abcdeghkmnpqrsuvwyz'
_INPUTS = 8  # one becomes the public example, seven stay hidden

# x: argument, t and s: accumulators, i: loop variable, c and d: constants.
# Loops run over the input or its indices, so that no edit makes them endless.
_EACH = 'def f({x}):| {t}=%s| for {i} in {x}:|  %s| return {t}'
_PAIR = 'def f({x}):| {t}=[]| for {i} in range(1,len({x})):|  {t}+=[%s]'
_PAIR += '| return {t}'
_SCAN = 'def f({x}):| {t}=[]| {s}=%s| for {i} in {x}:|  %s|  {t}+=[{s}]'
_SCAN += '| return {t}'

FAMILIES: Mapping[str, str] = {
    'sum': _EACH % ('0', '{t}+={i}'),
    'product': _EACH % ('1', '{t}*={i}'),
    'maximum': _EACH % ('{x}[0]', 'if {i}>{t}:{t}={i}'),
    'minimum': _EACH % ('{x}[0]', 'if {i}<{t}:{t}={i}'),
    'count_multiples': _EACH % ('0', 'if {i}%{c}==0:{t}+=1'),
    'count_above': _EACH % ('0', 'if {i}>{c}:{t}+=1'),
    'sum_squares': _EACH % ('0', '{t}+={i}*{i}'),
    'sum_scaled': _EACH % ('0', '{t}+={i}*{c}'),
    'sum_absolute': _EACH % ('0', 'if {i}<0:{i}=0-{i}|  {t}+={i}'),
    'sum_above': _EACH % ('0', 'if {i}>{c}:{t}+={i}'),
    'scale': _EACH % ('[]', '{t}+=[{i}*{c}]'),
    'shift': _EACH % ('[]', '{t}+=[{i}+{c}]'),
    'affine': _EACH % ('[]', '{t}+=[{i}*{c}+{d}]'),
    'keep_above': _EACH % ('[]', 'if {i}>{c}:{t}+=[{i}]'),
    'keep_below': _EACH % ('[]', 'if {i}<{c}:{t}+=[{i}]'),
    'keep_multiples': _EACH % ('[]', 'if {i}%{c}==0:{t}+=[{i}]'),
    'clip': _EACH % ('[]', 'if {i}>{c}:{i}={c}|  {t}+=[{i}]'),
    'reverse_scaled': _EACH % ('[]', '{t}=[{i}*{c}]+{t}'),
    'remainders': _EACH % ('[]', '{t}+=[{i}%{c}]'),
    'quotients': _EACH % ('[]', '{t}+=[{i}//{c}]'),
    'horner': _EACH % ('0', '{t}={t}*{c}+{i}'),
    'differences': _PAIR % '{x}[{i}]-{x}[{i}-1]',
    'pair_products': _PAIR % '{x}[{i}]*{x}[{i}-1]',
    'prefix_sums': _SCAN % ('0', '{s}+={i}'),
    'running_maximum': _SCAN % ('{x}[0]', 'if {i}>{s}:{s}={i}'),
    'ends': 'def f({x}):| {t}={x}[0]| return {t}+{x}[-1]',
    # Held out by default: the same idioms in combinations not trained on.
    'prefix_products': _SCAN % ('1', '{s}*={i}'),
    'running_minimum': _SCAN % ('{x}[0]', 'if {i}<{s}:{s}={i}'),
    'pair_sums': _PAIR % '{x}[{i}]+{x}[{i}-1]',
    'count_below': _EACH % ('0', 'if {i}<{c}:{t}+=1'),
    'sum_multiples': _EACH % ('0', 'if {i}%{c}==0:{t}+={i}'),
    'raise_floor': _EACH % ('[]', 'if {i}<{c}:{i}={c}|  {t}+=[{i}]'),
}
HELDOUT = (
    'prefix_products',
    'running_minimum',
    'pair_sums',
    'count_below',
    'sum_multiples',
    'raise_floor',
)

_GROUPS = (
    ('+=', '-=', '*=', '//='),
    ('<', '>', '<=', '>='),
    ('==', '!='),
    ('[0]', '[1]', '[-1]'),
    ('+', '-', '*'),
    ('%', '//'),
    ('0', '1', '2'),
)
_SWAPS = {a: tuple(b for b in g if b != a) for g in _GROUPS for a in g}
_TOKEN = re.compile(
    r'\[-?\d\]|//=|[-+*]=|[<>=!]=|//|[-+*%<>]|(?<!\d)[012](?!\d)'
)

# Share of the space of buggy sources that each split owns, as a range of the
# first byte of the source's hash. No buggy function is in two splits.
_SPLITS = {
    'train': range(0, 128),
    'warmup': range(128, 192),
    'eval': range(192, 256),
    'heldout': range(0, 256),  # disjoint from the rest by family
}


def _line_edits(line: int, text: str) -> list[tools.Edit]:
  return [
      tools.Edit(line, m[0], new)
      for m in _TOKEN.finditer(text)
      # The edit tool replaces the FIRST occurrence: others cannot be reached.
      if m[0] in _SWAPS and text.find(m[0]) == m.start()
      for new in _SWAPS[m[0]]
  ]


def _edits(lines: Sequence[str]) -> list[tools.Edit]:
  return [e for k, text in enumerate(lines) for e in _line_edits(k, text)]


def _apply(lines: Sequence[str], edit: tools.Edit) -> list[str]:
  out = list(lines)
  out[edit.line] = out[edit.line].replace(edit.old, edit.new, 1)
  return out


def _evaluate(source: str, inputs: Sequence[list[int]]) -> list[Any]:
  """Outputs of our own templates; an exception's type stands for its value."""
  scope = {'__builtins__': {'range': range, 'len': len}}
  exec(source, scope)  # pylint: disable=exec-used
  outputs = []
  for value in inputs:
    try:
      outputs.append(scope[ENTRY](list(value)))
    except (ArithmeticError, LookupError, TypeError) as e:
      outputs.append(type(e))
  return outputs


def _show(value: Any) -> str:
  return repr(value).replace(' ', '')


@dataclasses.dataclass(frozen=True)
class _Instance:
  task: task_lib.Task
  gold: tuple[str, ...]  # lines
  hidden: tuple[task_lib.Case, ...]


@dataclasses.dataclass(frozen=True)
class MicroRepair:
  """Task source; splits are train, warmup, eval (other instances), heldout.

  Attributes:
    n_bugs: tokens swapped; a repair needs as many edits.
    show_failure: put the failing example into the prompt. If not, the policy
      has to call `run` to see it.
    distractors: unused assignments added to the function.
    heldout_families: names in `FAMILIES` that only the heldout split uses.
    seed: seed of the whole stream of tasks.
  """

  n_bugs: Annotated[int, Range(1, 2)] = 1
  show_failure: bool = True
  distractors: Annotated[int, Range(0, 4)] = 0
  heldout_families: tuple[str, ...] = HELDOUT
  seed: checks.Seed = 0

  def __post_init__(self):
    checks.fields(self)
    checks.require(
        self,
        (
            set(self.heldout_families) <= set(FAMILIES),
            'heldout_families',
            f'must be among {sorted(FAMILIES)}',
        ),
    )

  def task(self, index: int, split: str) -> task_lib.Task:
    """Returns task `index` of a split; in about a quarter of a millisecond."""
    return _instance(self, index, split).task

  def hidden(self, task: task_lib.Task) -> tuple[task_lib.Case, ...]:
    """Returns the cases that decide the reward."""
    return self._instance_of(task).hidden

  def fingerprint(self, task: task_lib.Task) -> str:
    """Returns a hash of the buggy source and every case."""
    return task_lib.fingerprint(
        task.files, task.public_tests + self.hidden(task)
    )

  def solution(self, task: task_lib.Task) -> str:
    """Returns the correct source; for validation and tests only."""
    return '\n'.join(self._instance_of(task).gold)

  def legal_edits(self, task: task_lib.Task) -> list[tools.Edit]:
    """Every edit that swaps one token for another of its group."""
    return _edits(task.files[PATH].split('\n'))

  def chance(self, task: task_lib.Task) -> float:
    """Probability that one random legal edit repairs the task."""
    edits = self.legal_edits(task)
    return sum(self._repairs(task, e) for e in edits) / len(edits)

  def demo(
      self, task: task_lib.Task, rng: random.Random
  ) -> list[tools.ToolCall]:
    """A turn in the right FORMAT that is never a right answer.

    Edits are random legal ones. Any that repairs the task, or undoes one of
    its bugs, is left out: a rise in success after the warm start is then due
    to reinforcement learning alone.
    """
    gold = self._instance_of(task).gold
    edits = self.legal_edits(task)
    lines = task.files[PATH].split('\n')
    rng.shuffle(edits)
    wrong = (
        e
        for e in edits
        if _apply(lines, e)[e.line] != gold[e.line]
        and not self._repairs(task, e)
    )
    chosen: list[tools.Edit] = []
    for edit in wrong:
      if edit.line not in {e.line for e in chosen}:
        chosen.append(edit)
      if len(chosen) == self.n_bugs:
        break
    after = functools.reduce(_apply, chosen, lines)
    assert after != list(gold), f'{task.id}: a demo must not be right'
    if not self.show_failure and rng.random() < 0.5:
      return [tools.Run()]
    return [*chosen, tools.Done()]

  def _instance_of(self, task: task_lib.Task) -> _Instance:
    _, split, index = task.id.split('/')
    return _instance(self, int(index), split)

  def _repairs(self, task: task_lib.Task, edit: tools.Edit) -> bool:
    cases = task.public_tests + self.hidden(task)
    source = '\n'.join(_apply(task.files[PATH].split('\n'), edit))
    outputs = _evaluate(source, [c.args[0] for c in cases])
    return outputs == [c.expected for c in cases]


def _draw(
    source: MicroRepair, rng: random.Random, family: str
) -> tuple[list[str], list[str], str] | None:
  """Lines of a correct function, of its buggy form, and the bugs' sort.

  None: no such bugs.
  """
  letters = rng.sample(_LETTERS, 4 + source.distractors)
  c, d = rng.sample(range(3, 7), 2)
  text = FAMILIES[family].format(
      **dict(zip('xtis', letters, strict=False)), c=c, d=d
  )
  gold = text.split('|')
  for letter in letters[4:]:
    gold.insert(1, f' {letter}={rng.randint(0, 2)}')
  buggy, sorts = gold, []
  for _ in range(source.n_bugs):
    edit = rng.choice(_edits(buggy))
    undo = tools.Edit(edit.line, edit.new, edit.old)
    if buggy[edit.line] != gold[edit.line]:
      return None  # at most one bug a line
    after = _apply(buggy, edit)
    if undo not in _line_edits(edit.line, after[edit.line]):
      return None
    if _apply(after, undo) != buggy:
      return None  # the same token stands further left
    buggy = after
    sorts.append(f'{edit.old}{edit.new}')
  return gold, buggy, ' '.join(sorted(sorts))


def _candidate(
    source: MicroRepair, rng: random.Random, family: str, index: int, split: str
) -> _Instance | None:
  """One try at an instance; None if it is not a fair task of this split."""
  lines = _draw(source, rng, family)
  if lines is None:
    return None
  gold, buggy, sort = lines
  text = '\n'.join(buggy)
  if hashlib.sha256(text.encode()).digest()[0] not in _SPLITS[split]:
    return None
  inputs = [
      [rng.randint(-6, 9) for _ in range(rng.randint(2, 5))]
      for _ in range(_INPUTS)
  ]
  if len(set(map(tuple, inputs))) < _INPUTS:
    return None  # the example in the prompt must not decide the reward too
  expected = _evaluate('\n'.join(gold), inputs)
  actual = _evaluate(text, inputs)
  wrong = [k for k in range(_INPUTS) if actual[k] != expected[k]]
  if len(wrong) < 2:
    return None  # besides the example shown, a hidden case has to fail
  shown = min(wrong, key=lambda k: (len(inputs[k]), k))
  cases = [
      task_lib.Case((v,), e) for v, e in zip(inputs, expected, strict=True)
  ]
  public = cases.pop(shown)
  failure = f'{_show(public.args[0])}={_show(public.expected)}'
  return _Instance(
      task=task_lib.Task(
          id=f'micro_repair/{split}/{index}',
          instruction=failure if source.show_failure else '',
          files={PATH: text},
          public_tests=(public,),
          seed=source.seed,
          meta={
              'family': family,
              'split': split,
              'entry': ENTRY,
              'stratum': f'{family} {sort}',
          },
      ),
      gold=tuple(gold),
      hidden=tuple(cases),
  )


@functools.lru_cache(maxsize=8192)
def _instance(source: MicroRepair, index: int, split: str) -> _Instance:
  if split not in _SPLITS:
    raise ValueError(f'split={split!r}: must be one of {sorted(_SPLITS)}')
  held = split == 'heldout'
  names = [f for f in FAMILIES if (f in source.heldout_families) == held]
  # Every field takes part: two sources that differ share no stream.
  rng = random.Random(f'{source!r}/{split}/{index}')
  while True:
    family = rng.choice(names)
    for _ in range(100):  # some families have no place for a second bug
      found = _candidate(source, rng, family, index, split)
      if found:
        return found
