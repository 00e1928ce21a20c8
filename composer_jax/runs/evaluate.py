"""Held-out evaluation: sampled and greedy pass@1, and tasks to look at.

Evaluation tasks come from splits that neither the warm-up nor RL draws from,
and `disjoint` checks it instance by instance, by hash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import math
import pathlib
from typing import Any

import jax
import numpy as np

from composer_jax import config
from composer_jax import task as task_lib
from composer_jax import trace
from composer_jax.agents import harness
from composer_jax.fleet import admission
from composer_jax.learner import items
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.runs import base_model
from composer_jax.runs import feed
from composer_jax.runs import fleet
from composer_jax.runs import player
from composer_jax.runs import stored_model
from kernels_triton import contract

SPLITS = {'eval': 'eval', 'heldout': 'heldout_families'}


@dataclasses.dataclass(frozen=True)
class Score:
  """Outcomes of one split, task by task.

  Attributes:
    sampled: bool [tasks], solved at temperature 1.
    greedy: bool [tasks], solved at temperature 0.
    invalid: episodes that could not be judged; they count as unsolved.
  """

  sampled: np.ndarray
  greedy: np.ndarray
  invalid: int


def tasks_of(cfg: config.Experiment, split: str) -> list[task_lib.Task]:
  """The evaluation tasks of a split; the same for every model and seed."""
  first = cfg.evaluation.seed
  return [cfg.tasks.task(first + i, split) for i in range(cfg.evaluation.tasks)]


def chances(cfg: config.Experiment, split: str) -> np.ndarray:
  """Probability that one random legal edit repairs each task, f64 [tasks]."""
  return np.array([cfg.tasks.chance(t) for t in tasks_of(cfg, split)])


def disjoint(
    cfg: config.Experiment,
    seen: dict[str, Sequence[int]],
    ended: Callable[[], None] = lambda: None,
) -> dict[str, int]:
  """Checks that no evaluation task was seen in training.

  Args:
    cfg: the experiment.
    seen: split -> indices drawn from it ('warmup', 'train').
    ended: called after every task of `seen`.

  Returns:
    Number of distinct fingerprints per split.

  Raises:
    ValueError: an evaluation task is among them.
  """
  source = cfg.tasks

  def fingerprint(split: str, index: int) -> str:
    ended()
    return source.fingerprint(source.task(index, split))

  prints = {
      split: {fingerprint(split, i) for i in indices}
      for split, indices in seen.items()
  }
  counts = {split: len(p) for split, p in prints.items()}
  for split in SPLITS:
    tasks = tasks_of(cfg, split)
    evaluated = {source.fingerprint(t) for t in tasks}
    counts[split] = len(evaluated)
    for other, known in prints.items():
      if both := evaluated & known:
        raise ValueError(
            f'evaluation split {split!r}: {len(both)} tasks are in {other!r}'
            ' too; the figures would be worthless'
        )
  return counts


def evaluate(
    cfg: config.Experiment,
    host: player.Player,
    version: int,
    splits: Iterable[str] = tuple(SPLITS),
    ended: Callable[[], None] = lambda: None,
) -> dict[str, Score]:
  """Scores the weights of a version on every split.

  Args:
    cfg: the experiment.
    host: host on `version` or newer; nobody may publish meanwhile.
    version: weight step that must be served.
    splits: splits to play.
    ended: called after every episode, on another thread.
  """
  scores = {}
  for split in splits:
    tasks = tasks_of(cfg, split)
    seeds = [
        admission.rollout_seed(cfg.evaluation.seed, i, 0)
        for i in range(len(tasks))
    ]
    sampled, greedy = (
        host.call(
            host.rollouts(
                tasks,
                name=split,
                seeds=seeds,
                temperature=temperature,
                oldest_version=version,
                ended=ended,
            )
        )
        for temperature in (1.0, 0.0)
    )
    scores[split] = Score(
        _solved(sampled),
        _solved(greedy),
        sum(not t.valid for t in sampled + greedy),
    )
  return scores


def _solved(trajectories: Sequence[trace.Trajectory]) -> np.ndarray:
  passed = [t.reward_parts.get('passed', 0.0) for t in trajectories]
  return np.array(passed) == 1.0


def figures(scores: dict[str, Score]) -> dict[str, float]:
  """Scores as the flat figures of a metrics record."""
  out = {}
  for split, name in SPLITS.items():
    out[f'{name}/pass1_sampled'] = float(scores[split].sampled.mean())
    out[f'{name}/pass1_greedy'] = float(scores[split].greedy.mean())
  return out


def breakdown(
    cfg: config.Experiment, split: str, score: Score
) -> dict[str, dict[str, float]]:
  """Rates of a split as a whole ('all') and by family of its tasks.

  Returns:
    name -> tasks, chance, and pass@1 with its standard error over tasks,
    sqrt(p (1 - p) / n), for `sampled` and `greedy`.
  """
  families = np.array([t.meta['family'] for t in tasks_of(cfg, split)])
  legal = chances(cfg, split)
  groups = {'all': np.full(len(families), True)}
  groups |= {name: families == name for name in np.unique(families).tolist()}
  out = {}
  for name, which in groups.items():
    n = int(which.sum())
    out[name] = {'tasks': n, 'chance': float(legal[which].mean())}
    for kind in ('sampled', 'greedy'):
      p = float(getattr(score, kind)[which].mean())
      out[name][kind] = p
      out[name][f'{kind}_error'] = math.sqrt(p * (1 - p) / n)
  return out


def stored_host(
    cfg: config.Experiment,
    workdir: pathlib.Path,
    version: int | None,
    device: jax.Device,
) -> player.Player:
  """A host on one published version of an existing run, which it only reads.

  Args:
    cfg: experiment of the run.
    workdir: directory of the run.
    version: weight step; None for the newest.
    device: device of the engine.

  Raises:
    ValueError: the run has published nothing yet. Entering the host raises it
      if the version does not exist.
  """
  url, folder = fleet.weights(workdir), workdir / 'weights'
  if url.startswith(f'file://{folder.resolve()}/') and not folder.exists():
    raise ValueError(f'{folder}: no version has been published yet')
  return player.Player(
      cfg,
      url,
      base_model.renderer(cfg, stored_model.read(url)),
      device=device,
      feed=functools.partial(feed.FixedFeed, step=version),
  )


def showcase(
    cfg: config.Experiment, host: player.Player, version: int
) -> list[trace.Trajectory]:
  """Greedy episodes of the first few held-out tasks."""
  tasks = tasks_of(cfg, 'eval')[: cfg.evaluation.showcase]
  return host.call(
      host.rollouts(
          tasks,
          name='showcase',
          seeds=[0] * len(tasks),
          temperature=0.0,
          oldest_version=version,
      )
  )


def showcase_record(
    cfg: config.Experiment,
    renderer: Any,
    sides: dict[str, list[trace.Trajectory]],
    weights: dict[str, Any],
    mesh: jax.sharding.Mesh,
) -> dict[str, Any]:
  """The tasks side by side, every token scored by both models.

  Args:
    cfg: the experiment.
    renderer: spells tokens.
    sides: 'before' and 'after' -> episodes of the same tasks.
    weights: 'before' and 'after' -> published params.
    mesh: the trainer's.
  """
  tasks = tasks_of(cfg, 'eval')[: cfg.evaluation.showcase]
  record = []
  for i, task in enumerate(tasks):
    prompt, misfit = harness.prompt_of(task, renderer, cfg.harness)
    if misfit:
      continue  # it was not played
    entry = {
        'task_id': task.id,
        'family': task.meta.get('family', ''),
        'prompt': renderer.text(prompt),
    }
    for side, episodes in sides.items():
      entry[side] = _side(cfg, renderer, episodes[i], weights, mesh)
    record.append(entry)
  return {'tasks': record}


def _side(cfg, renderer, trajectory, weights, mesh) -> dict[str, Any]:
  segments = trajectory.segments
  scores = {
      name: rescore(cfg, segments, params, mesh)
      for name, params in weights.items()
  }
  tokens, written = [], []
  for i, segment in enumerate(segments):
    logps = {name: score[i][0] for name, score in scores.items()}
    written += segment.tokens[segment.sampled].tolist()
    for t, token in enumerate(segment.tokens.tolist()):
      drawn = bool(segment.sampled[t])
      # What computed the token: the routing of the input before it.
      experts = segment.routing.experts[t - 1].tolist() if drawn else []
      tokens.append(
          {
              'text': renderer.text([token]),
              'sampled': drawn,
              'logp_before': float(logps['before'][t]) if drawn else None,
              'logp_after': float(logps['after'][t]) if drawn else None,
              'experts': experts,
          }
      )
  return {
      'reward': trajectory.reward,
      'submission': renderer.text(written),
      'tokens': tokens,
  }


def rescore(
    cfg: config.Experiment,
    segments: Sequence[trace.TokenTrace],
    params: Any,
    mesh: jax.sharding.Mesh,
) -> list[tuple[np.ndarray, np.ndarray]]:
  """The trainer's own forward on finished windows, routing live.

  Args:
    cfg: the experiment.
    segments: windows of at most `rl.tokens_per_row` tokens.
    params: published weights.
    mesh: the trainer's.

  Returns:
    For each window (log-prob of token t at t f32 [T], routing [T L K]).
  """
  shape = packing.Shape(
      cfg.rl.rows_per_batch, cfg.rl.tokens_per_row, contract.KEY_BLOCK
  )
  packed = [
      items.Item(i, items.document(s.tokens), 0.0)
      for i, s in enumerate(segments, 1)
  ]
  out: dict[int, tuple[np.ndarray, np.ndarray]] = {}
  for batch in packing.pack_all(packed, shape, now=0)[0]:
    logps, routing = jax.device_get(
        step.score(params, batch, cfg=cfg.model, mesh=mesh)
    )
    for number in np.unique(batch.rollouts[batch.rollouts > 0]).tolist():
      row, start = np.argwhere(batch.rollouts == number)[0]
      span = slice(start, start + len(segments[number - 1]))
      out[number] = logps[row, span], routing[row, span]
  return [out[i] for i in range(1, len(segments) + 1)]
