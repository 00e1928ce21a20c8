"""Scores a published version of a run on tasks that it was never trained on.

  python3 -m experiments.evaluate --workdir=DIR [--version=N] [--json=FILE]

Every task is played twice, sampled (temperature 1) and greedy. Beside pass@1
stand its standard error over tasks and chance, which is what one random legal
edit would score. The config is the run's own and the run is only read; on the
machine that made the run, the figures are those in its metrics.
"""

import itertools
import json
import pathlib
import sys

from absl import flags as absl_flags
from experiments import flags

_SPLITS = {
    'eval': 'unseen tasks of the families that were trained',
    'heldout': 'tasks of families that were never trained',
}

flags.define_workdir('of the run')
flags.define_compilation_cache()
absl_flags.DEFINE_integer(
    'version',
    None,
    'Weight version to score. Default: the newest.',
    lower_bound=0,
)
absl_flags.DEFINE_enum(
    'split',
    'all',
    [*_SPLITS, 'all'],
    '; '.join(f'{name}: {what}' for name, what in _SPLITS.items()) + '.',
)
absl_flags.DEFINE_string('json', None, 'File to write every figure to.')


def _table(title: str, rows: dict[str, dict[str, float]]):
  from rich import table

  out = table.Table(title=title, title_justify='left', box=None)
  for name in ('', 'tasks', 'chance', 'sampled', 'greedy'):
    out.add_column(name, justify='right' if name else 'left', no_wrap=True)
  for name, row in rows.items():
    rates = (
        f'{row[kind]:.3f} ± {row[kind + "_error"]:.3f}'
        for kind in ('sampled', 'greedy')
    )
    style = 'bold' if name == 'all' else None
    cells = str(row['tasks']), f'{row["chance"]:.3f}', *rates
    out.add_row(name, *cells, style=style)
  return out


def _score(workdir: pathlib.Path) -> dict:
  """Plays the episodes; returns what --json holds."""
  import jax

  from composer_jax.runs import evaluate
  from composer_jax.runs import progress
  from experiments import machine

  values = absl_flags.FLAGS
  cfg = flags.stored_experiment(workdir)
  try:
    device = machine.setup_devices(cfg, values.compilation_cache).rollout
  except ValueError:
    device = jax.devices()[0]  # Fewer than the run had, but one is enough.
  splits = [*_SPLITS] if values.split == 'all' else [values.split]
  host = evaluate.stored_host(cfg, workdir, values.version, device)
  total = 2 * len(splits) * cfg.evaluation.tasks
  played = itertools.count(1)
  with host, progress.Progress(total, 'episode', label='evaluate') as bar:
    version, _ = host.feed.first
    scores = evaluate.evaluate(
        cfg, host, version.step, splits, lambda: bar.update(next(played))
    )
  return {
      'workdir': str(workdir.resolve()),
      'version': version.step,
      'digest': version.digest,
      'splits': {
          split: {
              'invalid': score.invalid,
              'rates': evaluate.breakdown(cfg, split, score),
          }
          for split, score in scores.items()
      },
  }


def main() -> int | None:
  from composer_jax.weights import follow
  from composer_jax.weights import records
  from rich import console

  workdir = flags.existing_workdir()
  path = absl_flags.FLAGS.json and pathlib.Path(absl_flags.FLAGS.json)
  if path and not path.absolute().parent.is_dir():
    raise ValueError(f'--json={path}: there is no directory {path.parent}')
  try:
    record = _score(workdir)
  except (records.StoreError, follow.FollowError) as error:
    print(f'evaluate: damaged store: {error}', file=sys.stderr)
    return 1
  out = console.Console(highlight=False, markup=False, emoji=False)
  out.print(f'version {record["version"]}, {record["digest"]}', soft_wrap=True)
  for split, found in record['splits'].items():
    out.print()
    out.print(_table(f'{split}: {_SPLITS[split]}', found['rates']))
    if found['invalid']:
      out.print(f'{found["invalid"]} episodes could not be judged')
  if path:
    path.write_text(json.dumps(record, indent=2) + '\n')
  return 0


if __name__ == '__main__':
  flags.run(main)
