"""Looks at what a run has made, without changing the run.

  python3 -m experiments.inspect run --workdir=DIR
  python3 -m experiments.inspect weights --store=URL [--verify]
  python3 -m experiments.inspect weights --store=URL --diff A B [--plot=PNG]
  python3 -m experiments.inspect trajectory --workdir=DIR [--task=ID]
  python3 -m experiments.inspect trajectory --path=FILE [--tokens]
  python3 -m experiments.inspect curves --runs=DIR,DIR [--metric=NAME] [--plot=PNG]
  python3 -m experiments.inspect model --path=DIR [--mesh=fsdp=8,expert=4]
  python3 -m experiments.inspect ops --workdir=DIR [--save=FILE]
  python3 -m experiments.inspect ops --workdir=DIR --against=FILE
  python3 -m experiments.inspect sandbox
  python3 -m experiments.inspect judge --rubric=FILE --labels=FILE.jsonl \\
      --base_url=URL --model=NAME [--key_variable=NAME] [--json=FILE]

run: result, claims and latest figures; builds DIR/report.html anew.
weights: a line for every published version; --verify rebuilds them all;
--diff compares two versions, by array and by size of step, and can plot that.
trajectory: the list of those kept, or one of them with its text.
curves: a figure of several runs, and its plot; directories whose names differ in
a number at the end are runs of one arm.
model: architecture, parameters, memory on a mesh and tokenizer of a published
model, whose files are checked.
ops: computes some windows with decoder and trainer, and one training step, and
names the first op in which the two roles differ; --against compares with what
another process has computed and saved.
sandbox: how this machine can isolate code that a model wrote, and why.
judge: how far a judge can be trusted: agreement with itself and with labels,
means by kind and version, items that say the same, drift since --against.
"""

import functools
import pathlib
import sys

from absl import flags as absl_flags
from experiments import flags
from rich import console
from rich import progress as rich_progress
from rich import table

_COMMANDS = (
    'run',
    'weights',
    'trajectory',
    'curves',
    'model',
    'ops',
    'sandbox',
    'judge',
)


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
    absl_flags.DEFINE_spaceseplist('diff', [], 'The two versions to compare.')
    _join_diff(sys.argv)
    absl_flags.DEFINE_string('plot', None, 'PNG file to plot the diff to.')
  elif command == 'trajectory':
    absl_flags.DEFINE_string('workdir', None, 'Directory of the run.')
    absl_flags.DEFINE_string(
        'task', None, 'Id of its task, as the list without this flag has it.'
    )
    absl_flags.DEFINE_string('path', None, 'File of a trajectory.')
    absl_flags.DEFINE_bool('tokens', False, 'A line for every token.')
  elif command == 'curves':
    absl_flags.DEFINE_list('runs', None, 'Work directories.', required=True)
    absl_flags.DEFINE_string('metric', 'eval/pass1_sampled', 'The figure.')
    absl_flags.DEFINE_string('plot', None, 'PNG file to plot the curves to.')
  elif command == 'model':
    absl_flags.DEFINE_string(
        'path', None, 'Folder of the model.', required=True
    )
    absl_flags.DEFINE_list(
        'mesh',
        'data=1',
        "The trainer's mesh, by axis: data, fsdp, expert, tensor.",
    )
  elif command == 'ops':
    flags.define_workdir('of the run')
    absl_flags.DEFINE_string('save', None, 'File to save all values to.')
    absl_flags.DEFINE_string('against', None, 'File of another process.')
    flags.define_compilation_cache()
  elif command == 'judge':
    for name, text in (
        ('rubric', 'Rubric to judge by, YAML or JSON.'),
        ('labels', 'Labeled work, a JSON object a line.'),
        ('base_url', 'OpenAI-compatible endpoint, such as https://host/v1.'),
        ('model', 'Name of the judge there.'),
    ):
      absl_flags.DEFINE_string(name, None, text, required=True)
    absl_flags.DEFINE_string(
        'key_variable', '', 'Environment variable that holds the key.'
    )
    absl_flags.DEFINE_integer('repeats', 3, 'Judgements of each row.', 1)
    absl_flags.DEFINE_float('deadline', 60.0, 'Seconds for one judgement.')
    absl_flags.DEFINE_string('json', None, 'File to write all figures to.')
    absl_flags.DEFINE_string(
        'against', None, 'File of an earlier --json, to compare with.'
    )


def _join_diff(argv: list[str]) -> None:
  """Makes `--diff A B` one argument: a flag has one value."""
  if '--diff' in argv:
    at = argv.index('--diff')
    pair = [a for a in argv[at + 1 : at + 3] if not a.startswith('-')]
    argv[at : at + 1 + len(pair)] = [f'--diff={" ".join(pair)}']


def _run(out: console.Console) -> None:
  from composer_jax.dashboard import report
  from composer_jax.inspect import tables

  workdir = pathlib.Path(absl_flags.FLAGS.workdir)
  for part in tables.run(workdir):
    out.print(part)
  if absl_flags.FLAGS.report:
    out.print(f'report: {report.build(workdir)}', soft_wrap=True)


