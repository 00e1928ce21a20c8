"""What is recorded of a step: figures of its rollouts, and some of them whole."""

from __future__ import annotations

from collections.abc import Sequence
import pathlib
from typing import Any

import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.fleet import admission
from composer_jax.fleet import dispatcher
from composer_jax.fleet import facts as facts_lib
from composer_jax.fleet import ingest
from composer_jax.learner import items
from composer_jax.learner import packing
from composer_jax.rewards import signals

# Trajectories written to disk per step, for people.
_KEPT_PER_STEP = 16
_KEPT_UNTRAINED = 4


def _spread(
    groups: Sequence[admission.Group], most: int
) -> list[facts_lib.Facts]:
  """A few rollouts of some groups, evenly over them."""
  every = [t for g in groups for t in g.rollouts]
  return every[:: max(1, len(every) // most)][:most]


def shown(batch: admission.Consumed) -> list[facts_lib.Facts]:
  """Rollouts of a step that are kept; of groups that taught nothing, too.

  Why they did not is what one wants to look at when a run learns nothing.
  """
  kept = _spread(batch.groups, _KEPT_PER_STEP)
  return kept + _spread(batch.untrained, _KEPT_UNTRAINED)


def keep(step: dispatcher.Step, folder: pathlib.Path) -> None:
  """Writes the rollouts that are `shown`."""
  folder = folder / f'{step.consumed.step:06d}'
  folder.mkdir(parents=True, exist_ok=True)
  for facts in shown(step.consumed):
    prompt, member = admission.parse_task_id(facts.task_id)
    path = folder / f'{prompt}-{member}.traj'
    path.write_bytes(trace.to_bytes(step.payloads[facts.task_id]))


def _truncated(facts: facts_lib.Facts, turn_tokens: int) -> bool:
  """Says whether every turn of a rollout ran into its budget."""
  turns = [w.shortest_turn for w in facts.windows if w.sampled]
  return bool(turns) and min(turns) >= turn_tokens


def of_batch(
    batch: admission.Consumed, harness: config.HarnessConfig
) -> dict[str, float]:
  """Figures of a batch's rollouts, whether or not they were trained."""
  return _rewards(batch, harness.max_turn_tokens) | _behavior(batch)


def _rewards(batch: admission.Consumed, turn_tokens: int) -> dict[str, float]:
  groups = batch.groups + batch.untrained
  rewards = [[t.reward for t in g.rollouts] for g in groups]
  rewards = [r for r in rewards if r]
  flat = [r for group in rewards for r in group]
  lag = ingest.metrics(batch)
  cut = [_truncated(t, turn_tokens) for g in groups for t in g.rollouts]
  return {
      'reward/mean': float(np.mean(flat)) if flat else 0.0,
      'reward/best_of_group': (
          float(np.mean([max(r) for r in rewards])) if rewards else 0.0
      ),
      'group/zero_variance_fraction': lag['groups/zero_variance_fraction'],
      'rollouts/truncated_fraction': float(np.mean(cut)) if cut else 0.0,
      'group/invalid': lag['groups/too_few'],
      'lost_rollouts': lag['rollouts/lost'] + lag['rollouts/refused'],
      'staleness/submit_lag_mean': lag.get('lag/submit_mean', 0.0),
      **{
          k: v
          for k, v in lag.items()
          if k.startswith(('rollouts/', 'length/', 'segments/'))
      },
  }


def _behavior(batch: admission.Consumed) -> dict[str, float]:
  """Means of the signals of all rollouts of a step."""
  parts = [
      t.reward_parts for g in batch.groups + batch.untrained for t in g.rollouts
  ]
  names = sorted({k for p in parts for k in p if k.startswith(signals.PREFIX)})
  return {k: float(np.mean([p[k] for p in parts if k in p])) for k in names}


def staleness(
    packed: packing.PackStats, segments: list[items.Item], now: int
) -> dict[str, Any]:
  ages = [now - i.trace.versions[i.trace.sampled] for i in segments]
  counts = np.bincount(np.concatenate([*ages, np.zeros(0, np.int32)]))
  return {
      'staleness/token_p95': packed.age_p95,
      'staleness/token_max': packed.age_max,
      'staleness/spanning_fraction': packed.mixed_version_fraction,
      'staleness/histogram': counts.tolist(),
      'tokens/trained': packed.sampled_tokens - packed.withheld_tokens,
      'tokens/withheld': packed.withheld_tokens,
      'tokens/packed_fraction': packed.fill_fraction,
  }
