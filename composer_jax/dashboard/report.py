"""Builds `report.html`: one page, no network, about one run."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import json
import math
import os
import pathlib
import re
from typing import Any

from composer_jax import atomic
from composer_jax.dashboard import charts
from composer_jax.dashboard import data
from composer_jax.dashboard import sections
from composer_jax.dashboard import showcase
import jinja2

REPORT = 'report.html'
# What the resolved config and the manifest say in short; [path] is a value.
_SETUP = {
    'Model': (
        '[model.layers] layers of width [model.embed], [model.experts] experts,'
        ' top [model.top_k]'
    ),
    'Loss': '[loss.type]',
    'Advantage': '[advantage.type]',
    'RL optimizer': '[rl_optimizer.type], learning rate [rl_optimizer.learning_rate]',
    'Tasks': '[tasks.type]',
    'One RL step': '[rl.groups_per_step] groups of [rl.rollouts_per_group] rollouts',
    'Staleness bound S': '[rl.max_staleness_versions] versions',
    'Commit': '[commit]',
    'Machine': '[machine], [processors] processors',
    'JAX': '[versions.jax]',
}


@dataclasses.dataclass(frozen=True)
class Headline:
  """A pass@1 before and after RL.

  Attributes:
    name: name of the tasks and how they were answered.
    before: pass@1 of the warm-started model.
    after: pass@1 of the newest model.
    tasks: how many were answered, if known.
    chance: what one random legal edit would score, if known.
    note: words on how far the run is.
  """

  name: str
  before: float
  after: float
  tasks: int | None
  chance: float | None = None
  note: str = ''

  @property
  def change(self) -> float:
    return self.after - self.before

  @property
  def error(self) -> float | None:
    """Standard error of the change."""
    errors = [
        sections.standard_error(p, self.tasks)
        for p in (self.before, self.after)
    ]
    return None if None in errors else math.hypot(*errors)

  @property
  def verdict(self) -> str:
    """'good' or 'bad' if the change is more than noise, else 'note'.

    A rise that does not end above chance by more than noise is not good.
    """
    if abs(self.change) <= 2 * (self.error or 0.0):
      return 'note'
    noise = 2 * (sections.standard_error(self.after, self.tasks) or 0.0)
    if self.change > 0 and self.after - noise <= (self.chance or -1.0):
      return 'note'
    return 'good' if self.change > 0 else 'bad'


@dataclasses.dataclass(frozen=True)
class Check:
  """A claim that a finished run must prove; `ok` is None if unknown."""

  name: str
  value: str
  ok: bool | None
  note: str


def _ends(
    run: data.RunData, prefix: str, kind: str
) -> tuple[float, float, str] | None:
  """(before, after, note) from the summary, or else from what was recorded."""
  if prefix == 'eval':
    pair = run.summary.get(f'heldout_pass1_{kind}')
  else:
    pair = run.summary.get(prefix, {}).get(kind)
  if pair:
    return pair['before'], pair['after'], ''
  x, y = run.series('eval', f'{prefix}/pass1_{kind}')
  if not x:
    return None
  note = f'so far, RL step {x[0]:g} to {x[-1]:g}'
  return y[0], y[-1], note if len(x) > 1 else 'so far before RL only'


def headlines(run: data.RunData) -> list[Headline]:
  """Pass@1 before and after RL, from the summary or the evaluations so far."""
  tasks, out = sections.evaluation_tasks(run), []
  for prefix, group in sections.HELDOUT.items():
    chance = sections.chance(run, prefix)
    for kind in ('sampled', 'greedy'):
      if ends := _ends(run, prefix, kind):
        before, after, note = ends
        name = f'{group}, {kind}'
        out.append(Headline(name, before, after, tasks, chance, note))
  return out


def checks(run: data.RunData) -> list[Check]:
  """The exact claims of the run: zeros that must be zeros."""
  s = run.summary
  audit, weights = s.get('audit', {}), s.get('weights', {})
  if not audit.get('tokens'):
    audit = {}  # nothing was compared

  def zero(name, value, note):
    ok = None if value is None else value == 0
    unknown = 'not recorded' if s else 'not known yet'
    text = unknown if value is None else repr(value)
    return Check(name, text, ok, note)

  def recorded(field, key, over):
    """The summary's figure; None if the steps that are known never had it."""
    _, values = run.series('rl', key)
    if not values and run.records.get('rl'):
      return None  # the sum of nothing is zero, but it proves nothing
    return s.get(field, over(map(abs, values)) if values else None)

  def count(values):
    return int(sum(values))

  fresh, total = sections.same_version(run)
  share = (
      f': {fresh:,} of {total:,} trained tokens ({fresh / total:.0%})'
      if total
      else ''
  )
  audited = (
      f': {audit["tokens"]:,} tokens of {audit["trajectories"]:,} rollouts'
      if audit
      else ''
  )
  versions = weights.get('versions_published')
  judged = count(run.series('rl', 'rollouts/valid')[1])
  return [
      zero(
          'Mismatch KL, same version',
          recorded('mismatch_kl_same_version', 'mismatch/kl_same_version', max),
          f'trainer against rollout, where the weights are the same{share}',
      ),
      zero(
          'Audit, largest |Δ log-prob|',
          audit.get('max_abs_dlogp'),
          'rollouts scored again by the trainer under weights rebuilt from the'
          f' delta store{audited}',
      ),
      zero(
          'Audit, expert choices that differ',
          audit.get('routing_differences'),
          'the same rollouts, routed again',
      ),
      zero(
          'Digest mismatches',
          weights.get('digest_mismatches'),
          'weights that did not arrive as they were sent'
          + (f', of {versions:,} versions' if versions else ''),
      ),
      zero(
          'Lost rollouts',
          recorded('lost_rollouts', 'lost_rollouts', count),
          'leased and never accounted for, or refused'
          + (f'; {judged:,} were judged' if judged else ''),
      ),
      zero(
          'Recompilations',
          recorded('recompilations', 'recompilations', count),
          'programs compiled after warm-up',
      ),
  ]


