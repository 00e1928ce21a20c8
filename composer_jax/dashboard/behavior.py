"""The section on behavior: what a reward does not see, and its alarms."""

from __future__ import annotations

from composer_jax.dashboard import cards
from composer_jax.dashboard import data

_ALARM, _PREFIX = 'alarm/', 'behavior/'
_RATES = {
    'edits': 'rollouts that edit',
    'asks': 'turns that ask',
    'invalid': 'turns that cannot be read',
    'failed_calls': 'calls that fail',
}
_AMOUNTS = {
    'todos': ('To-dos left behind', 'that a submission adds'),
    'comment_chars': ('Comments', 'characters that a submission adds'),
    'sampled_tokens': ('Length', 'sampled tokens'),
}
# What alarms say that do not compare with the start of the run.
_WORDS = {
    'no_signal': 'no group taught anything (all rewards of each were equal)',
    'all_invalid': 'no turn could be read',
    'all_truncated': 'every turn was cut at harness.max_turn_tokens',
    'mismatch': 'decoder and trainer differ with equal weights',
}


def alarms(run: data.RunData) -> dict[str, list[int]]:
  """Figures that an alarm was raised for -> RL steps that raised it."""
  return {
      key.removeprefix(_ALARM): [int(s) for s in run.series('rl', key)[0]]
      for key in run.keys('rl', _ALARM)
  }


def lines(run: data.RunData) -> list[str]:
  """The alarms in words, one a line."""
  out = []
  for name, steps in alarms(run).items():
    now = run.last('rl').get(_ALARM + name)
    state = 'over by now' if now is None else f'now {now:.3g}'
    what = _WORDS.get(name, f'{name} left what it was at the start of the run')
    out.append(
        f'alarm: {what}, from RL step {steps[0]} on, {len(steps)} steps, {state}'
    )
  return out


def section(run: data.RunData) -> list[cards.Card]:
  """Rates in one chart, amounts in one each; all of them if there is alarm."""
  if not run.keys('rl', _PREFIX):
    return []
  raised = alarms(run)
  others = [n for n in raised if not n.startswith(_PREFIX)]

  def card(title, note, names, y_label, **limits):
    keys = {_PREFIX + name: label for name, label in names.items()}
    alarm = [n for n in raised if n in keys]
    for name in alarm:
      note += f' Alarm from step {raised[name][0]} on: {keys[name]}.'
    chart = cards.draw(run, keys, y_label, **limits)
    return cards.Card(title, note, chart, alarm=bool(alarm))

  note = 'Means of all rollouts of a step that could be judged.'
  if others:
    note += f' Alarms elsewhere: {", ".join(others)}.'
  out = [card('Rates', note, _RATES, 'share', high=1.0)]
  for name, (title, label) in _AMOUNTS.items():
    out.append(card(title, '', {name: label}, f'{label}, mean'))
  return out
