"""What the trainer refuses to learn from, and the age of what it accepts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from composer_jax import trace
from composer_jax.fleet import admission


def check(
    trajectory: trace.Trajectory,
    *,
    task_id: str,
    digests: Mapping[int, str],
    oldest_version: int,
    routing_required: bool,
) -> str:
  """Returns why a result must not be trained on; '' if it may be.

  Args:
    trajectory: the decoded result.
    task_id: task of the lease that it answers.
    digests: version number -> digest of every version published.
    oldest_version: a host may not sample with weights older than this.
    routing_required: the model has MoE layers, so every sampled token must
      say which experts computed it.
  """
  if trajectory.task_id != task_id:
    return f'task_id={trajectory.task_id!r}: the lease was for {task_id!r}'
  if trajectory.group_id != task_id.rsplit('/', 1)[0]:
    return f'group_id={trajectory.group_id!r}: not the group of {task_id!r}'
  if trajectory.reward is not None and not np.isfinite(trajectory.reward):
    return f'reward={trajectory.reward}: must be finite'
  for i, s in enumerate(trajectory.segments):
    if not np.isfinite(s.logps[s.sampled]).all():
      return f'segment {i}: log-prob of a sampled token is not finite'
    for version in np.unique(s.versions[s.sampled]).tolist():
      digest = trajectory.weights.get(version)
      if digest is None or digests.get(version) != digest:
        return f'segment {i}: version {version} has unknown digest {digest}'
      if version < oldest_version:
        return (
            f'segment {i}: sampled with version {version}, older than'
            f' {oldest_version}, the oldest a host may serve'
        )
    if routing_required and s.sampled.any():
      if s.routing is None:
        return f'segment {i}: no routing trace'
      experts = s.routing.experts
      # Row t - 1 holds the forward pass that token t was sampled from.
      used = experts[:-1][s.sampled[1:]]
      if (used == trace.blank_route(experts.dtype)).any():
        return f'segment {i}: a sampled token has a blank routing row'
  return ''


def _sampled_versions(t: trace.Trajectory) -> np.ndarray:
  spans = [s.versions[s.sampled] for s in t.segments]
  return np.concatenate(spans) if spans else np.zeros(0, np.int32)


def _summary(name: str, values: Iterable[float]) -> dict[str, float]:
  x = np.asarray(list(values), np.float64)
  if not x.size:
    return {}
  return {
      f'{name}_mean': float(x.mean()),
      f'{name}_p95': float(np.quantile(x, 0.95)),
      f'{name}_max': float(x.max()),
  }


def _windows(rollouts: list[trace.Trajectory]) -> dict[str, float]:
  """Segments, summaries and context of rollouts, if any has two segments."""
  if all(len(t.segments) < 2 for t in rollouts):
    return {}
  summaries = [int(t.meta.get('summaries', 0)) for t in rollouts]
  written = sum(int(t.meta.get('summary_tokens', 0)) for t in rollouts)
  return {
      'segments/summary_tokens_mean': written / max(1, sum(summaries)),
      **_summary('segments/count', [len(t.segments) for t in rollouts]),
      **_summary('segments/summaries', summaries),
      # Of all windows together, and of the longest: the first may exceed the
      # context that the model has, the second never does.
      **_summary(
          'segments/tokens', [sum(map(len, t.segments)) for t in rollouts]
      ),
      'segments/longest_tokens': float(
          max(len(s) for t in rollouts for s in t.segments)
      ),
  }


def metrics(batch: admission.Consumed) -> dict[str, float]:
  """Lag and losses of a batch; lags in weight versions.

  `submit_lag` is the trainer's version minus the one published when the group
  was admitted: what pacing limits. `token_age` is per sampled token, what the
  loss feels. A long rollout has a large token age, and is trained all the same.
  """
  trained = [t for g in batch.groups for t in g.rollouts]
  consumed = batch.groups + batch.untrained
  members = [m for g in consumed for m in g.members.values()]
  ages = [batch.version - _sampled_versions(t) for t in trained]
  generated = [m.trajectory for m in members if m.trajectory is not None]
  out = {
      'groups/trained': float(len(batch.groups)),
      'groups/in_flight': float(len(batch.in_flight)),
  }
  for fault in ('zero_variance', 'too_few'):
    n = sum(g.fault == fault for g in batch.untrained)
    out[f'groups/{fault}'] = float(n)
    out[f'groups/{fault}_fraction'] = n / max(1, len(consumed))
  for outcome in ('valid', 'infra', 'untrainable', 'refused', 'lost'):
    n = sum(m.outcome == outcome for m in members)
    out[f'rollouts/{outcome}'] = float(n)
  failed = [t.stop is trace.StopReason.POLICY_FAILURE for t in generated]
  out['rollouts/policy_failure'] = float(sum(failed))
  if trained:
    spanning = [np.unique(_sampled_versions(t)).size > 1 for t in trained]
    out['lag/spanning_fraction'] = float(np.mean(spanning))
  out |= _summary(
      'lag/submit', [batch.version - g.version for g in batch.groups]
  )
  out |= _summary('lag/token_age', np.concatenate([*ages, []]))
  out |= _windows(generated)
  for name, rollouts in (('trained', trained), ('generated', generated)):
    lengths = [_sampled_versions(t).size for t in rollouts]
    out |= _summary(f'length/{name}', lengths)
  return out
