"""Builds `report.html`: one page, no network, about one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
import json
import math
import os
import pathlib
from typing import Any

from composer_jax.dashboard import charts
from composer_jax.dashboard import data
from composer_jax.dashboard import sections
import jinja2

REPORT = 'report.html'
# A token's tint is full at this change of its log-probability, in nats.
_FULL_TINT_NATS = 3.0
_CHIPS = 16


@dataclasses.dataclass(frozen=True)
class Headline:
  """A figure before and after RL; `error` is of the difference."""

  name: str
  before: float
  after: float
  tasks: int | None
  note: str = ''

  @property
  def change(self) -> float:
    return self.after - self.before

  @property
  def error(self) -> float | None:
    errors = [
        sections.standard_error(p, self.tasks)
        for p in (self.before, self.after)
    ]
    return None if None in errors else math.hypot(*errors)

  @property
  def verdict(self) -> str:
    """'good' or 'bad' if the change is more than noise, else 'note'."""
    if abs(self.change) <= 2 * (self.error or 0.0):
      return 'note'
    return 'good' if self.change > 0 else 'bad'


@dataclasses.dataclass(frozen=True)
class Check:
  """A claim that a finished run must prove; `ok` is None if unknown."""

  name: str
  value: str
  ok: bool | None
  note: str


def _summary_pairs(
    summary: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
  """Finds every {before, after} of the summary, with its path."""
  for key, value in summary.items():
    if isinstance(value, dict):
      if {'before', 'after'} <= value.keys():
        yield (*path, key), value
      else:
        yield from _summary_pairs(value, (*path, key))


def headlines(run: data.Run) -> list[Headline]:
  """Pass@1 before and after RL, from the summary or the evaluations so far."""
  tasks = sections.evaluation_tasks(run)
  out = []
  for path, pair in _summary_pairs(run.summary):
    name = ' '.join(path)
    kind = 'greedy' if 'greedy' in name else 'sampled'
    group = 'Held-out families' if 'famil' in name else 'Held-out tasks'
    count = pair.get('tasks', tasks)
    out.append(
        Headline(f'{group}, {kind}', pair['before'], pair['after'], count)
    )
  if out:
    return out
  for prefix, group in sections.HELDOUT.items():
    for kind in ('sampled', 'greedy'):
      x, y = run.series('eval', f'{prefix}/pass1_{kind}')
      if x:
        note = f'so far, RL step {x[0]:g} to {x[-1]:g}'
        out.append(Headline(f'{group}, {kind}', y[0], y[-1], tasks, note))
  return out


def checks(run: data.Run) -> list[Check]:
  """The exact claims of the run: zeros that must be zeros."""
  s = run.summary
  audit, weights = s.get('audit', {}), s.get('weights', {})

  def zero(name, value, note):
    ok = None if value is None else value == 0
    text = 'not known yet' if value is None else repr(value)
    return Check(name, text, ok, note)

  _, same = run.series('rl', 'mismatch/kl_same_version')
  kl = s.get('mismatch_kl_same_version', max(map(abs, same), default=None))
  lost = s.get('lost_rollouts', run.last('rl').get('lost_rollouts'))
  tokens = audit.get('tokens')
  over = f' over {tokens:,} tokens' if tokens else ''
  return [
      zero(
          'Mismatch KL, same version',
          kl,
          'between trainer and rollout log-probs of the same weights',
      ),
      zero(
          'Audit, largest |Δ log-prob|',
          audit.get('max_abs_dlogp'),
          f'rollouts scored again under rebuilt weights{over}',
      ),
      zero(
          'Digest mismatches',
          weights.get('digest_mismatches'),
          'weights that did not arrive as they were sent',
      ),
      zero('Lost rollouts', lost, 'leased and never accounted for'),
  ]


def facts(run: data.Run) -> list[tuple[str, str]]:
  """Plain closing figures, those that exist."""
  s = run.summary
  out = []

  def add(name, value, form):
    if isinstance(value, (int, float)):
      out.append((name, form.format(value)))

  reward = s.get('train_reward', {})
  add('Train reward, first step', reward.get('first'), '{:.3f}')
  add('Train reward, last step', reward.get('last'), '{:.3f}')
  weights = s.get('weights', {})
  add('Weight versions published', weights.get('versions_published'), '{:,}')
  add(
      'Values changed per version',
      weights.get('mean_changed_fraction'),
      '{:.1%}',
  )
  add('Bits per changed value', weights.get('bits_per_changed'), '{:.2f}')
  staleness = s.get('staleness', {})
  add('Token staleness, mean', staleness.get('mean'), '{:.2f} versions')
  add('Token staleness, max', staleness.get('max'), '{:g} versions')
  speed = s.get('tokens_per_second', {})
  for role, value in speed.items():
    add(f'Tokens per second, {role}', value, '{:,.0f}')
  for phase, value in s.get('seconds', {}).items():
    add(f'Seconds, {phase}', value, '{:,.0f}')
  return out


def _tint(token: Mapping[str, Any]) -> tuple[str, float]:
  """Class and strength of a token's tint: how RL moved its log-prob."""
  before, after = token.get('logp_before'), token.get('logp_after')
  if not token.get('sampled') or before is None or after is None:
    return 'given', 0.0
  change = after - before
  strength = min(1.0, abs(change) / _FULL_TINT_NATS)
  return ('up' if change >= 0 else 'down'), round(0.75 * strength, 3)


