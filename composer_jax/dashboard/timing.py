"""Where the seconds of a run went, without counting any of them twice."""

from __future__ import annotations

from collections.abc import Mapping

from composer_jax.dashboard import cards
from composer_jax.dashboard import charts
from composer_jax.dashboard import data

_TRAINER = {
    'time/train': 'train',
    'time/wait_batch': 'wait for batch',
    'time/wait_weights': 'wait for weights',
}
_ROLLOUT = {'time/rollout': 'engine', 'time/environment': 'grading'}


def _with_rest(
    parts: Mapping[str, float], whole: float, rest: str
) -> dict[str, float]:
  """The parts, and what is left of the whole."""
  return {**parts, rest: max(0.0, whole - sum(parts.values()))}


def section(run: data.RunData) -> list[cards.Card]:
  """The cards: whole run, trainer, rollout side, speed."""
  records = [r for r in run.records.get('rl', ()) if 'time/step' in r]
  steps = [r['step'] for r in records]
  wall = [r['time/step'] or 0.0 for r in records]

  def layers(keys):
    return {n: [r.get(k) or 0.0 for r in records] for k, n in keys.items()}

  busy = layers(_TRAINER)
  rollout = layers(_ROLLOUT)
  whole = 'Whole run' if run.summary else 'Run so far'
  rows = {whole: _stages(run, sum(wall))}
  for clock, parts, rest in (
      ('trainer', busy, 'bookkeeping'),
      *((name, {name: values}, 'idle') for name, values in rollout.items()),
  ):
    sums = {name: sum(values) for name, values in parts.items()}
    rows[f'RL steps, {clock}'] = _with_rest(sums, sum(wall), rest)
  spent = zip(wall, *busy.values(), strict=True)
  busy['bookkeeping'] = [max(0.0, all_ - sum(some)) for all_, *some in spent]
  return [
      cards.Card(
          'Where the time went',
          'The last three bars are three clocks of the same seconds: the engine'
          ' decodes and answers are graded while the trainer trains or waits,'
          ' so they must not be added up. Engine: decoding or prefilling.'
          ' Grading: at least one answer is being graded. Start-up: compiling,'
          ' opening sandboxes, closing.',
          charts.shares(rows) if wall else None,
          wide=True,
      ),
      cards.Card(
          "The trainer's step",
          'The trainer does one thing at a time: the layers add up to the step.'
          ' Bookkeeping: checkpoints and kept trajectories.',
          charts.stacked(
              steps, busy, x_label=cards.STEP, y_label='seconds per step'
          ),
      ),
      cards.Card(
          'The rollout side meanwhile',
          'Busy seconds during one step of the trainer. The two overlap each'
          ' other too.',
          charts.lines(
              [
                  charts.Series(name, steps, values, color=color)
                  for color, (name, values) in enumerate(rollout.items())
              ]
              + [charts.Series('whole step', steps, wall, color=5, faint=True)],
              x_label=cards.STEP,
              y_label='seconds per step',
          ),
      ),
      cards.Card(
          'Speed',
          'Train: tokens in the batch, prompts included, padding not, per'
          ' second of training. Decode: sampled tokens per busy second of the'
          ' engine.',
          cards.draw(
              run,
              {
                  'tokens/train_per_second': 'train',
                  'tokens/decode_per_second': 'decode',
              },
              'tokens per second',
          ),
      ),
  ]


def _stages(run: data.RunData, rl: float) -> dict[str, float]:
  """Seconds of the run's stages; `rl` is the sum of its RL steps."""
  ends = {
      phase: max(r.get('seconds', 0.0) for r in records)
      for phase, records in run.records.items()
  }
  parts, begin = {}, 0.0
  for phase in data.pretraining(run):
    parts[data.phase_name(phase)] = ends[phase] - begin
    begin = ends[phase]
  parts |= {
      'RL steps': rl,
      'evaluation': sum(run.series('eval', 'time/eval')[1]),
  }
  return _with_rest(parts, max(ends.values(), default=0.0), 'start-up')
