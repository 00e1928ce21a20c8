"""Audit: do kept trajectories come from the weights they say they come from?

A trajectory names the root digest of its weights. The audit rebuilds those
very weights from the delta store, runs the trainer's forward with LIVE routing
and compares every sampled token's log-prob and expert choice, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
import dataclasses
import pathlib

import jax
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.runs import evaluate
from composer_jax.runs import feed
from composer_jax.weights import codec
from composer_jax.weights import follow

VERSIONS = 24  # rebuilt at most; each replays the chain from its base


@dataclasses.dataclass(frozen=True)
class Audit:
  """What was compared.

  Attributes:
    trajectories: audited; each from one version only.
    tokens: sampled tokens compared.
    versions: weight versions rebuilt from the store.
    max_abs_dlogp: largest difference of a log-prob, nats; the contract is 0.
    routing_differences: expert choices that differ; the contract is 0.
    digest_mismatches: trajectories whose digest is not that of the version.
  """

  trajectories: int
  tokens: int
  versions: int
  max_abs_dlogp: float
  routing_differences: int
  digest_mismatches: int


def _kept(folder: pathlib.Path) -> Iterable[trace.Trajectory]:
  for path in sorted(folder.rglob('*.traj')):
    yield trace.from_bytes(path.read_bytes())


def run(
    cfg: config.Experiment,
    workdir: pathlib.Path,
    url: str,
    mesh: jax.sharding.Mesh,
    ended: Callable[[], None] = lambda: None,
) -> Audit:
  """Audits the single-version trajectories that a run kept.

  Args:
    cfg: the experiment.
    workdir: directory of a run, with `trajectories/`.
    url: URL of the weight store.
    mesh: the trainer's.
    ended: called after every version, of which there are at most `VERSIONS`.
  """
  by_version: dict[int, list[trace.Trajectory]] = {}
  for t in _kept(workdir / 'trajectories'):
    if len(t.weights) == 1:
      by_version.setdefault(next(iter(t.weights)), []).append(t)
  # Old versions are collected in a long run; what is left is audited.
  order = sorted(feed.stored_versions(url) & set(by_version))
  spread = np.linspace(0, len(order) - 1, min(VERSIONS, len(order)))
  chosen = [order[i] for i in sorted({round(x) for x in spread})]
  follower = follow.Follower(url)
  count = tokens = differences = mismatches = 0
  worst = 0.0
  for version in chosen:
    named = follower.fetch(version)
    root = codec.root(named, cfg.weights.tile_elements)
    params = feed.decode_params(named)
    trajectories = by_version[version]
    mismatches += sum(t.weights[version] != root for t in trajectories)
    segments = [s for t in trajectories for s in t.segments]
    scores = evaluate.rescore(cfg, segments, params, mesh)
    for segment, (logps, routing) in zip(segments, scores, strict=True):
      at = np.flatnonzero(segment.sampled)
      gap = np.abs(logps[at].astype(np.float64) - segment.logps[at])
      worst = max(worst, float(gap.max(initial=0.0)))
      tokens += len(at)
      if segment.routing is not None:
        recorded = segment.routing.experts[:-1]
        differences += int((recorded != routing[: len(recorded)]).sum())
    count += len(trajectories)
    ended()
  return Audit(count, tokens, len(chosen), worst, differences, mismatches)
