"""What is packed: segments with their rollout's advantage. Numpy only.

The checks here are where a bad trace stops: nothing is repaired, padded or
filled in on its way to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from composer_jax import config
from composer_jax import trace


@dataclasses.dataclass(frozen=True)
class Item:
  """One segment to be trained.

  Attributes:
    rollout: number of its rollout in the optimizer batch, from 1.
    trace: the segment.
    advantage: the rollout's; the same for all of its segments.
  """

  rollout: int
  trace: trace.TokenTrace
  advantage: float


def from_trajectories(
    trajectories: Sequence[trace.Trajectory], advantages: Sequence[float]
) -> list[Item]:
  """Numbers the rollouts of an optimizer batch and splits them into segments.

  Args:
    trajectories: valid rollouts, whole groups.
    advantages: one for each.

  Returns:
    Items in order; segments without a sampled token are left out.

  Raises:
    ValueError: an invalid rollout, or the lengths differ.
  """
  for t in trajectories:
    if not t.valid:
      raise ValueError(
          f'{t.task_id}: stop={t.stop.value}, reward={t.reward}: an invalid'
          ' rollout must leave its group before packing'
      )
  return [
      Item(i, s, float(a))
      for i, (t, a) in enumerate(zip(trajectories, advantages, strict=True), 1)
      for s in t.segments
      if s.sampled.any()
  ]


def document(
    tokens: np.ndarray, trained: np.ndarray | None = None
) -> trace.TokenTrace:
  """Text as a trace: every token but the first is a target.

  Args:
    tokens: int32 [T].
    trained: bool [T], targets to keep; None for all.
  """
  sampled = np.arange(len(tokens)) > 0
  if trained is not None:
    sampled &= trained
  logps, versions = (np.zeros(len(tokens), t) for t in (np.float32, np.int32))
  return trace.TokenTrace(tokens, sampled, logps, versions)


def check(
    items: Sequence[Item],
    *,
    longest: int,
    now: int,
    replay: config.ModelConfig | None,
) -> None:
  """Refuses what must not be trained on.

  Args:
    items: segments of one optimizer batch.
    longest: tokens that a segment may have.
    now: version of the trainer's weights.
    replay: the model whose routing must have been recorded; None if none.

  Raises:
    ValueError: a segment that is empty or too long, a token from the future, a
      sampled token without predecessor or log-prob, advantages that differ
      within a rollout, or routing that is missing, misshapen, or has a hole
      between two sampled tokens.
  """
  shared: dict[int, float] = {}
  for item in items:
    _check(item, longest, now, shared.setdefault(item.rollout, item.advantage))
    if replay is not None:
      _check_routing(item, replay)


def _check(item: Item, longest: int, now: int, shared: float) -> None:
  t = item.trace
  if item.rollout < 1:
    raise ValueError(f'Item.rollout={item.rollout}: numbers start at 1')
  if not 0 < len(t) <= longest:
    raise ValueError(
        f'rollout {item.rollout}: segment of {len(t)} tokens, want 1 to'
        f' tokens_per_row={longest}; raise it or lower'
        ' HarnessConfig.max_context_tokens'
    )
  if t.sampled[0]:
    raise ValueError(
        f'rollout {item.rollout}: sampled[0] is True, but nothing precedes'
        ' token 0 to predict it from; a segment starts with its prompt'
    )
  if t.versions.max() > now:
    raise ValueError(
        f'rollout {item.rollout}: versions up to {t.versions.max()} at'
        f' now={now}; a token cannot be newer than the trainer'
    )
  if not np.isfinite(t.logps[t.sampled]).all():
    raise ValueError(
        f'rollout {item.rollout}: logps of sampled tokens are not finite; the'
        ' engine must record what it sampled from'
    )
  if not np.isfinite(item.advantage) or item.advantage != shared:
    raise ValueError(
        f'rollout {item.rollout}: advantage={item.advantage}, want one finite'
        f' value for all of its segments (the first has {shared})'
    )


def _check_routing(item: Item, model: config.ModelConfig) -> None:
  t = item.trace
  want = (len(t), model.moe_layers, model.top_k)
  dtype = trace.route_dtype(model.experts)
  if t.routing is None:
    raise ValueError(
        f'rollout {item.rollout}: no routing trace, but replay needs one;'
        ' record it or train without replay'
    )
  experts = t.routing.experts
  if experts.shape != want or experts.dtype != dtype:
    raise ValueError(
        f'rollout {item.rollout}: routing is {experts.dtype}'
        f' {experts.shape}, want {dtype} {want}'
    )
  blank = experts == trace.blank_route(dtype)
  row_blank = blank.any(axis=(1, 2))
  if (experts[~blank] >= model.experts).any() or (
      row_blank & ~blank.all(axis=(1, 2))
  ).any():
    raise ValueError(
        f'rollout {item.rollout}: a routing row is partly blank or names an'
        f' expert >= experts={model.experts}; the trace is damaged'
    )
  if (row_blank[:-1] & t.sampled[:-1] & t.sampled[1:]).any():
    raise ValueError(
        f'rollout {item.rollout}: blank routing between two sampled tokens;'
        ' the engine had to choose experts there and did not record them'
    )
