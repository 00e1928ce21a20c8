"""Where the host meets the device: numpy traces in, a fixed-shape batch out.

Every segment lies contiguously in one row and starts at a multiple of the
attention key block, so that its bits do not depend on its neighbours. All
segments of a rollout are in ONE batch, so a loss that reduces over a rollout
sees all of it. Nothing is truncated or left out: what does not fit is refused
(`pack`) or goes into another batch of the same shape (`pack_all`).
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses

import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.learner import batch
from composer_jax.learner import items as items_lib


@dataclasses.dataclass(frozen=True)
class Shape:
  """The fixed shape that a step is compiled for.

  Attributes:
    rows: B of a batch.
    tokens_per_row: T of a batch.
    key_block: attention key block that a segment's start is aligned to.
  """

  rows: int
  tokens_per_row: int
  key_block: int


@dataclasses.dataclass(frozen=True)
class PackStats:
  """What was packed; ages are of sampled tokens, in published versions.

  Attributes:
    batches: batches of the fixed shape.
    tokens: real tokens in them, context included.
    fill_fraction: tokens over the capacity of the batches.
    sampled_tokens: tokens drawn by the policy.
    withheld_tokens: sampled tokens that are older than the bound: in no loss.
    age_mean: mean age, in versions.
    age_p95: 95th percentile, in versions.
    age_max: largest age, in versions.
    mixed_version_fraction: rollouts sampled from more than one version.
    blank_route_fraction: inputs without a recorded route; 0 without routing.
  """

  batches: int
  tokens: int
  fill_fraction: float
  sampled_tokens: int
  withheld_tokens: int
  age_mean: float
  age_p95: float
  age_max: int
  mixed_version_fraction: float
  blank_route_fraction: float


def pack_documents(
    documents: Sequence[np.ndarray], shape: Shape
) -> tuple[batch.Batch, PackStats]:
  """Packs plain text for next-token training; see `pack`.

  Args:
    documents: int32 [T] each, at most `shape.tokens_per_row` long.
    shape: shape of the batch.
  """
  items = [
      items_lib.Item(i, items_lib.document(d), 1.0)
      for i, d in enumerate(documents, 1)
  ]
  return pack(items, shape, now=0)


def pack(
    items: Sequence[items_lib.Item],
    shape: Shape,
    *,
    now: int,
    replay: config.ModelConfig | None = None,
    withhold_staleness_versions: int | None = None,
) -> tuple[batch.Batch, PackStats]:
  """`pack_all` for what must fit into one batch.

  Raises:
    ValueError: it does not, or as `pack_all`.
  """
  batches, stats = pack_all(
      items,
      shape,
      now=now,
      replay=replay,
      withhold_staleness_versions=withhold_staleness_versions,
  )
  if len(batches) != 1:
    raise ValueError(
        f'{len(items)} segments of {stats.tokens} tokens need {len(batches)}'
        f' batches of {shape}; raise rows or use pack_all'
    )
  return batches[0], stats


def pack_all(
    items: Sequence[items_lib.Item],
    shape: Shape,
    *,
    now: int,
    replay: config.ModelConfig | None = None,
    withhold_staleness_versions: int | None = None,
) -> tuple[list[batch.Batch], PackStats]:
  """Packs segments into as many batches of one shape as they need.

  First fit, longest rollout first, ties in the order of `items`: the result
  depends on the items alone. The step accumulates over the batches with the
  denominator of the whole optimizer batch.

  Args:
    items: segments; the batches never split a rollout.
    shape: shape of every batch.
    now: version of the trainer's weights; ages count from it.
    replay: the model whose recorded routing must come with every segment;
      None leaves routing to the trainer (`Batch.routing` is None).
    withhold_staleness_versions: tokens older than this stay as context but
      leave the loss; None keeps all.

  Returns:
    Batches with numpy leaves (at least one), and statistics over all of them.

  Raises:
    ValueError: a rollout that fits into no batch, or as `items.check`.
  """
  items_lib.check(items, longest=shape.tokens_per_row, now=now, replay=replay)
  batches = [
      _fill(items, plan, shape, now, replay, withhold_staleness_versions)
      for plan in _plan(items, shape)
  ]
  return batches, _stats(items, batches, now, replay)


def _plan(
    items: Sequence[items_lib.Item], shape: Shape
) -> list[list[tuple[int, int, int]]]:
  """Places every item: for each batch, (item index, row, start)."""
  rollouts: dict[int, list[int]] = {}
  for i, item in enumerate(items):
    rollouts.setdefault(item.rollout, []).append(i)

  def size(i):
    return len(items[i].trace)

  # All of a rollout or nothing: it works on a copy of `used`, the tokens taken
  # of each row, so a rollout that does not fit leaves the batch as it was.
  def fit(members, used):
    used, spots = list(used), []
    for i in members:
      room = shape.tokens_per_row - size(i)
      row = next((r for r, u in enumerate(used) if u <= room), None)
      if row is None:
        return None
      spots.append((i, row, used[row]))
      # The next one starts where a key block does, or its bits would change.
      blocks = -(-(used[row] + size(i)) // shape.key_block)
      used[row] = blocks * shape.key_block
    return used, spots

  # The longest first, so that the short ones fill what is left. Both sorts are
  # stable: ties keep the order of `items`.
  ordered = sorted(
      (sorted(m, key=size, reverse=True) for m in rollouts.values()),
      key=lambda m: sum(map(size, m)),
      reverse=True,
  )
  empty = [0] * shape.rows
  used, plans = [empty], [[]]
  for members in ordered:
    for b in range(len(plans) + 1):
      if b == len(plans):
        used.append(empty)
        plans.append([])
      found = fit(members, used[b])
      if found is not None:
        used[b], spots = found
        plans[b] += spots
        break
      if used[b] == empty:  # no batch has more room
        raise ValueError(
            f'rollout {items[members[0]].rollout}: its {len(members)} segments'
            f' of {sum(map(size, members))} tokens do not fit into one batch'
            f' of {shape}, and a rollout is never split over batches; raise'
            ' rows or tokens_per_row'
        )
  return plans


def _fill(
    items: Sequence[items_lib.Item],
    plan: list[tuple[int, int, int]],
    shape: Shape,
    now: int,
    replay: config.ModelConfig | None,
    bound: int | None,
) -> batch.Batch:
  """Writes the planned items into fresh arrays."""
  size = shape.rows, shape.tokens_per_row
  routing = None
  if replay is not None:
    dtype = trace.route_dtype(replay.experts)
    routing = np.full(
        (*size, replay.moe_layers, replay.top_k),
        trace.blank_route(dtype),
        dtype,
    )
  out = batch.Batch(
      tokens=np.zeros(size, np.int32),
      segments=np.zeros(size, np.int32),
      positions=np.zeros(size, np.int32),
      rollouts=np.zeros(size, np.int32),
      sampled=np.zeros(size, np.bool_),
      behaviour_logps=np.zeros(size, np.float32),
      advantages=np.zeros(size, np.float32),
      staleness=np.zeros(size, np.int32),
      routing=routing,
  )
  placed = np.zeros(shape.rows, np.int32)
  for i, row, start in plan:
    t = items[i].trace
    here = row, slice(start, start + len(t))
    placed[row] += 1
    age = now - t.versions
    out.tokens[here] = t.tokens
    out.segments[here] = placed[row]
    out.positions[here] = np.arange(len(t))
    out.rollouts[here] = items[i].rollout
    out.sampled[here] = (
        t.sampled if bound is None else t.sampled & (age <= bound)
    )
    out.behaviour_logps[here] = np.where(t.sampled, t.logps, 0.0)
    out.advantages[here] = items[i].advantage
    out.staleness[here] = age
    if routing is not None:
      routing[here] = t.routing.experts
  return out


def _stats(
    items: Sequence[items_lib.Item],
    batches: list[batch.Batch],
    now: int,
    replay: config.ModelConfig | None,
) -> PackStats:
  tokens = sum(len(i.trace) for i in items)
  none = [np.zeros(0, np.int32)]  # lets an empty batch through
  age = np.concatenate(
      none + [now - i.trace.versions[i.trace.sampled] for i in items]
  )
  spans = collections.defaultdict(set)
  for i in items:
    spans[i.rollout].update(i.trace.versions[i.trace.sampled].tolist())
  blank = none
  if replay is not None:
    mark = trace.blank_route(trace.route_dtype(replay.experts))
    blank = none + [
        (i.trace.routing.experts[:-1] == mark).any(axis=(1, 2)) for i in items
    ]
  trained = sum(int(np.count_nonzero(b.sampled)) for b in batches)
  return PackStats(
      batches=len(batches),
      tokens=tokens,
      fill_fraction=tokens / sum(b.tokens.size for b in batches),
      sampled_tokens=age.size,
      withheld_tokens=age.size - trained,
      age_mean=_mean(age),
      age_p95=float(np.percentile(age, 95)) if age.size else 0.0,
      age_max=int(age.max(initial=0)),
      mixed_version_fraction=_mean([len(v) > 1 for v in spans.values()]),
      blank_route_fraction=_mean(np.concatenate(blank)),
  )


def _mean(values: Sequence | np.ndarray) -> float:
  return float(np.mean(values)) if len(values) else 0.0
