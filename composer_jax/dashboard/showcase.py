"""Tasks answered before and after RL, ready to be drawn."""

from __future__ import annotations

from collections.abc import Mapping
import math
import re
from typing import Any

from composer_jax.dashboard import data

# A token's tint is full at this change of its log-probability, in nats.
FULL_TINT_NATS = 3.0
# Of a longer answer, a token shows its figures only when it is pointed at.
_SHORT_TOKENS = 48
_LAYERS = 6  # whose experts are shown
_SPECIAL = re.compile(r'<\|([^|]*)\|>')


def _percent(logp: float) -> str:
  """A probability that is never rounded to certain or impossible."""
  p = 100 * math.exp(logp)
  if p < 1:
    return '<1%'
  return '>99%' if p > 99 else f'{p:.0f}%'


def listing(prompt: str) -> list[tuple[str, str]]:
  """A prompt as lines of (special token before it, text), blank ones apart."""
  first, *rest = _SPECIAL.split(prompt)
  lines = [('', first), *zip(rest[::2], rest[1::2], strict=True)]
  return [(mark, text) for mark, text in lines if text]


def token(record: Mapping[str, Any]) -> dict[str, Any]:
  """One token of an answer: its text, tint and figures."""
  text, special = record['text'], _SPECIAL.fullmatch(record['text'])
  out = {'text': special[1] if special else text, 'figures': []}
  kinds = ['special'] if special else []
  before, after = record.get('logp_before'), record.get('logp_after')
  if not record.get('sampled') or before is None or after is None:
    return out | {'kind': ' '.join(['given', *kinds])}
  kinds += ['nl'] if '\n' in text and not text.strip() else []
  change = after - before
  kinds.append('up' if change >= 0 else 'down')
  strength = 0.75 * min(1.0, abs(change) / FULL_TINT_NATS)
  experts = record.get('experts') or []
  return out | {
      'kind': ' '.join(kinds),
      'strength': round(strength, 3),
      'figures': [_percent(before), _percent(after), f'{change:+.2f}']
      + [' '.join(map(str, ids)) for ids in experts[:_LAYERS]],
      'title': f'log-prob {before:.3f} to {after:.3f}, experts {experts}',
  }


def answer(side: Mapping[str, Any]) -> dict[str, Any]:
  """What followed the prompt: from the first sampled token on."""
  records = list(side.get('tokens', ()))
  while records and not records[0].get('sampled'):
    del records[0]
  tokens = [token(r) for r in records]
  layers = max((len(t['figures']) - 3 for t in tokens), default=0)
  names = ['p before', 'p after', 'Δ nats']
  return {
      'reward': side.get('reward'),
      'tokens': tokens,
      'long': len(tokens) > _SHORT_TOKENS,
      'names': names + [f'layer {i}' for i in range(layers)],
  }


def build(run: data.RunData) -> list[dict[str, Any]]:
  """The tasks of `showcase.json`, with both answers of each."""
  return [
      {
          'task_id': task['task_id'],
          'family': task.get('family', ''),
          'listing': listing(task['prompt']),
          'sides': [
              (name, answer(task[key]))
              for name, key in (('Before RL', 'before'), ('After RL', 'after'))
              if task.get(key)
          ],
      }
      for task in run.showcase.get('tasks', ())
  ]
