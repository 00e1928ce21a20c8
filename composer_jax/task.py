"""What a task is, and where tasks come from.

A `Task` holds only what the policy may see. The hidden cases that decide its
reward are asked for separately, so that nothing which runs or prompts a model
can carry them by accident.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import hashlib
import json
import random
from typing import Any, Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True)
class Case:
  """One call of the entry function and the value it must return."""

  args: tuple[Any, ...]
  expected: Any


@dataclasses.dataclass(frozen=True)
class Suite:
  """Tests of a repository, and which of them decide.

  Attributes:
    files: path -> text of the tests' modules; restored for every run.
    modules: names of the modules that hold tests.
    fail_to_pass: ids of tests that fail on the task's files.
    pass_to_pass: ids of tests that pass on them and have to go on doing so.
    allowed: constructs of the reference solution that would be suspicious
      otherwise, with their counts; see `suspicion`.
  """

  files: Mapping[str, str]
  modules: tuple[str, ...]
  fail_to_pass: tuple[str, ...]
  pass_to_pass: tuple[str, ...] = ()
  allowed: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def ids(self) -> tuple[str, ...]:
    return self.fail_to_pass + self.pass_to_pass


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one execution of a submission may use.

  Attributes:
    cpu_seconds: processor time; the limit that normally bites.
    wall_seconds: elapsed time; generous, because machines are shared.
  """

  cpu_seconds: float = 0.1
  wall_seconds: float = 4.0


@dataclasses.dataclass(frozen=True)
class Task:
  """A problem as the policy sees it.

  Attributes:
    id: unique within its source.
    instruction: what to do, in words or as a failing example.
    files: path -> text the episode starts from.
    public_tests: what the `run` tool executes: cases of one function, or a
      suite.
    limits: per-execution budget.
    seed: seed of the source that made it.
    meta: facts for metrics (`family`, `split`), `entry`, the function name, and
      `stratum`, tasks about as hard as each other (see `curriculum`).
  """

  id: str
  instruction: str
  files: Mapping[str, str]
  public_tests: tuple[Case, ...] | Suite
  limits: Limits = Limits()
  seed: int = 0
  meta: Mapping[str, str] = dataclasses.field(default_factory=dict)


class TaskSource(Protocol):
  """Deterministic supply of tasks: same (seed, split, index), same task."""

  def task(self, index: int, split: str) -> Task:
    """Returns task number `index` of a split; IndexError after the last."""

  def hidden(self, task: Task) -> tuple[Case, ...] | Suite:
    """Returns the tests that decide the reward; never shown to the policy."""

  def fingerprint(self, task: Task) -> str:
    """Returns a hash of the instance; equal means "the same problem"."""

  def demo(self, task: Task, rng: random.Random) -> list[Any]:
    """Returns tool calls (`tools`) in the right form, never a right answer."""

  def chance(self, task: Task) -> float:
    """Returns the probability that one random legal answer is right."""


@runtime_checkable
class DemoWindows(Protocol):
  """A source whose demonstrations are windows from anywhere in an episode."""

  def demo_window(
      self, task: Task, rng: random.Random, renderer: Any
  ) -> list[tuple[list[int], bool]]:
    """Returns (ids, trained) in order; right in form, as with `demo`."""


def fingerprint(files: Mapping[str, str], cases: tuple[Case, ...]) -> str:
  """Hash of an instance: its files and all its cases, not its name."""
  content = [
      sorted(files.items()),
      [[list(c.args), c.expected] for c in cases],
  ]
  return hashlib.sha256(json.dumps(content).encode()).hexdigest()
