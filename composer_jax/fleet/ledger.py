"""Exactly-once ledger: what was consumed, and enough to replay it.

The ledger is saved in the SAME checkpoint as the weights that trained on what
it records: a restored run knows exactly which prompts those weights have
seen. A result that was accepted but not recorded here never happened.

Records of steps grow with the run. They move to files (see `history`), and the
ledger keeps sums over them and the head of their chain.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
import dataclasses
import functools
import hashlib
import json

import numpy as np

from composer_jax import trace
from composer_jax.fleet import admission
from composer_jax.fleet import facts

_FORMAT = 3
_WHOLE = 2  # the format that had the records of all steps
_LINEAGE = 4096  # versions whose digests are kept; no rollout is so stale


@dataclasses.dataclass(frozen=True)
class RolloutRecord:
  """One member of a consumed group.

  Attributes:
    member: number in the group.
    seed: seed of the rollout.
    outcome: 'valid' | 'infra' | 'untrainable' (the task's prompt does not fit)
      | 'refused' | 'lost'.
    spans: per segment, (weight version, tokens in a row with it).
  """

  member: int
  seed: int
  outcome: str
  spans: tuple[facts.Runs, ...]


@dataclasses.dataclass(frozen=True)
class GroupRecord:
  """A consumed group.

  Attributes:
    prompt: index in the run.
    version: weight version published when it was admitted.
    fault: '' if it was trained, else why not.
    sha256: digest of its members' payload digests, in member order.
    rollouts: records in member order.
    task: index in the training split; -1 if no rollout was valid.
    stratum: kind of the task, for the curriculum.
    mean: mean reward of the valid rollouts.
    variance: variance of their rewards.
  """

  prompt: int
  version: int
  fault: str
  sha256: str
  rollouts: tuple[RolloutRecord, ...]
  task: int
  stratum: str
  mean: float
  variance: float

  @property
  def judged(self) -> bool:
    """The rewards say something: too few of them are nobody's failure."""
    return self.fault != 'too_few'


@dataclasses.dataclass(frozen=True)
class StepRecord:
  """One optimizer step.

  Attributes:
    version: number of the weights it started from.
    digest: digest of those weights; '' if they were never published.
    trained: groups in the order of the batch.
    untrained: groups consumed without training.
  """

  version: int
  digest: str
  trained: tuple[GroupRecord, ...]
  untrained: tuple[GroupRecord, ...]


@dataclasses.dataclass(frozen=True)
class Ledger:
  """What a run has consumed so far; append-only, updated by `commit`.

  Attributes:
    cursor: results up to here are settled; re-read the stream after it.
    next_prompt: smallest prompt never admitted.
    consumed: half-open ranges of prompts, ascending, never adjacent.
    in_flight: (prompt, version at admission) admitted but not consumed.
    tasks: ranges of the training tasks that groups were played on.
    done: optimizer steps.
    digests: (version, digest) of the weights that steps started from, for the
      newest ones.
    head: sha256 of the newest file of records, hex; '' if there is none.
    recent: records of the newest steps, those that are in no file yet.
  """

  cursor: int = 0
  next_prompt: int = 0
  consumed: facts.Runs = ()
  in_flight: facts.Runs = ()
  tasks: facts.Runs = ()
  done: int = 0
  digests: tuple[tuple[int, str], ...] = ()
  head: str = ''
  recent: tuple[StepRecord, ...] = ()


def _merge(ranges: facts.Runs, numbers: Iterable[int]) -> facts.Runs:
  """Adds numbers to half-open ranges; refuses one that is in already."""
  out: list[list[int]] = []
  for low, high in sorted((*ranges, *((n, n + 1) for n in numbers))):
    if out and low < out[-1][1]:
      raise ValueError(f'prompt={low}: consumed twice')
    if out and low == out[-1][1]:
      out[-1][1] = high
    else:
      out.append([low, high])
  return tuple((low, high) for low, high in out)


def _within(number: int, known: facts.Runs) -> bool:
  at = bisect.bisect_right(known, number, key=lambda pair: pair[0])
  return at > 0 and number < known[at - 1][1]


def group_digest(group: admission.Group) -> str:
  """sha256 over the payload digests of the members, in member order."""
  lines = [m.sha256 + '\n' for _, m in sorted(group.members.items())]
  return hashlib.sha256(''.join(lines).encode()).hexdigest()


def record(group: admission.Group) -> GroupRecord:
  """What the ledger keeps of a group."""
  rollouts = []
  for number, m in sorted(group.members.items()):
    windows = () if m.facts is None else m.facts.windows
    spans = tuple(w.spans for w in windows)
    rollouts.append(RolloutRecord(number, m.seed, m.outcome, spans))
  valid = group.rollouts
  rewards = [t.reward for t in valid] or [0.0]
  meta = valid[0].meta if valid else {}
  return GroupRecord(
      group.prompt,
      group.version,
      group.fault,
      group_digest(group),
      tuple(rollouts),
      int(meta.get('index', -1)),
      meta.get('stratum', ''),
      float(np.mean(rewards)),
      float(np.var(rewards)),
  )


def commit(ledger: Ledger, batch: admission.Consumed, digest: str) -> Ledger:
  """The ledger after the step that consumes `batch`.

  Args:
    ledger: what was consumed before the step.
    batch: what the step consumes.
    digest: digest of the weights the step starts from.

  Raises:
    ValueError: a prompt or a task is consumed twice, or the step is not the
      next one.
  """
  if batch.step != ledger.done:
    raise ValueError(f'step={batch.step}: next is {ledger.done}')
  step = StepRecord(
      batch.version,
      digest,
      tuple(map(record, batch.groups)),
      tuple(map(record, batch.untrained)),
  )
  for group in step.trained:
    if _within(group.task, ledger.tasks):
      raise ValueError(f'task={group.task}: trained on twice')
  return dataclasses.replace(
      _extend(ledger, step),
      cursor=batch.cursor,
      next_prompt=batch.next_prompt,
      in_flight=batch.in_flight,
  )


def _extend(ledger: Ledger, step: StepRecord) -> Ledger:
  """The ledger with a step's record and all that follows from it."""
  groups = step.trained + step.untrained
  tasks = {g.task for g in groups if g.task >= 0}
  new = [t for t in tasks if not _within(t, ledger.tasks)]
  return dataclasses.replace(
      ledger,
      consumed=_merge(ledger.consumed, (g.prompt for g in groups)),
      tasks=_merge(ledger.tasks, new),
      done=ledger.done + 1,
      digests=(*ledger.digests, (step.version, step.digest))[-_LINEAGE:],
      recent=(*ledger.recent, step),
  )


def played(ledger: Ledger) -> list[int]:
  """Indices of the training tasks that groups were played on, ascending."""
  return [t for low, high in ledger.tasks for t in range(low, high)]


def resume(
    ledger: Ledger, pacing: admission.Pacing, version: trace.WeightVersion
) -> admission.Assembly:
  """Admission state of a run that starts, or restarts, from a ledger.

  Groups in flight stay admitted: offer their tasks again (same ids, same
  seeds), then go on from `ledger.next_prompt`.

  Args:
    ledger: empty for a new run.
    pacing: limits.
    version: the trainer's weights, which must be the first to be published.
  """
  return admission.Assembly(
      pacing=pacing,
      base=version.step - ledger.done,
      published=version.step,
      steps=ledger.done,
      next_prompt=ledger.next_prompt,
      cursor=ledger.cursor,
      groups={p: admission.Group(p, v) for p, v in ledger.in_flight},
      digests=dict(ledger.digests) | {version.step: version.digest}
      # A run that was killed may have published the same weights already.
      | {v + 1: version.digest for v, _ in ledger.digests[-1:]},
  )


def lost(ledger: Ledger) -> tuple[int, ...]:
  """Admitted prompts neither consumed nor in flight: must be empty."""
  seen = {p for p, _ in ledger.in_flight}
  for low, high in ledger.consumed:
    seen.update(range(low, high))
  return tuple(p for p in range(ledger.next_prompt) if p not in seen)


def step_rows(step: StepRecord) -> list:
  """A record as JSON values; its fields, and theirs, are positional."""

  def rows(groups):
    return [
        [
            *list(vars(g).values())[:4],
            [[r.member, r.seed, r.outcome, r.spans] for r in g.rollouts],
            *list(vars(g).values())[5:],
        ]
        for g in groups
    ]

  return [step.version, step.digest, rows(step.trained), rows(step.untrained)]


def _pairs(rows) -> tuple:
  return tuple((a, b) for a, b in rows)


def _group(row) -> GroupRecord:
  prompt, version, fault, sha256, rollouts, *rest = row
  records = tuple(
      RolloutRecord(number, seed, outcome, tuple(map(_pairs, spans)))
      for number, seed, outcome, spans in rollouts
  )
  return GroupRecord(prompt, version, fault, sha256, records, *rest)


def step_of(rows: list) -> StepRecord:
  """Inverse of `step_rows`."""
  version, digest, a, b = rows
  return StepRecord(
      version, digest, tuple(map(_group, a)), tuple(map(_group, b))
  )


def to_json(ledger: Ledger) -> str:
  """Compact text."""
  data = {
      'format': _FORMAT,
      **vars(ledger),
      'recent': list(map(step_rows, ledger.recent)),
  }
  return json.dumps(data, separators=(',', ':'))


def from_json(text: str) -> Ledger:
  """Inverse of `to_json`; also reads the ledger that had all records in it.

  Raises:
    ValueError: another format, or the records contradict the ranges.
  """
  data = json.loads(text)
  if (form := data.pop('format')) not in (_WHOLE, _FORMAT):
    raise ValueError(f'ledger format={form}: this reads {_FORMAT}')
  rows = data.pop('steps' if form == _WHOLE else 'recent')
  recent = tuple(map(step_of, rows))
  for name in ('consumed', 'in_flight', 'tasks', 'digests'):
    data[name] = _pairs(data.get(name, ()))
  ledger = Ledger(**data, recent=recent)
  if form == _WHOLE:
    sums = _sums(recent)
    ledger = dataclasses.replace(
        ledger, tasks=sums.tasks, done=sums.done, digests=sums.digests
    )
  if not ledger.head:
    check(ledger, recent)
  if lost(ledger):
    raise ValueError('ledger: its ranges and next_prompt disagree')
  return ledger


def _sums(steps: Iterable[StepRecord]) -> Ledger:
  return functools.reduce(_extend, steps, Ledger())


def check(ledger: Ledger, steps: Iterable[StepRecord]) -> None:
  """Refuses a ledger that is not the sum of its steps.

  Args:
    ledger: the ledger.
    steps: records of all its steps.

  Raises:
    ValueError: they disagree.
  """
  sums = _sums(steps)
  for name in ('done', 'consumed', 'tasks', 'digests'):
    if getattr(sums, name) != getattr(ledger, name):
      raise ValueError(f'ledger: its steps and its {name} disagree')
