"""The charts of the report, grouped: which figure is drawn how, and why."""

from __future__ import annotations

import math

from composer_jax.dashboard import behavior
from composer_jax.dashboard import cards
from composer_jax.dashboard import charts
from composer_jax.dashboard import data
from composer_jax.dashboard import timing

HELDOUT = {
    'eval': 'Held-out tasks',
    'heldout_families': 'Held-out families',
}
_CHANCE = {'eval': 'chance', 'heldout_families': 'chance_heldout_families'}


def standard_error(p: float, tasks: int | None) -> float | None:
  """Standard error of a share p of `tasks` independent tasks."""
  return math.sqrt(max(0.0, p * (1 - p)) / tasks) if tasks else None


def evaluation_tasks(run: data.RunData) -> int | None:
  """Tasks of one evaluation, from the config."""
  return run.config.get('evaluation', {}).get('tasks')


def chance(run: data.RunData, prefix: str) -> float | None:
  """Share of a `HELDOUT` split's tasks that one random legal edit solves."""
  return run.summary.get('evaluation', {}).get(_CHANCE[prefix])


def same_version(run: data.RunData) -> tuple[int, int]:
  """Trained tokens: those of the trainer's own version, and all of them."""
  same = total = 0.0
  for record in run.records.get('rl', ()):
    tokens = sum(record.get('staleness/histogram') or ())
    same += tokens * (record.get('mismatch/same_version_share') or 0.0)
    total += tokens
  return round(same), round(total)


