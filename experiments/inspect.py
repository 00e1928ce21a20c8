"""Looks at what a run has made, without changing the run.

  python3 -m experiments.inspect run --workdir=DIR
  python3 -m experiments.inspect weights --store=URL [--verify]
  python3 -m experiments.inspect weights --store=URL --diff=A --diff=B
  python3 -m experiments.inspect trajectory --workdir=DIR [--task=ID]
  python3 -m experiments.inspect trajectory --path=FILE [--tokens]
  python3 -m experiments.inspect sandbox

run: result, claims and latest figures; builds DIR/report.html anew.
weights: a line for every published version; --verify rebuilds them all;
two --diff compare versions, by array and by size of step, and plot it as SVG.
trajectory: the list of those kept, or one of them with its text.
sandbox: how this machine can isolate code that a model wrote, and why.
"""

import functools
import pathlib
import sys

from absl import flags as absl_flags
from experiments import flags
from rich import console
from rich import progress as rich_progress
from rich import table

_COMMANDS = ('run', 'weights', 'trajectory', 'sandbox')


def _define(command: str) -> None:
  """Defines the flags of one command, so that --help lists no others."""
  if command == 'run':
    flags.define_workdir('of the run')
    absl_flags.DEFINE_bool('report', True, 'Builds report.html anew.')
  elif command == 'weights':
    absl_flags.DEFINE_string(
        'store',
        None,
        'URL or path of a weights store, such as DIR/weights.',
        required=True,
    )
    absl_flags.DEFINE_bool(
        'verify', False, 'Rebuilds every version, derives every digest anew.'
    )
    absl_flags.DEFINE_multi_integer(
        'diff', [], 'Twice: the versions to compare.'
    )
    absl_flags.DEFINE_string('plot', None, 'SVG file to plot the diff to.')
  elif command == 'trajectory':
    absl_flags.DEFINE_string('workdir', None, 'Directory of the run.')
    absl_flags.DEFINE_string('task', None, 'Task id, such as run/12/3.')
    absl_flags.DEFINE_string('path', None, 'File of a trajectory.')
    absl_flags.DEFINE_bool('tokens', False, 'A line for every token.')


def _run(out: console.Console) -> None:
  from composer_jax.dashboard import report
  from composer_jax.runs import inspection

  workdir = pathlib.Path(absl_flags.FLAGS.workdir)
  for part in inspection.run(workdir):
    out.print(part)
  if absl_flags.FLAGS.report:
    out.print(f'report: {report.build(workdir)}', soft_wrap=True)


def _weights(out: console.Console) -> int:
  from composer_jax.runs import stored_weights
  from composer_jax.weights import follow
  from composer_jax.weights import records

  values = absl_flags.FLAGS
  if len(values.diff) not in (0, 2):
    raise ValueError(f'--diff={values.diff}: give it twice, for two versions')
  try:
    if values.diff:
      found = stored_weights.changes(values.store, *values.diff)
      title = 'version {} to {}'.format(*values.diff)
      shown = stored_weights.change_table(found, title)
      if values.plot:
        plot = stored_weights.change_plot(found, title)
        pathlib.Path(values.plot).write_text(plot)
    else:
      track = functools.partial(
          rich_progress.track,
          description='verify' if values.verify else 'read',
          console=out,
          transient=True,
          disable=not out.is_terminal,
      )
      shown = stored_weights.versions(values.store, values.verify, track)
  except (records.StoreError, follow.FollowError) as error:
    print(f'inspect: damaged store: {error}', file=sys.stderr)
    return 1
  out.print(shown)
  return 0


def _trajectory(out: console.Console) -> None:
  from composer_jax.runs import inspection

  values = absl_flags.FLAGS
  if not (values.workdir or values.path):
    raise ValueError('trajectory: give --workdir=DIR or --path=FILE')
  if values.path:
    path = pathlib.Path(values.path)
    if not path.is_file():
      raise ValueError(f'--path={path}: no such file')
  elif values.task:
    path = inspection.find(pathlib.Path(values.workdir), values.task)
  else:
    found = inspection.stored(pathlib.Path(values.workdir))
    out.print(inspection.trajectories(found.values()))
    return
  for part in inspection.trajectory(path, values.tokens):
    out.print(part)


def _sandbox(out: console.Console) -> int:
  from composer_jax.agents import box

  level = box.describe()
  out.print(f'level: {level.name}', soft_wrap=True)
  out.print(f'reason: {level.reason}', soft_wrap=True)
  found = table.Table('level', 'here', 'what it gives')
  for name, gives in box.LEVELS.items():
    found.add_row(name, box.failure(name) or 'works', gives)
  out.print(found)
  return int(level.name == 'none')


def main() -> int | None:
  out = console.Console(highlight=False, markup=False, emoji=False)
  if not out.is_terminal:
    out.width = 160  # a log or a pipe has no edge
  command = {
      'run': _run,
      'weights': _weights,
      'trajectory': _trajectory,
      'sandbox': _sandbox,
  }[_COMMAND]
  return command(out)


if __name__ == '__main__':
  if len(sys.argv) < 2 or sys.argv[1] not in _COMMANDS:
    print(__doc__)
    wanted = len(sys.argv) > 1 and sys.argv[1] in ('--help', '-h', '-help')
    sys.exit(0 if wanted else flags.USAGE_EXIT_CODE)
  _COMMAND = sys.argv.pop(1)
  _define(_COMMAND)
  flags.run(main)