def _expert_use(tokens: list[Mapping[str, Any]]) -> list[list[dict]]:
  """Per layer: the experts the sampled tokens used most, in order of id."""
  layers: list[dict[int, int]] = []
  for token in tokens:
    for layer, ids in enumerate(token.get('experts') or ()):
      if layer == len(layers):
        layers.append({})
      for expert in ids if token.get('sampled') else ():
        layers[layer][expert] = layers[layer].get(expert, 0) + 1
  out = []
  for counts in layers:
    total = sum(counts.values()) or 1
    most = sorted(counts, key=lambda e: (-counts[e], e))[:_CHIPS]
    peak = max(counts.values(), default=1)
    out.append(
        [
            {
                'id': e,
                'percent': round(100 * counts[e] / total),
                'strength': round(0.1 + 0.8 * counts[e] / peak, 2),
            }
            for e in sorted(most)
        ]
    )
  return out


def _side(side: Mapping[str, Any]) -> dict[str, Any]:
  """One answer: its tokens ready to be drawn."""
  tokens = []
  for token in side.get('tokens', ()):
    kind, strength = _tint(token)
    text = token['text']
    if kind != 'given' and '\n' in text and not text.strip():
      kind += ' nl'  # a tint alone would not be seen
    if text.startswith('<|') and text.endswith('|>'):
      # Given structure starts a line: that is how a person reads a prompt.
      kind += ' special start' if kind == 'given' and tokens else ' special'
    tokens.append(
        {
            'text': text,
            'kind': kind,
            'strength': strength,
            'before': token.get('logp_before'),
            'after': token.get('logp_after'),
            'experts': json.dumps(token.get('experts') or []),
        }
    )
  return {
      'reward': side.get('reward'),
      'submission': side.get('submission'),
      'tokens': tokens,
      'experts': _expert_use(side.get('tokens', ())),
  }


def _showcase(run: data.Run) -> list[dict[str, Any]]:
  return [
      {
          'task_id': task['task_id'],
          'family': task.get('family', ''),
          'prompt': task['prompt'],
          'sides': [
              (name, _side(task[key]))
              for name, key in (('Before RL', 'before'), ('After RL', 'after'))
              if task.get(key)
          ],
      }
      for task in run.showcase.get('tasks', ())
  ]


def flatten(value: Any, path: str = '') -> Iterator[tuple[str, str]]:
  """Rows of dotted path and value of nested json."""
  if isinstance(value, list) and any(isinstance(v, dict) for v in value):
    value = {str(i): v for i, v in enumerate(value)}
  if isinstance(value, dict) and value:
    for key, child in value.items():
      yield from flatten(child, f'{path}.{key}' if path else key)
  else:
    text = value if isinstance(value, str) else json.dumps(value)
    yield path, text


def state(run: data.Run) -> str:
  """One line: how far the run is."""
  done = [
      f'{phase} step {records[-1]["step"]:,}'
      for phase, records in run.records.items()
      if records and phase != 'eval'
  ]
  seconds = max(
      (r[-1].get('seconds', 0) for r in run.records.values() if r), default=0
  )
  head = 'Finished' if run.summary else 'Not finished'
  tail = f' after {seconds / 60:.1f} minutes' if seconds else ''
  return f'{head}: {", ".join(done)}{tail}' if done else head


def render(run: data.Run) -> str:
  """The page as text."""
  environment = jinja2.Environment(
      loader=jinja2.PackageLoader('composer_jax.dashboard'),
      autoescape=True,
      undefined=jinja2.StrictUndefined,
      trim_blocks=True,
      lstrip_blocks=True,
  )
  environment.filters['number'] = charts.number
  return environment.get_template('report.html.j2').render(
      name=run.config.get('name', run.workdir.name),
      seed=run.config.get('seed'),
      state=state(run),
      missing=run.missing,
      headlines=headlines(run),
      checks=checks(run),
      facts=facts(run),
      sections=sections.build(run),
      showcase=_showcase(run),
      full_tint=_FULL_TINT_NATS,
      command=run.manifest.get('command'),
      manifest=list(flatten(run.manifest)) if run.manifest else [],
      config=list(flatten(run.config)) if run.config else [],
  )


def build(workdir: str | os.PathLike[str]) -> pathlib.Path:
  """Writes `WORKDIR/report.html` from whatever the directory holds so far.

  Returns:
    Path of the page.

  Raises:
    ValueError: the directory holds no run.
  """
  run = data.load(workdir)
  path = run.workdir / REPORT
  part = path.with_suffix('.part')
  part.write_text(render(run), encoding='utf-8')
  os.replace(part, path)  # a browser never loads half a page
  return path
