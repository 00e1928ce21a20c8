"""Rubrics: what a judge is asked, as data.

A file in YAML or JSON:

  name: repair
  items:
  - id: minimal
    question: Does the change touch only what the task needs?
    weight: 2
    choices: {rewrite: 0, more than needed: 0.5, minimal: 1}

Every item is a question with a few answers in order, worst or best first. A
judge is asked one item at a time, and picks a word, not a number.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from typing import Any

import yaml

LEAST_WEIGHT = 0.8  # share of the weight that has to be answered


@dataclasses.dataclass(frozen=True)
class Item:
  """One question.

  Attributes:
    id: names the item in metrics.
    question: text of the question.
    choices: answer -> score in [0, 1]; strictly rising or falling.
    weight: weight of the item in the mean.
  """

  id: str
  question: str
  choices: Mapping[str, float]
  weight: float = 1.0

  def __post_init__(self):
    scores = list(self.choices.values())
    rising = scores == sorted(set(scores))
    if len(scores) < 2 or not (rising or scores[::-1] == sorted(set(scores))):
      raise ValueError(
          f'item {self.id}: choices={scores}: want two or more, in order'
      )
    if not all(0 <= s <= 1 for s in scores):
      raise ValueError(f'item {self.id}: choices={scores}: must be in [0, 1]')
    if len({c.strip().casefold() for c in self.choices}) < len(scores):
      raise ValueError(f'item {self.id}: two choices differ only in case')
    if not 0 < self.weight < math.inf:
      raise ValueError(f'item {self.id}: weight={self.weight}: must be above 0')


@dataclasses.dataclass(frozen=True)
class Rubric:
  """The items of a file.

  Attributes:
    name: name for people.
    items: questions with distinct ids.
  """

  name: str
  items: tuple[Item, ...]

  @property
  def digest(self) -> str:
    """Digest of all that decides what is asked; 12 hex digits."""
    text = json.dumps(dataclasses.asdict(self))
    return hashlib.sha256(text.encode()).hexdigest()[:12]

  def score(self, scores: Mapping[str, float]) -> float | None:
    """Weighted mean of the items that have a score.

    Args:
      scores: item id -> score.

    Returns:
      None if less than 80% of the weight was answered: what is missing might
      be what is bad.
    """
    known = {i.id: i.weight for i in self.items if i.id in scores}
    answered, whole = sum(known.values()), sum(i.weight for i in self.items)
    if answered < LEAST_WEIGHT * whole * (1 - 1e-9):
      return None
    return sum(w * scores[i] for i, w in known.items()) / answered


def _item(entry: Any) -> Item:
  names = {f.name for f in dataclasses.fields(Item)}
  if (
      not isinstance(entry, dict)
      or not {'id', 'question', 'choices'} <= set(entry) <= names
  ):
    raise ValueError(f'{entry!r}: an item has id, question, choices, weight')
  if not isinstance(entry['choices'], dict):
    raise ValueError(f'item {entry["id"]}: choices: want answer: score')
  choices = {str(k): float(v) for k, v in entry['choices'].items()}
  weight = float(entry.get('weight', 1.0))
  return Item(str(entry['id']), str(entry['question']), choices, weight)


@functools.lru_cache(maxsize=32)
def load(path: str) -> Rubric:
  """Reads a rubric.

  Raises:
    ValueError: no such file, or it is no rubric.
  """
  try:
    # Every scalar as text: YAML would turn the answer `no` into False.
    found = yaml.load(pathlib.Path(path).read_text('utf-8'), yaml.BaseLoader)
    if not isinstance(found, dict) or set(found) != {'name', 'items'}:
      raise ValueError('a rubric has a name and items')
    if not isinstance(found['items'], list) or not found['items']:
      raise ValueError('items: want a list of at least one')
    items = tuple(map(_item, found['items']))
    if len({i.id for i in items}) < len(items):
      raise ValueError('two items have the same id')
    return Rubric(str(found['name']), items)
  except (OSError, yaml.YAMLError, TypeError, ValueError) as e:
    raise ValueError(f'rubric={path}: {e}') from e
