"""Pacing and group assembly: what may start, and what trains next.

The unit of pacing is a GROUP (one prompt, G rollouts); the unit of staleness
is a published weight version. Everything is a pure function of a frozen
`Assembly`; `Gate` (gate.py) holds the one mutable reference a run has.

Why one gate: a group counts from its admission until a step consumes it, also
while its results wait to be read. A second bounded queue anywhere would hold
groups that nobody counts, and the lag bound would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import hashlib

from composer_jax import config
from composer_jax import trace
from composer_jax.fleet import blobs as blobs_lib
from composer_jax.fleet import facts as facts_lib

_REFILL_BATCHES = 4  # default refill allowance of a step, in batches


def task_id(run: str, prompt: int, member: int) -> str:
  return f'{run}/{prompt}/{member}'


def parse_task_id(text: str) -> tuple[int, int]:
  """Returns (prompt index, member) of `run/prompt/member`."""
  _, prompt, member = text.rsplit('/', 2)
  return int(prompt), int(member)


def rollout_seed(run_seed: int, prompt: int, member: int) -> int:
  """uint32 seed of one rollout; the same for every attempt at it."""
  text = f'{run_seed}/{prompt}/{member}'.encode()
  return int.from_bytes(hashlib.sha256(text).digest()[:4], 'little')


@dataclasses.dataclass(frozen=True)
class Pacing:
  """How far rollouts may run ahead of the trainer.

  Attributes:
    groups_per_step: B, groups in a full batch.
    rollouts_per_group: G.
    max_staleness_versions: S; 0 is synchronous and strictly on-policy.
    max_refill_groups: untrainable groups replaced by new prompts per step;
      once they are spent, the step trains on what it has.
  """

  groups_per_step: int
  rollouts_per_group: int
  max_staleness_versions: int
  max_refill_groups: int

  def __post_init__(self):
    limits = {
        'groups_per_step': (1, 1 << 20),
        'rollouts_per_group': (1, 1 << 20),
        'max_staleness_versions': (0, 8),
        'max_refill_groups': (0, 1 << 20),
    }
    for name, (low, high) in limits.items():
      if not low <= getattr(self, name) <= high:
        raise ValueError(
            f'Pacing.{name}={getattr(self, name)}: must be in [{low}, {high}]'
        )

  @classmethod
  def of(cls, rl: config.RlConfig) -> Pacing:
    return cls(
        groups_per_step=rl.groups_per_step,
        rollouts_per_group=rl.rollouts_per_group,
        max_staleness_versions=rl.max_staleness_versions,
        max_refill_groups=_REFILL_BATCHES * rl.groups_per_step,
    )


@dataclasses.dataclass(frozen=True)
class Member:
  """The one result of a rollout.

  Attributes:
    cursor: position in the result stream just after it.
    seed: seed of the rollout.
    blob: its payload; None if it has none.
    facts: None if the rollout was lost or its result refused.
    refused: why ingest refused the result; '' if it did not.
  """

  cursor: int
  seed: int
  blob: blobs_lib.BlobRef | None
  facts: facts_lib.Facts | None
  refused: str = ''

  @property
  def sha256(self) -> str:
    """Digest of the payload, hex; '' if there is none."""
    return '' if self.blob is None else self.blob.sha256

  @property
  def valid(self) -> bool:
    return self.facts is not None and self.facts.valid

  @property
  def outcome(self) -> str:
    """'valid' | 'infra' | 'untrainable' | 'refused' | 'lost'."""
    if self.facts is not None:
      never = self.facts.stop is trace.StopReason.MAX_TOKENS
      if never and not (self.valid or self.facts.windows):
        return 'untrainable'
      return 'valid' if self.valid else 'infra'
    return 'refused' if self.refused else 'lost'


@dataclasses.dataclass(frozen=True)
class Group:
  """One prompt and the results of its members so far.

  Attributes:
    prompt: index of the prompt in the run; also its age: smaller is older.
    version: weight version that was published when it was admitted.
    members: member -> result.
  """

  prompt: int
  version: int
  members: Mapping[int, Member] = dataclasses.field(default_factory=dict)

  @property
  def rollouts(self) -> tuple[facts_lib.Facts, ...]:
    """Valid members, in member order: the ones that train."""
    return tuple(m.facts for _, m in sorted(self.members.items()) if m.valid)

  @property
  def fault(self) -> str:
    """Why a complete group cannot train, as `trace.fault`; '' if it can."""
    return trace.fault(self.rollouts)


@dataclasses.dataclass(frozen=True)
class Consumed:
  """What one optimizer step consumes.

  Attributes:
    step: 0-based number of the step.
    version: version of the weights it starts from.
    groups: trained, oldest prompt first; fewer than B if refills ran out,
      empty if there was nothing to learn at all.
    untrained: consumed without training, in prompt order.
    in_flight: (prompt, version at admission) of groups left for later steps.
    next_prompt: smallest prompt never admitted.
    cursor: results up to here are never needed again.
  """

  step: int
  version: int
  groups: tuple[Group, ...]
  untrained: tuple[Group, ...]
  in_flight: tuple[tuple[int, int], ...]
  next_prompt: int
  cursor: int


@dataclasses.dataclass(frozen=True)
class Assembly:
  """Frozen admission state of a run.

  Attributes:
    pacing: limits.
    base: version number of the weights that trained zero steps; versions may
      skip numbers over a restart, so it is not always zero.
    published: newest published version number.
    steps: batches taken.
    next_prompt: smallest prompt never admitted.
    cursor: position in the result stream.
    groups: prompt -> admitted group that no step has consumed.
    untrained: complete groups without a lesson, since the last batch.
    digests: version number -> digest of every version ever published.
    exhausted: the task source has no further prompt.
  """

  pacing: Pacing
  base: int
  published: int
  steps: int = 0
  next_prompt: int = 0
  cursor: int = 0
  groups: Mapping[int, Group] = dataclasses.field(default_factory=dict)
  untrained: tuple[Group, ...] = ()
  digests: Mapping[int, str] = dataclasses.field(default_factory=dict)
  exhausted: bool = False

  @property
  def finished(self) -> bool:
    """Nothing is left to take, now or later."""
    return self.exhausted and not self.groups and not self.untrained

  @property
  def complete(self) -> tuple[Group, ...]:
    """Groups with every result in, oldest first."""
    size = self.pacing.rollouts_per_group
    full = (g for g in self.groups.values() if len(g.members) == size)
    return tuple(sorted(full, key=lambda g: g.prompt))

  @property
  def headroom(self) -> int:
    """Groups that may be admitted now.

    A taken step counts B groups even if it was short, so that what it lacked
    cannot pile up as extra lag. Groups without a lesson are not counted while
    the refill allowance of the step lasts: their successors are admitted
    although the trainer still waits for a batch.
    """
    b = self.pacing.groups_per_step
    unfilled = max(0, len(self.untrained) - self.pacing.max_refill_groups)
    ready = len(self.complete)
    return headroom(
        published=self.published - self.base,
        max_staleness_versions=self.pacing.max_staleness_versions,
        groups_per_step=b,
        accepted=self.steps * b + ready + unfilled,
        in_flight=len(self.groups) - ready,
    )


def headroom(
    *,
    published: int,
    max_staleness_versions: int,
    groups_per_step: int,
    accepted: int,
    in_flight: int,
) -> int:
  """Groups that may start: (published + S + 1) * B - accepted - in_flight.

  Args:
    published: versions published since the run's first; 0 = initial weights.
    max_staleness_versions: S.
    groups_per_step: B.
    accepted: groups ever accepted for training, used or waiting.
    in_flight: groups pending or running.
  """
  allowed = (published + max_staleness_versions + 1) * groups_per_step
  return allowed - accepted - in_flight


def admit(state: Assembly, prompt: int) -> Assembly:
  """Admits the next prompt; the caller has checked `state.headroom`."""
  if prompt != state.next_prompt:
    raise ValueError(
        f'prompt={prompt}: prompts are admitted once and in order; next is'
        f' {state.next_prompt}'
    )
  group = Group(prompt, state.published)
  return dataclasses.replace(
      state,
      next_prompt=prompt + 1,
      groups={**state.groups, prompt: group},
  )


def publish(state: Assembly, version: trace.WeightVersion) -> Assembly:
  return dataclasses.replace(
      state,
      published=version.step,
      digests={**state.digests, version.step: version.digest},
  )


def exhaust(state: Assembly) -> Assembly:
  return dataclasses.replace(state, exhausted=True)


def add(state: Assembly, prompt: int, member: int, result: Member) -> Assembly:
  """Files a result. A result seen before, or of a consumed group, is dropped.

  A group whose last result this is either becomes ready for a batch or, if it
  has no lesson, leaves for `untrained`.
  """
  state = dataclasses.replace(state, cursor=max(state.cursor, result.cursor))
  group = state.groups.get(prompt)
  if group is None or member in group.members:
    return state
  group = dataclasses.replace(group, members={**group.members, member: result})
  groups = {**state.groups, prompt: group}
  untrained = state.untrained
  if len(group.members) == state.pacing.rollouts_per_group and group.fault:
    del groups[prompt]
    untrained += (group,)
  return dataclasses.replace(state, groups=groups, untrained=untrained)


def take(state: Assembly) -> tuple[Consumed, Assembly] | None:
  """The next batch, or None while it has to wait.

  Full batches are the B oldest complete groups. A short batch is given only
  if waiting cannot help: nothing is in flight, and either the source is
  exhausted or refills are spent and the current weights are published.
  At S=0 a batch exists only when every admitted group is complete, and which
  prompts were admitted depends on results alone: the smallest n for which the
  first n prompts hold B lessons. Arrival order cannot change it.

  Raises:
    ValueError: ingest refused every result of the step, so the hosts are
      broken and training on would be silent nonsense.
  """
  if state.finished:
    return None
  ready = state.complete
  b = state.pacing.groups_per_step
  if len(ready) < b:
    current = state.published - state.base >= state.steps
    stuck = state.exhausted or (current and state.headroom <= 0)
    if len(ready) < len(state.groups) or not stuck:
      return None
  taken = ready[:b]
  chosen = {g.prompt for g in taken}
  left = {p: g for p, g in state.groups.items() if p not in chosen}
  untrained = tuple(sorted(state.untrained, key=lambda g: g.prompt))
  members = [m for g in taken + untrained for m in g.members.values()]
  refused = [m.refused for m in members if m.refused]
  if refused and len(refused) == len(members):
    raise ValueError(
        f'step {state.steps}: all {len(refused)} results were refused, the'
        f' first because {refused[0]}'
    )
  held = [m.cursor - 1 for g in left.values() for m in g.members.values()]
  batch = Consumed(
      step=state.steps,
      version=state.base + state.steps,
      groups=taken,
      untrained=untrained,
      in_flight=tuple((g.prompt, g.version) for g in left.values()),
      next_prompt=state.next_prompt,
      cursor=min(held, default=state.cursor),
  )
  after = dataclasses.replace(
      state, steps=state.steps + 1, groups=left, untrained=()
  )
  return batch, after


def put_back(
    state: Assembly, batch: Consumed, refused: Mapping[str, str]
) -> Assembly:
  """The state without the step that took `batch`, and without some results.

  Args:
    state: after `take`, whatever was added since.
    batch: what was taken; the next batch may be another.
    refused: task id -> why the result is refused after all.
  """
  groups = {g.prompt: g for g in batch.groups}
  state = dataclasses.replace(
      state,
      steps=state.steps - 1,
      groups={**groups, **state.groups},
      untrained=batch.untrained + state.untrained,
  )
  for task, why in refused.items():
    prompt, number = parse_task_id(task)
    group = state.groups[prompt]
    members = dict(group.members)
    bad = dataclasses.replace(members.pop(number), facts=None, refused=why)
    group = dataclasses.replace(group, members=members)
    state = dataclasses.replace(state, groups={**state.groups, prompt: group})
    state = add(state, prompt, number, bad)
  return state