def _reward(run: data.RunData) -> cards.Card:
  x, y = run.series('rl', 'reward/mean')
  window = max(1, min(20, len(y) // 10))
  best = run.series('rl', 'reward/best_of_group')

  def smooth(values):
    return charts.trailing_mean(values, window)

  chart = charts.lines(
      [
          charts.Series('each step', x, y, color=0, faint=True),
          charts.Series(f'mean of {window} steps', x, smooth(y), color=0),
          charts.Series('best of group', best[0], smooth(best[1]), color=2),
      ],
      x_label=cards.STEP,
      y_label='reward',
  )
  note = (
      'Mean reward of all rollouts of a step, trained or not, and of the best'
      f' rollout of each group (also mean of {window} steps).'
  )
  return cards.Card('Train reward and best of group', note, chart)


def _heldout(run: data.RunData, prefix: str, note: str) -> cards.Card:
  tasks = evaluation_tasks(run)
  series = []
  for color, kind in enumerate(('sampled', 'greedy')):
    x, y = run.series('eval', f'{prefix}/pass1_{kind}')
    error = [standard_error(p, tasks) for p in y] if tasks else None
    series.append(charts.Series(kind, x, y, error, color))
  level = chance(run, prefix)
  chart = charts.lines(
      series,
      x_label=cards.STEP,
      y_label='pass@1, share of tasks',
      levels={} if level is None else {'a random legal edit': level},
      high=1.0,
  )
  if tasks:
    note += f' Whiskers: ± 1 standard error, {tasks} tasks.'
  return cards.Card(f'{HELDOUT[prefix]}, pass@1', note, chart)


def _learning(run: data.RunData) -> list[cards.Card]:
  clip = run.config.get('rl_optimizer', {}).get('clip_norm')
  return [
      _reward(run),
      _heldout(run, 'eval', 'Tasks that are in neither warm start nor RL.'),
      _heldout(
          run,
          'heldout_families',
          'Function families seen in neither warm start nor RL; shown'
          ' whatever they say.',
      ),
      cards.Card(
          'Entropy',
          'Of the distribution that every trained token was drawn from.',
          cards.draw(run, {'entropy': 'entropy'}, 'nats per token'),
      ),
      cards.Card(
          'Groups without a signal',
          'All rollouts of such a group earned the same: it teaches nothing,'
          ' and another group is played in its place.',
          cards.draw(
              run,
              {'group/zero_variance_fraction': 'zero variance'},
              'share of groups',
              high=1.0,
          ),
      ),
      cards.Card(
          'Gradient norm',
          f'Before clipping at {clip:g}.' if clip else 'Before clipping.',
          cards.draw(run, {'grad_norm': 'gradient norm'}, 'norm'),
      ),
      *_segments(run),
  ]


def _segments(run: data.RunData) -> list[cards.Card]:
  """Charts of rollouts that went past their context window, if any did."""
  if not run.keys('rl', 'segments/'):
    return []
  window = run.config.get('harness', {}).get('max_context_tokens')
  tokens = [
      charts.Series(name, *run.series('rl', f'segments/{key}'), color=color)
      for color, (key, name) in enumerate(
          {
              'tokens_mean': 'all windows, mean',
              'longest_tokens': 'longest',
          }.items()
      )
  ]
  return [
      cards.Card(
          'Summaries and segments',
          'Of a rollout: the summaries it wrote when its context filled up, and'
          ' the windows it went on in.',
          cards.draw(
              run,
              {
                  'segments/summaries_mean': 'summaries, mean',
                  'segments/count_mean': 'segments, mean',
                  'segments/count_max': 'segments, most',
              },
              'per rollout',
          ),
      ),
      cards.Card(
          'Context of a rollout',
          'Tokens of all its windows together, and of the longest window of the'
          ' step.',
          charts.lines(
              tokens,
              x_label=cards.STEP,
              y_label='tokens',
              levels={'one window': window} if window else {},
          ),
      ),
  ]


def _histogram(run: data.RunData) -> cards.Card:
  totals: list[float] = []
  for record in run.records.get('rl', ()):
    counts = record.get('staleness/histogram') or []
    totals += [0.0] * (len(counts) - len(totals))
    for age, count in enumerate(counts):
      totals[age] += count or 0.0
  whole = sum(totals) or 1.0
  chart = charts.bars(
      [100 * t / whole for t in totals],
      x_label='age in versions',
      y_label='% of trained tokens',
      name='tokens',
  )
  note = f'All {whole:,.0f} trained tokens of the run.' if totals else ''
  return cards.Card('Version lag of trained tokens', note, chart)


def _staleness(run: data.RunData) -> cards.Card:
  bound = run.config.get('rl', {}).get('max_staleness_versions')
  note = 'Trainer version minus the version that sampled a trained token.'
  if bound is not None:
    note += (
        f' S = {bound} bounds how far ahead rollouts are admitted, not the age'
        ' of a token: the weights that a rollout begins with may be older than'
        ' the newest published.'
    )
  names = {
      'staleness/token_mean': 'token mean',
      'staleness/token_max': 'token max',
      'staleness/submit_lag_mean': 'rollout lag at hand-in, mean',
  }
  return cards.Card('Staleness', note, cards.draw(run, names, 'versions'))


def _mismatch(run: data.RunData) -> cards.Card:
  x, same = run.series('rl', 'mismatch/kl_same_version')
  chart = cards.draw(
      run,
      {
          'mismatch/kl_stale': 'stale tokens: policy drift',
          'mismatch/kl_same_version': 'same version: numerics',
      },
      'KL (k3), nats per token',
  )
  worst = max(same, key=abs, default=None)
  if worst is None:
    return cards.Card('Mismatch KL', '', chart)
  if worst == 0:
    note = (
        'Same version is exactly 0.0 in every step: trainer and rollout'
        ' compute the same bits.'
    )
    fresh, total = same_version(run)
    if total:
      note += (
          f' It covers {fresh:,} of {total:,} trained tokens'
          f' ({fresh / total:.0%}); the others saw older weights.'
      )
    return cards.Card('Mismatch KL', note, chart)
  step = x[same.index(worst)]
  note = (
      f'Same version is NOT zero: {worst:.3g} nats at RL step {step:g}.'
      ' Trainer and rollout do not compute the same bits.'
  )
  return cards.Card('Mismatch KL', note, chart, alarm=True)


def _asynchrony(run: data.RunData) -> list[cards.Card]:
  kept_out = run.keys('rl', 'loss/dropped') + run.keys('rl', 'loss/capped')
  names = {k: k.removeprefix('loss/').replace('_', ' ') for k in kept_out}
  return [
      _staleness(run),
      _histogram(run),
      _mismatch(run),
      cards.Card(
          'Largest log-prob ratio',
          'Trainer over behavior policy, the farthest of all trained tokens of'
          ' a step, up or down.',
          cards.draw(
              run, {'mismatch/max_log_ratio': 'largest'}, '|log ratio|, nats'
          ),
      ),
      cards.Card(
          'Tokens at the edge of the trust region',
          'Dropped: no policy gradient, as a share of the tokens with an'
          ' advantage of that sign. Capped: the ratio is cut.',
          cards.draw(run, names, 'share of tokens'),
      ),
      cards.Card(
          'Routing',
          'Disagreement: how often the trainer would choose other experts'
          ' than the rollout did. Blank: tokens without a recorded choice, such'
          ' as the last of a rollout.',
          cards.draw(
              run,
              {
                  'routing/disagreement': 'disagreement',
                  'routing/blank': 'blank',
              },
              'share of choices',
          ),
      ),
  ]


def _weights(run: data.RunData) -> list[cards.Card]:
  x, size = run.series('rl', 'weights/delta_bytes')
  delta = charts.Series('delta', x, [b / 1e3 for b in size])
  _, ratio = run.series('rl', 'weights/ratio')
  full = {'all weights': size[-1] / 1e3 * ratio[-1]} if ratio else {}
  x, changed = run.series('rl', 'weights/changed_fraction')
  share = charts.Series('changed', x, [100 * c for c in changed])
  return [
      cards.Card(
          'Delta size',
          'What one published version costs to send, and what all weights in'
          ' bf16 would.',
          charts.lines(
              [delta], x_label=cards.STEP, y_label='kB per version', levels=full
          ),
      ),
      cards.Card(
          'Bits per changed value',
          'Index and new value together; a plain int32 + bf16 pair is 48.',
          cards.draw(run, {'weights/bits_per_changed': 'bits'}, 'bits'),
      ),
      cards.Card(
          'Changed values',
          'bf16 values that differ from the version before.',
          charts.lines([share], x_label=cards.STEP, y_label='% of values'),
      ),
  ]


def _by_source(run: data.RunData, phases: list[str]) -> list[cards.Card]:
  """Held-out bits per byte of each source, where there are several."""
  prefix = 'bits_per_byte/'
  names = dict.fromkeys(k for p in phases for k in run.keys(p, prefix))
  if len(names) < 2:
    return []
  return [
      cards.Card(
          f'Held-out bits per byte: {name.removeprefix(prefix)}',
          'On the held-out documents of this source alone.',
          charts.lines(
              [
                  charts.Series(
                      data.phase_name(p), *run.series(p, name), color=color
                  )
                  for color, p in enumerate(phases)
              ],
              x_label='step',
              y_label='bits per byte',
              low=None,
          ),
      )
      for name in names
  ]


def _pretraining(run: data.RunData) -> list[cards.Card]:
  phases = data.pretraining(run)

  def draw(key, label, low):
    series = [
        charts.Series(
            data.phase_name(phase), *run.series(phase, key), color=color
        )
        for color, phase in enumerate(phases)
    ]
    return charts.lines(series, x_label='step', y_label=label, low=low)

  return [
      cards.Card(
          'Held-out bits per byte',
          'On documents that training never sees; lower is better. Phases may'
          ' read windows of different length, hence the step between them.',
          draw('bits_per_byte', 'bits per byte', None),
      ),
      *_by_source(run, phases),
      cards.Card(
          'Training loss',
          'Next-token cross-entropy.',
          draw('loss', 'nats per token', None),
      ),
      cards.Card(
          'Training speed', '', draw('tokens_per_second', 'tokens/s', 0.0)
      ),
  ]


def build(run: data.RunData) -> list[tuple[str, list[cards.Card]]]:
  """All sections of the page, in reading order."""
  return [
      ('Learning', _learning(run)),
      ('Behavior', behavior.section(run)),
      ('Asynchrony and numerics', _asynchrony(run)),
      ('Weights on the wire', _weights(run)),
      ('Time', timing.section(run)),
      ('Mid-training and warm start', _pretraining(run)),
  ]
