"""Exactly-once ledger: what was consumed, and enough to replay it.

The ledger is saved in the SAME checkpoint as the weights that trained on what
it records: a restored run knows exactly which prompts those weights have
seen. A result that was accepted but not recorded here never happened.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

import numpy as np

from composer_jax import trace
from composer_jax.fleet import admission
from composer_jax.fleet import facts

_FORMAT = 2


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
    steps: one record per optimizer step.
  """

  cursor: int = 0
  next_prompt: int = 0
  consumed: facts.Runs = ()
  in_flight: facts.Runs = ()
  steps: tuple[StepRecord, ...] = ()


def _merge(ranges: facts.Runs, prompts: list[int]) -> facts.Runs:
  """Adds prompts to half-open ranges; refuses one that is in already."""
  out: list[list[int]] = []
  for low, high in sorted((*ranges, *((p, p + 1) for p in prompts))):
    if out and low < out[-1][1]:
      raise ValueError(f'prompt={low}: consumed twice')
    if out and low == out[-1][1]:
      out[-1][1] = high
    else:
      out.append([low, high])
  return tuple((low, high) for low, high in out)


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
  if batch.step != len(ledger.steps):
    raise ValueError(f'step={batch.step}: next is {len(ledger.steps)}')
  groups = batch.groups + batch.untrained
  step = StepRecord(
      batch.version,
      digest,
      tuple(map(record, batch.groups)),
      tuple(map(record, batch.untrained)),
  )
  again = set(played(ledger)) & {g.task for g in step.trained}
  if again:
    raise ValueError(f'task={min(again)}: trained on twice')
  return Ledger(
      cursor=batch.cursor,
      next_prompt=batch.next_prompt,
      consumed=_merge(ledger.consumed, [g.prompt for g in groups]),
      in_flight=batch.in_flight,
      steps=(*ledger.steps, step),
  )


def played(ledger: Ledger) -> list[int]:
  """Indices of the training tasks that groups were played on."""
  records = (g for s in ledger.steps for g in (*s.trained, *s.untrained))
  return [g.task for g in records if g.task >= 0]


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
      base=version.step - len(ledger.steps),
      published=version.step,
      steps=len(ledger.steps),
      next_prompt=ledger.next_prompt,
      cursor=ledger.cursor,
      groups={p: admission.Group(p, v) for p, v in ledger.in_flight},
      digests={s.version: s.digest for s in ledger.steps}
      | {version.step: version.digest}
      # A run that was killed may have published the same weights already.
      | {s.version + 1: version.digest for s in ledger.steps[-1:]},
  )


def lost(ledger: Ledger) -> tuple[int, ...]:
  """Admitted prompts neither consumed nor in flight: must be empty."""
  seen = {p for p, _ in ledger.in_flight}
  for low, high in ledger.consumed:
    seen.update(range(low, high))
  return tuple(p for p in range(ledger.next_prompt) if p not in seen)


def to_json(ledger: Ledger) -> str:
  """Compact text; fields of records are positional."""
  return json.dumps(
      {'format': _FORMAT, **vars(ledger)},
      default=lambda record: list(vars(record).values()),
      separators=(',', ':'),
  )


def _pairs(rows) -> facts.Runs:
  return tuple((a, b) for a, b in rows)


def _group(row) -> GroupRecord:
  prompt, version, fault, sha256, rollouts, *rest = row
  records = tuple(
      RolloutRecord(number, seed, outcome, tuple(map(_pairs, spans)))
      for number, seed, outcome, spans in rollouts
  )
  return GroupRecord(prompt, version, fault, sha256, records, *rest)


def from_json(text: str) -> Ledger:
  """Inverse of `to_json`.

  Raises:
    ValueError: another format, or the records contradict the ranges.
  """
  data = json.loads(text)
  if data['format'] != _FORMAT:
    raise ValueError(f'ledger format={data["format"]}: this reads {_FORMAT}')
  ledger = Ledger(
      cursor=data['cursor'],
      next_prompt=data['next_prompt'],
      consumed=_pairs(data['consumed']),
      in_flight=_pairs(data['in_flight']),
      steps=tuple(
          StepRecord(
              version, digest, tuple(map(_group, a)), tuple(map(_group, b))
          )
          for version, digest, a, b in data['steps']
      ),
  )
  recorded = [
      g.prompt for s in ledger.steps for g in (*s.trained, *s.untrained)
  ]
  if _merge((), recorded) != ledger.consumed or lost(ledger):
    raise ValueError('ledger: its steps and its consumed ranges disagree')
  return ledger
