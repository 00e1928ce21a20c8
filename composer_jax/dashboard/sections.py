"""The charts of the report, grouped: which figure is drawn how, and why."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math

from composer_jax.dashboard import charts
from composer_jax.dashboard import data

HELDOUT = {
    'eval': 'Held-out tasks',
    'heldout_families': 'Held-out families',
}
_STEP = 'RL step'


@dataclasses.dataclass(frozen=True)
class Card:
  """One chart with its words.

  Attributes:
    title: what is drawn.
    note: how to read it.
    chart: markup; None if the run has no such figures yet.
    alarm: the note says that something is wrong.
  """

  title: str
  note: str
  chart: str | None
  alarm: bool = False


def standard_error(p: float, tasks: int | None) -> float | None:
  """Standard error of a share p of `tasks` independent tasks."""
  return math.sqrt(max(0.0, p * (1 - p)) / tasks) if tasks else None


def evaluation_tasks(run: data.Run) -> int | None:
  """Tasks of one evaluation, from the config."""
  return run.config.get('evaluation', {}).get('tasks')


def _draw(run: data.Run, names: Mapping[str, str], y_label: str, **limits):
  """Draws figures of the RL phase, key -> name, in the order of colors."""
  series = [
      charts.Series(name, *run.series('rl', key), color=color)
      for color, (key, name) in enumerate(names.items())
  ]
  return charts.lines(series, x_label=_STEP, y_label=y_label, **limits)


def _reward(run: data.Run) -> Card:
  x, y = run.series('rl', 'reward/mean')
  window = max(1, min(20, len(y) // 5))
  best = run.series('rl', 'reward/best_of_group')

  def smooth(values):
    return charts.trailing_mean(values, window)

  chart = charts.lines(
      [
          charts.Series('each step', x, y, color=0, faint=True),
          charts.Series(f'mean of {window} steps', x, smooth(y), color=0),
          charts.Series('best of group', best[0], smooth(best[1]), color=2),
      ],
      x_label=_STEP,
      y_label='reward',
  )
  note = (
      'Mean reward of all rollouts of a step, and of the best rollout of each'
      f' group (also mean of {window} steps).'
  )
  return Card('Train reward and best of group', note, chart)


def _heldout(run: data.Run, prefix: str, note: str) -> Card:
  tasks = evaluation_tasks(run)
  series = []
  for color, kind in enumerate(('sampled', 'greedy')):
    x, y = run.series('eval', f'{prefix}/pass1_{kind}')
    error = [standard_error(p, tasks) for p in y] if tasks else None
    series.append(charts.Series(kind, x, y, error, color))
  chart = charts.lines(
      series, x_label=_STEP, y_label='pass@1, share of tasks', high=1.0
  )
  if tasks:
    note += f' Whiskers: ± 1 standard error, {tasks} tasks.'
  return Card(f'{HELDOUT[prefix]}, pass@1', note, chart)


def _learning(run: data.Run) -> list[Card]:
  return [
      _reward(run),
      _heldout(run, 'eval', 'Tasks that are in neither warm start nor RL.'),
      _heldout(
          run,
          'heldout_families',
          'Function families seen in neither warm start nor RL; shown'
          ' whatever they say.',
      ),
      Card(
          'Entropy',
          'Of the distribution that every trained token was drawn from.',
          _draw(run, {'entropy': 'entropy'}, 'nats per token'),
      ),
      Card(
          'Groups without a signal',
          'All rollouts of such a group earned the same; it teaches nothing.',
          _draw(
              run,
              {'group/zero_variance_fraction': 'zero variance'},
              'share of groups',
              high=1.0,
          ),
      ),
      Card(
          'Gradient norm',
          'Before clipping.',
          _draw(run, {'grad_norm': 'gradient norm'}, 'norm'),
      ),
  ]


def _histogram(run: data.Run) -> Card:
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
  return Card('Version lag of trained tokens', note, chart)


def _mismatch(run: data.Run) -> Card:
  x, same = run.series('rl', 'mismatch/kl_same_version')
  chart = _draw(
      run,
      {
          'mismatch/kl_stale': 'stale tokens: policy drift',
          'mismatch/kl_same_version': 'same version: numerics',
      },
      'KL (k3), nats per token',
  )
  worst = max(same, key=abs, default=None)
  if worst is None:
    return Card('Mismatch KL', '', chart)
  if worst == 0:
    note = (
        f'Same version is exactly 0.0 in all {len(same)} steps: trainer and'
        ' rollout compute the same bits.'
    )
    return Card('Mismatch KL', note, chart)
  step = x[same.index(worst)]
  note = (
      f'Same version is NOT zero: {worst:.3g} nats at RL step {step:g}.'
      ' Trainer and rollout do not compute the same bits.'
  )
  return Card('Mismatch KL', note, chart, alarm=True)


def _asynchrony(run: data.Run) -> list[Card]:
  masks = {k: k.removeprefix('mask/') for k in run.keys('rl', 'mask/')}
  return [
      Card(
          'Staleness',
          'Trainer version minus the version that made a token; lag: minus'
          ' the version a rollout began with, when it was handed in.',
          _draw(
              run,
              {
                  'staleness/token_mean': 'mean',
                  'staleness/token_p95': '95th percentile',
                  'staleness/token_max': 'max',
                  'staleness/submit_lag_mean': 'rollout lag, mean',
              },
              'versions',
          ),
      ),
      _histogram(run),
      _mismatch(run),
      Card(
          'Largest probability ratio',
          'Trainer over behavior policy, over all trained tokens of a step.',
          _draw(run, {'mismatch/max_ratio': 'max ratio'}, 'ratio'),
      ),
      Card(
          'Tokens left out of the loss',
          'By reason.',
          _draw(run, masks, 'share of tokens'),
      ),
      Card(
          'Routing',
          'Disagreement: how often the trainer would choose other experts'
          ' than the rollout did. Blank: tokens without a recorded choice.',
          _draw(
              run,
              {
                  'routing/disagreement': 'disagreement',
                  'routing/blank_fraction': 'blank',
              },
              'share of choices',
          ),
      ),
  ]


def _weights(run: data.Run) -> list[Card]:
  x, size = run.series('rl', 'weights/delta_bytes')
  delta = charts.Series('delta', x, [b / 1e3 for b in size])
  x, changed = run.series('rl', 'weights/changed_fraction')
  share = charts.Series('changed', x, [100 * c for c in changed])
  return [
      Card(
          'Delta size',
          'What one published version costs to send.',
          charts.lines([delta], x_label=_STEP, y_label='kB per version'),
      ),
      Card(
          'Bits per changed value',
          'Index and new value together; a plain int32 + bf16 pair is 48.',
          _draw(run, {'weights/bits_per_changed': 'bits'}, 'bits'),
      ),
      Card(
          'Changed values',
          'bf16 values that differ from the version before. It falls with the'
          ' learning rate.',
          charts.lines([share], x_label=_STEP, y_label='% of values'),
      ),
  ]


def _time(run: data.Run) -> list[Card]:
  keys = {
      'time/rollout': 'rollout',
      'time/environment': 'environment',
      'time/train': 'train',
      'time/wait_batch': 'wait for batch',
      'time/wait_weights': 'wait for weights',
  }
  records = [r for r in run.records.get('rl', ()) if 'time/step' in r]
  steps = [r['step'] for r in records]
  layers = {
      name: [r.get(key) or 0.0 for r in records]
      for key, name in keys.items()
      if any(key in r for r in records)
  }
  wall = charts.Series(
      'whole step', steps, [r['time/step'] or 0.0 for r in records], color=5
  )
  split = charts.stacked(
      steps,
      layers,
      x_label=_STEP,
      y_label='seconds per step',
      outline=wall,
  )
  return [
      Card(
          'Where the time goes',
          'The stack rises above the line by what ran at the same time.',
          split,
      ),
      Card(
          'Speed',
          'Tokens of whole rows, padding apart.',
          _draw(
              run,
              {
                  'tokens/train_per_second': 'train',
                  'tokens/decode_per_second': 'decode',
              },
              'tokens per second',
          ),
      ),
  ]


def _pretraining(run: data.Run) -> list[Card]:
  def draw(key, label, low):
    series = [
        charts.Series(name, *run.series(phase, key), color=color)
        for color, (phase, name) in enumerate(
            {'midtrain': 'mid-training', 'warmup': 'warm start'}.items()
        )
    ]
    return charts.lines(series, x_label='step', y_label=label, low=low)

  return [
      Card(
          'Held-out bits per byte',
          'On files that training never sees. Lower is better.',
          draw('bits_per_byte', 'bits per byte', None),
      ),
      Card(
          'Training loss',
          'Next-token cross-entropy.',
          draw('loss', 'nats per token', None),
      ),
      Card('Training speed', '', draw('tokens_per_second', 'tokens/s', 0.0)),
  ]


def build(run: data.Run) -> list[tuple[str, list[Card]]]:
  """All sections of the page, in reading order."""
  return [
      ('Learning', _learning(run)),
      ('Asynchrony and numerics', _asynchrony(run)),
      ('Weights on the wire', _weights(run)),
      ('Time', _time(run)),
      ('Mid-training and warm start', _pretraining(run)),
  ]
