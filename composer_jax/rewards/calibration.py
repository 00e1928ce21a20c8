"""How far a judge can be trusted: agreement with itself and with people.

Labeled work is a file of JSON lines:

  {"id": "1", "kind": "sample", "version": "12",
   "evidence": {"task": "...", "changes": "..."}, "labels": {"minimal": "yes"}}

`kind` is gold, empty, hack or sample; `version` says which weights did the
work; labels are what a person answered and may be missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import json
import pathlib
from typing import Any

from composer_jax.rewards import judge as judge_lib
from composer_jax.rewards import rubric as rubric_lib
import numpy as np

KINDS = ('gold', 'empty', 'hack', 'sample')


@dataclasses.dataclass(frozen=True)
class Row:
  """One piece of labeled work.

  Attributes:
    id: name that no other row of its file has.
    kind: one of `KINDS`.
    version: version of the weights that did it; '' if none did.
    evidence: what the judge is shown.
    labels: item id -> the right answer.
  """

  id: str
  kind: str
  version: str
  evidence: Mapping[str, str]
  labels: Mapping[str, str]


def _row(entry: Any, rubric: rubric_lib.Rubric) -> Row:
  evidence, labels = entry['evidence'], entry.get('labels', {})
  kind = entry.get('kind', 'sample')
  if kind not in KINDS:
    raise ValueError(f'kind={kind!r}: must be one of {", ".join(KINDS)}')
  choices = {item.id: item.choices for item in rubric.items}
  for name, label in labels.items():
    if label not in choices.get(name, ()):
      raise ValueError(f'labels.{name}={label!r}: not in the rubric')
  if not all(isinstance(text, str) for text in evidence.values()):
    raise ValueError('evidence: want name: text')
  version = str(entry.get('version', ''))
  return Row(str(entry['id']), kind, version, evidence, labels)


def load(path: str, rubric: rubric_lib.Rubric) -> list[Row]:
  """Reads labeled work.

  Raises:
    ValueError: no such file, or a line is not what it should be.
  """
  try:
    lines = pathlib.Path(path).read_text('utf-8').splitlines()
  except (OSError, UnicodeDecodeError) as e:
    raise ValueError(f'labels={path}: {e}') from e
  rows = []
  for number, line in enumerate(lines, 1):
    if line.strip():
      try:
        rows.append(_row(json.loads(line), rubric))
      except (ValueError, LookupError, TypeError, AttributeError) as e:
        raise ValueError(f'labels={path}: line {number}: {e!r}') from e
  if not rows or len({r.id for r in rows}) < len(rows):
    raise ValueError(f'labels={path}: want lines with distinct ids')
  return rows


async def ask(
    judge: judge_lib.Judge,
    rows: Sequence[Row],
    *,
    repeats: int,
    at_once: int = 8,
    ended: Callable[[], None] = lambda: None,
) -> list[list[judge_lib.Judgement]]:
  """Shows every row to the judge, several times.

  Args:
    judge: judge to be calibrated.
    rows: labeled work.
    repeats: judgements of each row.
    at_once: rows in flight.
    ended: called after every judgement.
  """
  free = asyncio.Semaphore(at_once)

  async def one(row: Row) -> judge_lib.Judgement:
    async with free:
      found = await judge.read(row.evidence)
    ended()
    return found

  try:
    found = await asyncio.gather(
        *(one(r) for r in rows for _ in range(repeats))
    )
  finally:
    await judge_lib.close()
  return [found[i : i + repeats] for i in range(0, len(found), repeats)]


def kappa(pairs: Sequence[tuple[str, str]]) -> float | None:
  """Cohen's kappa of (given, right) answers.

  Cohen, "A coefficient of agreement for nominal scales", 1960: agreement
  beyond what two raters with these frequencies would have by chance, as a
  share of all that there could be. None without pairs, or if both only ever
  gave one and the same answer.
  """
  if not pairs:
    return None
  n = len(pairs)
  agreed = sum(a == b for a, b in pairs) / n
  chance = 0.0
  for answer in {a for pair in pairs for a in pair}:
    given = sum(a == answer for a, _ in pairs) / n
    chance += given * sum(b == answer for _, b in pairs) / n
  return None if chance == 1 else (agreed - chance) / (1 - chance)


def _mean(values: Sequence[float]) -> float | None:
  return float(np.mean(values)) if values else None


def _correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
  if len(a) < 2 or not np.std(a) or not np.std(b):
    return None
  return float(np.corrcoef(a, b)[0, 1])


def report(
    rubric: rubric_lib.Rubric,
    rows: Sequence[Row],
    judgements: Sequence[Sequence[judge_lib.Judgement]],
    judge_version: str,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """All figures, as plain JSON.

  Args:
    rubric: rubric that was judged by.
    rows: labeled work.
    judgements: repeats of each row.
    judge_version: `Judge.version`.
    earlier: a report of the same work by another judge, or by this one
      before.

  Returns:
    judge; rows and unanswered (share of judgements without a score); items:
    id -> agreement (of two repeats, in how many pairs), kappa against labels,
    labels, mean; kinds and versions: name -> mean score; correlation: pairs of
    items whose answers rise and fall together; scores: row id -> mean score;
    drift: from the earlier report, mean change and share of rows that moved.
  """
  every = [j for repeats in judgements for j in repeats]
  items = {}
  for item in rubric.items:
    agreed = [
        a.verdicts[item.id].choice == b.verdicts[item.id].choice
        for repeats in judgements
        for a, b in itertools.combinations(repeats, 2)
        if item.id in a.verdicts and item.id in b.verdicts
    ]
    labeled = [
        (j.verdicts[item.id].choice, row.labels[item.id])
        for row, repeats in zip(rows, judgements, strict=True)
        for j in repeats[:1]  # repeats are not independent
        if item.id in j.verdicts and item.id in row.labels
    ]
    given = [j.verdicts[item.id].score for j in every if item.id in j.verdicts]
    items[item.id] = {
        'agreement': _mean(agreed),
        'kappa': kappa(labeled),
        'labels': len(labeled),
        'mean': _mean(given),
    }
  scores = {}
  for row, repeats in zip(rows, judgements, strict=True):
    scores[row.id] = _mean([j.score for j in repeats if j.score is not None])

  def means(key):
    groups: dict[str, list[float]] = {}
    for row in rows:
      if scores[row.id] is not None:
        groups.setdefault(key(row), []).append(scores[row.id])
    return {name: _mean(v) for name, v in sorted(groups.items()) if name}

  correlation = []
  for a, b in itertools.combinations([i.id for i in rubric.items], 2):
    both = [j.verdicts for j in every if a in j.verdicts and b in j.verdicts]
    r = _correlation([v[a].score for v in both], [v[b].score for v in both])
    correlation.append({'items': [a, b], 'r': r})
  return {
      'judge': judge_version,
      'rows': len(rows),
      'unanswered': float(np.mean([j.score is None for j in every])),
      'items': items,
      'kinds': means(lambda row: row.kind),
      'versions': means(lambda row: row.version),
      'correlation': correlation,
      'scores': scores,
      'drift': _drift(scores, earlier) if earlier else None,
  }


def _drift(
    scores: Mapping[str, float | None], earlier: Mapping[str, Any]
) -> dict[str, Any]:
  changes = [
      now - earlier['scores'][name]
      for name, now in scores.items()
      if now is not None and earlier['scores'].get(name) is not None
  ]
  return {
      'from': earlier['judge'],
      'rows': len(changes),
      'mean': _mean(changes),
      'moved': _mean([abs(c) > 1e-9 for c in changes]),
  }
