"""What the trainer refuses to learn from, and the age of what it accepts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from composer_jax import trace
from composer_jax.fleet import admission
from composer_jax.fleet import facts as facts_lib


def check(
    facts: facts_lib.Facts,
    *,
    task_id: str,
    digests: Mapping[int, str],
    oldest_version: int,
) -> str:
  """Returns why a result must not be counted; '' if it may be.

  Args:
    facts: what the result says of itself.
    task_id: task of the lease that it answers.
    digests: version number -> digest of every version published.
    oldest_version: a host may not sample with weights older than this.
  """
  if facts.task_id != task_id:
    return f'task_id={facts.task_id!r}: the lease was for {task_id!r}'
  if facts.group_id != task_id.rsplit('/', 1)[0]:
    return f'group_id={facts.group_id!r}: not the group of {task_id!r}'
  if facts.reward is not None and not np.isfinite(facts.reward):
    return f'reward={facts.reward}: must be finite'
  for i, window in enumerate(facts.windows):
    for version, _ in window.sampled:
      digest = facts.weights.get(version)
      if digest is None or digests.get(version) != digest:
        return f'segment {i}: version {version} has unknown digest {digest}'
      if version < oldest_version and digest not in _since(
          digests, oldest_version
      ):
        return (
            f'segment {i}: sampled with version {version}, older than'
            f' {oldest_version}, the oldest a host may serve'
        )
  return ''


def _since(digests: Mapping[int, str], oldest: int) -> set[str]:
  """Weights of the versions from `oldest` on.

  A run that is resumed publishes the weights of its checkpoint anew: what was
  sampled with them before the kill has an old number and is not old.
  """
  return {digest for version, digest in digests.items() if version >= oldest}


def check_payload(
    trajectory: trace.Trajectory,
    facts: facts_lib.Facts,
    *,
    routing_required: bool,
) -> str:
  """Returns why a payload must not be trained on; '' if it may be.

  Args:
    trajectory: the decoded payload.
    facts: what it was counted as.
    routing_required: the model has MoE layers, so every sampled token must
      say which experts computed it.
  """
  if facts_lib.to_json(facts_lib.of(trajectory)) != facts_lib.to_json(facts):
    return 'the payload is not what was said of it'
  for i, s in enumerate(trajectory.segments):
    if not np.isfinite(s.logps[s.sampled]).all():
      return f'segment {i}: log-prob of a sampled token is not finite'
    if routing_required and s.sampled.any():
      if s.routing is None:
        return f'segment {i}: no routing trace'
      experts = s.routing.experts
      # Row t - 1 holds the forward pass that token t was sampled from.
      used = experts[:-1][s.sampled[1:]]
      if (used == trace.blank_route(experts.dtype)).any():
        return f'segment {i}: a sampled token has a blank routing row'
  return ''


def _summary(name: str, values: Iterable[float]) -> dict[str, float]:
  x = np.asarray(list(values), np.float64)
  if not x.size:
    return {}
  return {
      f'{name}_mean': float(x.mean()),
      f'{name}_p95': float(np.quantile(x, 0.95)),
      f'{name}_max': float(x.max()),
  }


def _windows(rollouts: list[facts_lib.Facts]) -> dict[str, float]:
  """Segments, summaries and context of rollouts, if any has two segments."""
  if all(len(t.windows) < 2 for t in rollouts):
    return {}
  summaries = [int(t.meta.get('summaries', 0)) for t in rollouts]
  written = sum(int(t.meta.get('summary_tokens', 0)) for t in rollouts)
  return {
      'segments/summary_tokens_mean': written / max(1, sum(summaries)),
      **_summary('segments/count', [len(t.windows) for t in rollouts]),
      **_summary('segments/summaries', summaries),
      # Of all windows together, and of the longest: the first may exceed the
      # context that the model has, the second never does.
      **_summary(
          'segments/tokens', [sum(map(len, t.windows)) for t in rollouts]
      ),
      'segments/longest_tokens': float(
          max(len(w) for t in rollouts for w in t.windows)
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
  ages = [batch.version - t.sampled_versions for t in trained]
  generated = [m.facts for m in members if m.facts is not None]
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
    spanning = [np.unique(t.sampled_versions).size > 1 for t in trained]
    out['lag/spanning_fraction'] = float(np.mean(spanning))
  out |= _summary(
      'lag/submit', [batch.version - g.version for g in batch.groups]
  )
  out |= _summary('lag/token_age', np.concatenate([*ages, []]))
  out |= _windows(generated)
  for name, rollouts in (('trained', trained), ('generated', generated)):
    lengths = [t.sampled_versions.size for t in rollouts]
    out |= _summary(f'length/{name}', lengths)
  return out
