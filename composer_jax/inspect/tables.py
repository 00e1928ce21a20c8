"""What `inspect` prints of a run and of trajectories.

The console it is printed to must have markup off: cells hold text of others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import difflib
import math
import pathlib
from typing import Any

from rich import console
from rich import table as rich_table
from rich import text
import tokenizers

from composer_jax import trace
from composer_jax.dashboard import behavior
from composer_jax.dashboard import data
from composer_jax.dashboard import report
from composer_jax.runs import progress

_MARKS = {
    True: text.Text('ok', 'green'),
    False: text.Text('FAILED', 'red'),
    None: text.Text('?', 'dim'),
}


def grid(title: str, *columns: str) -> rich_table.Table:
  """A table whose first column is left, all others right aligned."""
  out = rich_table.Table(
      title=title, title_justify='left', box=None, show_header=any(columns)
  )
  for i, name in enumerate(columns):
    out.add_column(name, justify='right' if i else 'left', no_wrap=not i)
  return out


def run(workdir: pathlib.Path) -> Iterator[console.RenderableType]:
  """The state of a run: result, claims, latest figures of every phase."""
  found = data.load(workdir)
  yield text.Text(report.state(found), 'bold')
  for name, why in found.missing.items():
    yield text.Text(f'{name} is missing: {why}', 'yellow')
  for line in behavior.lines(found):
    yield text.Text(line, 'red')
  if pairs := report.headlines(found):
    out = grid('Pass@1', '', 'before', 'after', 'change', 'tasks')
    for h in pairs:
      error = '' if h.error is None else f' ± {h.error:.3f}'
      numbers = f'{h.before:.3f}', f'{h.after:.3f}', f'{h.change:+.3f}{error}'
      out.add_row(' '.join((h.name, h.note)), *numbers, str(h.tasks or '?'))
    yield out
  out = grid('Claims', '', 'value', '')
  for c in report.checks(found):
    out.add_row(c.name, c.value, _MARKS[c.ok])
  yield out
  for phase, records in found.records.items():
    last = records[-1]
    out = grid(f'{phase}, step {last["step"]}', '', 'latest', 'max', 'min')
    for key in sorted({k for r in records for k in r}):
      _, values = found.series(phase, key)
      if key not in ('step', 'seconds') and values:
        numbers = values[-1], max(values), min(values)
        out.add_row(key, *map(progress.figure, numbers))
    yield out
  if facts := report.facts(found):
    out = grid('In all', '', '')
    for name, value in facts:
      out.add_row(name, value)
    yield out


def arms(
    workdirs: Sequence[pathlib.Path], metric: str
) -> dict[str, list[tuple[list[float], list[float]]]]:
  """(steps, values) of one figure, of runs grouped into arms.

  Directories whose names differ in a number at the end, such as `base-0` and
  `base-1`, are runs of one arm.

  Args:
    workdirs: directories of the runs.
    metric: a figure of any phase, such as `eval/pass1_sampled`.

  Raises:
    ValueError: a run that does not have the figure.
  """
  out: dict[str, list[tuple[list[float], list[float]]]] = {}
  for workdir in workdirs:
    found = data.load(workdir)
    phases = [p for p in found.records if found.series(p, metric)[0]]
    if not phases:
      near = sorted({k for p in found.records for k in found.keys(p, '')})
      close = difflib.get_close_matches(metric, near, 3, 0.0) or ['none']
      raise ValueError(
          f'metric={metric}: {workdir} has not recorded it; near it:'
          f' {", ".join(close)}'
      )
    name = workdir.name.rstrip('0123456789').rstrip('-_.') or workdir.name
    out.setdefault(name, []).append(found.series(phases[0], metric))
  return out


def curve_table(
    arms: Mapping[str, Sequence[tuple[list[float], list[float]]]], metric: str
) -> rich_table.Table:
  """First and last value of every run of `arms`, and their means."""
  out = grid(metric, 'arm', 'runs', 'first', 'last', 'mean first', 'mean last')
  for name, runs in arms.items():
    ends = [[y[k] for _, y in runs] for k in (0, -1)]
    each = [' '.join(f'{v:.3f}' for v in values) for values in ends]
    means = [f'{sum(values) / len(values):.3f}' for values in ends]
    out.add_row(name, str(len(runs)), *each, *means)
  return out


def stored(workdir: pathlib.Path) -> dict[str, pathlib.Path]:
  """Task id -> file, of every trajectory kept under a work directory."""
  out = {}
  for path in sorted((workdir / 'trajectories').rglob('*')):
    if path.is_file():
      try:
        out[trace.from_bytes(path.read_bytes()).task_id] = path
      except ValueError:
        continue  # something else, or half written
  return out


def find(workdir: pathlib.Path, task_id: str) -> pathlib.Path:
  """The file of one trajectory.

  Raises:
    ValueError: there is none.
  """
  paths = stored(workdir)
  if task_id not in paths:
    near = difflib.get_close_matches(task_id, paths, 3, 0.0) or ['none']
    raise ValueError(
        f'task={task_id}: none of the {len(paths)} trajectories kept in'
        f' {workdir}; near it: {", ".join(near)}'
    )
  return paths[task_id]


def trajectories(
    paths: Iterable[pathlib.Path], most: int = 50
) -> rich_table.Table:
  """A list of trajectories, at most so many."""
  paths = list(paths)
  out = grid(
      f'{len(paths)} trajectories, {min(most, len(paths))} shown',
      *('task', 'reward', 'stop', 'segments', 'tokens', 'sampled', 'versions'),
  )
  for path in paths[-most:]:
    t = trace.from_bytes(path.read_bytes())
    versions = [v for s in t.segments for v in s.versions[s.sampled].tolist()]
    out.add_row(
        t.task_id,
        '-' if t.reward is None else progress.figure(t.reward),
        t.stop.value,
        str(len(t.segments)),
        str(sum(map(len, t.segments))),
        str(len(versions)),
        f'{min(versions)} to {max(versions)}' if versions else '-',
    )
  return out


def _pieces(
    segment: trace.TokenTrace, tokenizer: tokenizers.Tokenizer | None
) -> list[str]:
  """The text of every token; ids in brackets without a tokenizer."""
  if tokenizer is None:
    return [f'[{i}]' for i in segment.tokens]
  return [
      tokenizer.decode([i], skip_special_tokens=False)
      for i in segment.tokens.tolist()
  ]


def _reading(segment: trace.TokenTrace, pieces: list[str]) -> text.Text:
  """A segment as text: given dim, sampled bold or red if it was unlikely."""
  out = text.Text()
  version = None
  for i, piece in enumerate(pieces):
    if not segment.sampled[i]:
      out.append(piece, 'dim')
      continue
    if segment.versions[i] != version:
      version = segment.versions[i]
      out.append(f'⟨v{version}⟩', 'cyan')
    style = 'bold' if segment.logps[i] > math.log(0.5) else 'bold red'
    out.append(piece, style)
  return out


def _tokens(segment: trace.TokenTrace, pieces: list[str]) -> rich_table.Table:
  """Every token with its figures; blank experts are those not recorded."""
  out = grid('', '#', 'token', 'log-prob', 'version', 'experts by layer')
  for i, piece in enumerate(pieces):
    experts = ''
    if segment.routing is not None:
      rows = segment.routing.experts[i]
      if rows.size and rows.flat[0] != trace.blank_route(rows.dtype):
        experts = ' | '.join(' '.join(map(str, r)) for r in rows.tolist())
    logp = f'{segment.logps[i]:.4f}' if segment.sampled[i] else ''
    version = str(segment.versions[i])
    out.add_row(str(i), repr(piece), logp, version, experts)
  return out


def trajectory(
    path: pathlib.Path, tokens: bool = False
) -> Iterator[console.RenderableType]:
  """One trajectory: what it earned, and its text or its tokens.

  Args:
    path: file of the trajectory, in a run whose tokenizer is used.
    tokens: a line for every token instead of the text.
  """
  t = trace.from_bytes(path.read_bytes())
  files = [folder / 'tokenizer.json' for folder in path.absolute().parents]
  known = next((f for f in files if f.exists()), None)
  tokenizer = tokenizers.Tokenizer.from_file(str(known)) if known else None
  facts = grid(t.task_id, '', '')
  facts.columns[1].justify = 'left'
  facts.add_row('group', t.group_id)
  facts.add_row('stop', t.stop.value)
  facts.add_row('reward', 'none' if t.reward is None else f'{t.reward:g}')
  for name, value in t.reward_parts.items():
    facts.add_row(f'  {name}', f'{value:g}')
  for name, value in t.meta.items():
    facts.add_row(name, value)
  for step, root in sorted(t.weights.items()):
    facts.add_row(f'weights v{step}', root)
  yield facts
  for number, segment in enumerate(t.segments):
    pieces = _pieces(segment, tokenizer)
    logps = segment.logps[segment.sampled]
    mean = f', mean log-prob {logps.mean():.3f}' if logps.size else ''
    yield text.Text(
        f'\nsegment {number}: {len(segment)} tokens, {logps.size}'
        f' sampled{mean}',
        'bold',
    )
    yield _tokens(segment, pieces) if tokens else _reading(segment, pieces)


def calibration(
    report: Mapping[str, Any],
) -> Iterator[console.RenderableType]:
  """The report of `rewards.calibration` as tables."""

  def number(value: float | None) -> str:
    return '-' if value is None else f'{value:.2f}'

  yield text.Text(
      f'{report["judge"]}: {report["rows"]} rows,'
      f' {report["unanswered"]:.0%} of the judgements without a score',
      'bold',
  )
  out = grid('Items', '', 'agrees with itself', 'kappa', 'labels', 'mean score')
  for name, item in report['items'].items():
    out.add_row(
        name,
        number(item['agreement']),
        number(item['kappa']),
        str(item['labels']),
        number(item['mean']),
    )
  yield out
  for title, key in (('Kinds of work', 'kinds'), ('Versions', 'versions')):
    if report[key]:
      out = grid(title, '', 'mean score')
      for name, mean in report[key].items():
        out.add_row(name, number(mean))
      yield out
  out = grid('Items that rise and fall together', '', 'correlation')
  for pair in report['correlation']:
    out.add_row(' / '.join(pair['items']), number(pair['r']))
  yield out
  if drift := report['drift']:
    yield text.Text(
        f'drift from {drift["from"]}: {number(drift["mean"])} on average,'
        f' {number(drift["moved"])} of {drift["rows"]} rows moved'
    )