def facts(run: data.RunData) -> list[tuple[str, str]]:
  """Plain closing figures, those that exist."""
  s = run.summary
  out = []

  def add(name, value, form):
    if isinstance(value, (int, float)):
      out.append((name, form.format(value)))

  reward = s.get('train_reward', {})
  add('Train reward, first tenth of RL', reward.get('first'), '{:.3f}')
  add('Train reward, last tenth of RL', reward.get('last'), '{:.3f}')
  weights = s.get('weights', {})
  add(
      'Values changed per version',
      weights.get('mean_changed_fraction'),
      '{:.1%}',
  )
  add('Bits per changed value', weights.get('bits_per_changed'), '{:.2f}')
  add('Delta against all weights', weights.get('ratio'), '{:.1f}x smaller')
  staleness = s.get('staleness', {})
  add('Token staleness, mean', staleness.get('mean'), '{:.2f} versions')
  add('Token staleness, max', staleness.get('max'), '{:g} versions')
  speed = s.get('tokens_per_second', {})
  for role, value in speed.items():
    add(f'Tokens per second, {role}', value, '{:,.0f}')
  seconds = s.get('seconds', {})
  add('Mid-training and warm start', seconds.get('midtrain'), '{:,.0f} s')
  add('RL with its start-up', seconds.get('rl'), '{:,.0f} s')
  add('Evaluations', seconds.get('eval'), '{:,.0f} s')
  return out


def notes(run: data.RunData) -> list[str]:
  """What a reader of the headlines has to know."""
  out = [
      'Before: the warm-started model just before RL. ± is one standard error'
      ' of the difference, as if the two evaluations were independent; less'
      ' than two of them, or an end that is not clearly above chance, is left'
      ' gray.'
  ]
  if any(h.chance and h.before < h.chance for h in headlines(run)):
    out.append(
        'Chance: one random legal edit. The warm start begins below it on'
        ' purpose: its demonstrations show how to edit and never a right'
        ' edit.'
    )
  counts = run.summary.get('evaluation', {}).get('distinct_instances', {})
  if {'warmup', 'train'} <= counts.keys():
    out.append(
        'No task of an evaluation is among the'
        f' {counts["warmup"]:,} distinct tasks of the warm start or the'
        f' {counts["train"]:,} of RL (compared by hash of their content).'
    )
  return out


def setup(run: data.RunData) -> list[tuple[str, str]]:
  """The choices that make the run what it is, those that are known."""
  known = {**dict(flatten(run.manifest)), **dict(flatten(run.config))}

  def value(match):
    text = known[match[1]].rpartition(':')[2]  # of a type, the class alone
    return re.sub(r'(?<=^[0-9a-f]{10})[0-9a-f]{30}', '', text)  # of a commit

  out = []
  for name, text in _SETUP.items():
    if all(path in known for path in re.findall(r'\[(.+?)\]', text)):
      out.append((name, re.sub(r'\[(.+?)\]', value, text)))
  return out


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


def state(run: data.RunData) -> str:
  """One line: how far the run is."""
  done = [
      f'{records[-1]["step"]:,} steps of {data.phase_name(phase)}'
      for phase, records in run.records.items()
      if records and phase != 'eval'
  ]
  seconds = max(
      (r[-1].get('seconds', 0) for r in run.records.values() if r), default=0
  )
  head = 'Finished' if run.summary else 'Not finished'
  tail = f' after {seconds / 60:.1f} minutes' if seconds else ''
  return f'{head}: {", ".join(done)}{tail}' if done else head


def render(run: data.RunData) -> str:
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
      notes=notes(run),
      checks=checks(run),
      facts=facts(run),
      sections=sections.build(run),
      showcase=showcase.build(run),
      full_tint=showcase.FULL_TINT_NATS,
      command=run.manifest.get('command'),
      setup=setup(run),
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
  atomic.write(path, render(run))  # a browser never loads half a page
  return path
