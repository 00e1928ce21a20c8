"""What a finished run has shown: summary.json, showcase.json, report.html.

Everything is derived from what is on disk (metrics, trajectories, weights), so
a run that was killed and resumed sums up like one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import json
import pathlib
import resource
from typing import Any

import numpy as np

from composer_jax import atomic
from composer_jax.dashboard import report
from composer_jax.runs import audit as audit_lib
from composer_jax.runs import evaluate
from composer_jax.runs import feed
from composer_jax.runs import pipeline
from composer_jax.runs import progress
from composer_jax.weights import follow

Records = dict[str, dict[int, dict[str, Any]]]


def read_metrics(path: pathlib.Path) -> Records:
  """phase -> step -> figures; lines of one phase and step are merged."""
  out: Records = {}
  for line in path.read_text().splitlines():
    record = json.loads(line)
    steps = out.setdefault(record['phase'], {})
    steps.setdefault(record['step'], {}).update(record)
  return out


def _series(records: Mapping[int, Mapping[str, Any]], name: str) -> list[float]:
  values = (records[s].get(name) for s in sorted(records))
  return [v for v in values if v is not None]


def _mean(values: Iterable[float]) -> float:
  values = list(values)
  return float(np.mean(values)) if values else 0.0


def _edge(records, name: str) -> dict[str, float]:
  """Mean of the first and of the last tenth (at least 5 steps)."""
  values = _series(records, name)
  n = max(5, len(values) // 10)
  return {'first': _mean(values[:n]), 'last': _mean(values[-n:])}


def _ends(records, name: str) -> dict[str, float]:
  values = _series(records, name)
  return {'before': values[0], 'after': values[-1]}


def _seconds(records: Records, phases: Sequence[str]) -> dict[str, float]:
  """Wall time per stage, from the clock of the records."""

  def last(*phases):
    ends = [r['seconds'] for p in phases for r in records.get(p, {}).values()]
    return max(ends, default=0.0)

  evals = sum(_series(records['eval'], 'time/eval'))
  pretrained = last(*phases)
  total = last('rl', 'eval')
  return {
      'midtrain': pretrained,
      'rl': total - pretrained - evals,
      'eval': evals,
  }


def _weights(rl) -> dict[str, float]:
  sent = _series(rl, 'weights/delta_bytes')
  # Of sums: a step without an update would dominate a mean of ratios.
  whole = sum(
      r * n for r, n in zip(_series(rl, 'weights/ratio'), sent, strict=True)
  )
  changed = sum(_series(rl, 'weights/changed_values'))
  return {
      'versions_published': len(_series(rl, 'weights/version')),
      'mean_changed_fraction': _mean(_series(rl, 'weights/changed_fraction')),
      'bits_per_changed': 8 * sum(sent) / changed if changed else 0.0,
      'ratio': whole / sum(sent),
  }


@contextlib.contextmanager
def _counted(
    total: int, unit: str, label: str
) -> Generator[Callable[[], None]]:
  """Progress bar that moves by one whenever the yielded function is called."""
  done = itertools.count(1)
  with progress.Progress(total, unit, label=label) as bar:
    yield lambda: bar.update(next(done))


def _same_version_tokens(rl) -> int:
  """Trained tokens that ran, prompt included, on the trainer's own version."""
  share = 'mismatch/same_version_share'  # of a step that trained anything
  steps = (r for r in rl.values() if r.get(share) is not None)
  return round(sum(r[share] * r['tokens/trained'] for r in steps))


def _peak_memory() -> int:
  """Largest resident size of this process so far, in bytes."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build(run: pipeline.Run) -> dict[str, Any]:
  """Audits the run, writes its three files and returns the summary.

  Args:
    run: run whose RL is complete.

  Raises:
    ValueError: an evaluation task was seen in training.
  """
  records = read_metrics(run.workdir / 'metrics.jsonl')
  rl, evals = records['rl'], records['eval']
  phases = [phase.name for phase in run.cfg.phases]
  with _counted(audit_lib.VERSIONS, 'version', 'audit') as ended:
    audit = audit_lib.run(run.cfg, run.workdir, run.store, run.mesh, ended)
  seen = pipeline.seen(run)
  total = sum(map(len, seen.values()))
  with _counted(total, 'task', 'train and held-out tasks differ') as ended:
    counts = evaluate.disjoint(run.cfg, seen, ended)
  same = _series(rl, 'mismatch/kl_same_version')
  trained = _series(rl, 'time/train')
  summary = {
      'heldout_pass1_sampled': _ends(evals, 'eval/pass1_sampled'),
      'heldout_pass1_greedy': _ends(evals, 'eval/pass1_greedy'),
      'heldout_families': {
          kind: _ends(evals, f'heldout_families/pass1_{kind}')
          for kind in ('sampled', 'greedy')
      },
      'evaluation': {
          'tasks': run.cfg.evaluation.tasks,
          'distinct_instances': counts,
          'chance': float(evaluate.chances(run.cfg, 'eval').mean()),
          'chance_heldout_families': float(
              evaluate.chances(run.cfg, 'heldout').mean()
          ),
      },
      'train_reward': _edge(rl, 'reward/mean'),
      'heldout_bits_per_byte': {
          phase: _ends(records[phase], 'bits_per_byte')
          for phase in phases
          if _series(records[phase], 'bits_per_byte')
      },
      # None if no step had anything to train on: nothing was measured then.
      'mismatch_kl_same_version': max(map(abs, same), default=None),
      'same_version_tokens': _same_version_tokens(rl),
      'audit': dataclasses.asdict(audit),
      'weights': {
          **_weights(rl),
          'digest_mismatches': audit.digest_mismatches
          + int(sum(_series(rl, 'weights/follower_mismatches'))),
      },
      'staleness': {
          'mean': _mean(_series(rl, 'staleness/token_mean')),
          'max': max(_series(rl, 'staleness/token_max'), default=0),
      },
      'lost_rollouts': int(sum(_series(rl, 'lost_rollouts'))),
      'recompilations': int(sum(_series(rl, 'recompilations'))),
      'peak_memory_bytes': _peak_memory(),
      'seconds': _seconds(records, phases),
      'tokens_per_second': {
          'train': _mean(_series(rl, 'tokens/train_per_second')),
          'decode': _mean(_series(rl, 'tokens/decode_per_second')),
      },
      'rl_seconds': {
          'train': sum(trained),
          'wait_batch': sum(_series(rl, 'time/wait_batch')),
          'wait_weights': sum(_series(rl, 'time/wait_weights')),
      },
  }
  atomic.write_json(run.workdir / 'summary.json', summary)
  atomic.write_json(run.workdir / 'showcase.json', _showcase(run, evals))
  report.build(run.workdir)
  return summary


def _showcase(run: pipeline.Run, evals) -> dict[str, Any]:
  newest = int(evals[max(evals)]['eval/version'])
  weights = {
      # Not from the store: a long run has collected its first version.
      'before': feed.decode_params(pipeline.warm_arrays(run)),
      'after': feed.decode_params(follow.Follower(run.store).fetch(newest)),
  }
  sides = {
      side: pipeline.load_showcase(run.workdir, at)
      for side, at in (('before', min(evals)), ('after', max(evals)))
  }
  return evaluate.showcase_record(
      run.cfg, run.renderer, sides, weights, run.mesh
  )