def _weights(out: console.Console) -> int:
  from composer_jax.inspect import stored_weights
  from composer_jax.weights import follow
  from composer_jax.weights import records

  values = absl_flags.FLAGS
  pair = [int(v) for v in values.diff if v.isdecimal()]
  if len(values.diff) != len(pair) or len(pair) not in (0, 2):
    raise ValueError(
        f'--diff {" ".join(values.diff)}: give two versions: --diff 3 7'
    )
  if values.plot and not pair:
    raise ValueError(f'--plot={values.plot}: give --diff A B as well')
  try:
    if pair:
      found = stored_weights.changes(values.store, *pair)
      title = 'version {} to {}'.format(*pair)
      shown = stored_weights.change_table(found, title)
      if values.plot:
        stored_weights.change_plot(values.plot, found, title)
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
  from composer_jax.inspect import tables

  values = absl_flags.FLAGS
  if not (values.workdir or values.path):
    raise ValueError('trajectory: give --workdir=DIR or --path=FILE')
  if values.path:
    path = pathlib.Path(values.path)
    if not path.is_file():
      raise ValueError(f'--path={path}: no such file')
  elif values.task:
    path = tables.find(pathlib.Path(values.workdir), values.task)
  else:
    found = tables.stored(pathlib.Path(values.workdir))
    out.print(tables.trajectories(found.values()))
    return
  for part in tables.trajectory(path, values.tokens):
    out.print(part)


def _curves(out: console.Console) -> None:
  from composer_jax.dashboard import plots
  from composer_jax.inspect import tables

  values = absl_flags.FLAGS
  metric = values.metric
  arms = tables.arms([pathlib.Path(r) for r in values.runs], metric)
  out.print(tables.curve_table(arms, metric))
  if values.plot:
    plots.curves(values.plot, metric, ('RL step', metric), arms)


def _model(out: console.Console) -> None:
  from composer_jax import config
  from composer_jax import config_text
  from composer_jax.inspect import model_facts

  mesh = config_text.override(config.MeshConfig(data=1), *absl_flags.FLAGS.mesh)
  path = pathlib.Path(absl_flags.FLAGS.path).resolve()
  for part in model_facts.of_folder(path, mesh):
    out.print(part)


def _ops(out: console.Console) -> int:
  from composer_jax.inspect import divergence
  from composer_jax.inspect import ops
  from composer_jax.learner import step
  from experiments import machine

  values = absl_flags.FLAGS
  workdir = flags.existing_workdir()
  if values.against and not pathlib.Path(values.against).is_file():
    raise ValueError(f'--against={values.against}: no such file')
  cfg = flags.stored_experiment(workdir)
  machine.setup_devices(cfg, values.compilation_cache)
  found = ops.of_run(cfg, workdir, step.make_mesh(cfg.mesh))
  if values.save:
    divergence.save(pathlib.Path(values.save), found)
  pairs = [
      (name, 'trainer' + name.removeprefix('decoder'), found)
      for name in found
      if name.startswith('decoder')
  ]
  if values.against:
    other = divergence.load(pathlib.Path(values.against))
    pairs += [(name, name, other) for name in found]
  differences = 0
  for name, against, other in pairs:
    difference = divergence.first(found[name], other[against])
    place = values.against if other is not found else against
    out.print(f'{name} vs {place}: {difference or "equal"}', soft_wrap=True)
    differences += difference is not None
  out.print(f'digest of every value: {divergence.digest(found)}')
  return int(differences > 0)


def _sandbox(out: console.Console) -> int:
  from composer_jax.sandbox import box

  level = box.describe()
  out.print(f'level: {level.name}', soft_wrap=True)
  out.print(f'reason: {level.reason}', soft_wrap=True)
  found = table.Table('level', 'here', 'what it gives')
  for name, gives in box.LEVELS.items():
    found.add_row(name, box.failure(name) or 'works', gives)
  out.print(found)
  return int(level.name == 'none')


def _judge(out: console.Console) -> int:
  import asyncio
  import json

  from composer_jax import atomic
  from composer_jax.inspect import tables
  from composer_jax.rewards import calibration
  from composer_jax.rewards import judge as judge_lib
  from composer_jax.rewards import rubric as rubric_lib
  from composer_jax.runs import progress

  values = absl_flags.FLAGS
  rubric = rubric_lib.load(values.rubric)
  rows = calibration.load(values.labels, rubric)
  judge = judge_lib.Judge(
      values.rubric,
      values.base_url,
      values.model,
      values.key_variable,
      deadline_seconds=values.deadline,
  )
  earlier = None
  if values.against:
    try:
      earlier = json.loads(pathlib.Path(values.against).read_text())
      earlier['scores'], earlier['judge']
    except (OSError, ValueError, LookupError, TypeError) as e:
      raise ValueError(f'--against={values.against}: no report: {e}') from e
  total = len(rows) * values.repeats
  with progress.Progress(total, 'judgement', console=out) as bar:
    done = iter(range(1, total + 1))
    found = asyncio.run(
        calibration.ask(
            judge,
            rows,
            repeats=values.repeats,
            ended=lambda: bar.update(next(done)),
        )
    )
  report = calibration.report(rubric, rows, found, judge.version, earlier)
  if values.json:
    atomic.write_json(pathlib.Path(values.json), report)
  for part in tables.calibration(report):
    out.print(part)
  failures = {f for r in found for j in r for f in j.failures.values()}
  for failure in sorted(failures)[:3]:
    out.print(f'unanswered: {failure}', soft_wrap=True)
  return int(report['unanswered'] == 1)


def main() -> int | None:
  out = console.Console(highlight=False, markup=False, emoji=False)
  if not out.is_terminal:
    out.width = 160  # a log or a pipe has no edge
  commands = {
      'run': _run,
      'weights': _weights,
      'trajectory': _trajectory,
      'curves': _curves,
      'model': _model,
      'ops': _ops,
      'sandbox': _sandbox,
      'judge': _judge,
  }
  return commands[_COMMAND](out)


if __name__ == '__main__':
  if len(sys.argv) < 2 or sys.argv[1] not in _COMMANDS:
    print(__doc__)
    wanted = len(sys.argv) > 1 and sys.argv[1] in ('--help', '-h', '-help')
    sys.exit(0 if wanted else flags.USAGE_EXIT_CODE)
  _COMMAND = sys.argv.pop(1)
  _define(_COMMAND)
  flags.run(main)
