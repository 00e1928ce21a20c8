"""Replays RL from the ledger, asynchronous or not, and compares every bit.

What an asynchronous run owes to timing is in its ledger: which prompts a step
consumed, in which order, and which weights drew every token. All else follows
from the config: tasks and seeds from prompt numbers, every version of the
weights from the steps before it. Nothing else is read, no stored delta and no
trajectory; their digests say whether the replay is the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax import trace
from composer_jax.fleet import admission
from composer_jax.fleet import blobs
from composer_jax.fleet import dispatcher
from composer_jax.fleet import facts
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.learner import loss_inputs
from composer_jax.learner import step as step_lib
from composer_jax.model import decode
from composer_jax.model import params as params_lib
from composer_jax.rollout import sampling
from composer_jax.runs import feed
from composer_jax.runs import manifest
from composer_jax.runs import pipeline
from composer_jax.runs import player
from composer_jax.runs import rl
from composer_jax.runs import rollouts
from composer_jax.runs import run_digest
from composer_jax.weights import codec
from kernels_triton import contract


class Weights(NamedTuple):
  params: params_lib.Params
  digest: str


@dataclasses.dataclass(frozen=True)
class Replay:
  """What was replayed.

  Attributes:
    steps: updates of the optimizer, whose weights were compared.
    rollouts: rollouts played again.
    unverified: groups whose digest covers a rollout that was lost or failed.
    difference: what was not as it had been, '' if everything was.
  """

  steps: int
  rollouts: int
  unverified: int
  difference: str


_prefill = jax.jit(
    decode.prefill, static_argnames='cfg', donate_argnames='pages'
)


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='pages')
def _draw(params, pages, token, at, table, routing, seed, temperature, *, cfg):
  logps, pages, used = decode.step(
      params, pages, token, at, table, cfg=cfg, routing=routing
  )
  drawn = sampling.sample(logps, seed, at + 1, temperature)
  return pages, used, *drawn


class Recorded:
  """Draws each token of an episode with the weights that a record names.

  A context is prefilled with the weights that draw the first token after it.

  Attributes:
    digests: digests of the weights, by version.
  """

  def __init__(
      self,
      cfg: config.Experiment,
      weights: Mapping[int, Weights],
      segments: Sequence[np.ndarray],
  ):
    """Plays one episode.

    Args:
      cfg: the experiment.
      weights: weights by version.
      segments: versions of every token of each window, in order.
    """
    self.digests = {version: w.digest for version, w in weights.items()}
    self._cfg = cfg
    self._weights = weights
    self._coming = iter(segments)
    self._versions: np.ndarray | None = None

  async def complete(
      self,
      context: trace.TokenTrace,
      *,
      max_tokens: int,
      stop: frozenset[int],
      seed: int,
      temperature: float,
  ) -> trace.TokenTrace:
    """Continues the context; returns the whole window."""
    cfg, n = self._cfg.model, len(context)
    end = min(n + max_tokens, self._cfg.rollout.context_tokens)
    if self._versions is None or not context.sampled.any():  # a window begins
      self._versions = next(self._coming, self._versions)
    versions = np.resize(self._versions, end)  # a replay that runs on is wrong
    size = -(-self._cfg.rollout.context_tokens // contract.KEY_BLOCK)
    length = size * contract.KEY_BLOCK
    tokens, logps = np.zeros(length, np.int32), np.zeros(length, np.float32)
    dtype = trace.route_dtype(cfg.experts)
    blank = trace.blank_route(dtype)
    routing = np.full((length, cfg.moe_layers, cfg.top_k), blank, dtype)
    tokens[:n], logps[:n] = context.tokens, context.logps
    if context.routing is not None:
      routing[:n] = context.routing.experts
    table = np.arange(size, dtype=np.int32)[None]
    at = np.arange(length, dtype=np.int32)
    tiles = np.where(at < n - 1, at, -1).reshape(-1, contract.QUERY_ROWS)
    pages, used = _prefill(
        self._weights[versions[n]].params,
        decode.init_pages(cfg, size),
        tokens.reshape(tiles.shape),
        tiles,
        np.repeat(table, len(tiles), axis=0),
        cfg=cfg,
        routing=routing.reshape(*tiles.shape, *routing.shape[1:]),
    )
    routing[: n - 1] = np.asarray(used).reshape(routing.shape)[: n - 1]
    for now in range(n - 1, end - 1):
      here = slice(now, now + 1)
      pages, used, token, logp = _draw(
          self._weights[versions[now + 1]].params,
          pages,
          tokens[here],
          at[here],
          table,
          routing[here],
          np.array([seed], np.uint32),
          np.array([temperature], np.float32),
          cfg=cfg,
      )
      routing[here] = used
      tokens[now + 1], logps[now + 1] = token[0], logp[0]
      if tokens[now + 1] in stop:
        end = now + 2
        break
    return trace.TokenTrace(
        tokens=tokens[:end],
        sampled=np.append(context.sampled, np.ones(end - n, bool)),
        logps=logps[:end],
        versions=versions[:end].astype(np.int32),
        routing=trace.RoutingTrace(routing[:end]),
    )


def _played(
    cfg: config.Experiment,
    host: player.Player,
    run_id: str,
    weights: Mapping[int, Weights],
    record: ledger_lib.GroupRecord,
) -> tuple[admission.Group, dict[str, trace.Trajectory]]:
  """The valid rollouts of a recorded group, played again."""
  members, played = {}, {}
  for r in record.rollouts:
    if r.outcome != 'valid':
      continue
    segments = [
        np.concatenate([np.full(n, version) for version, n in runs])
        for runs in r.spans
    ]
    trajectory = host.call(
        host.rollout(
            rollouts.training_task(cfg, record.task),
            admission.task_id(run_id, record.prompt, r.member),
            seed=r.seed,
            policy=Recorded(cfg, weights, segments),
        )
    )
    blob = blobs.BlobRef.of(trajectory.task_id, trace.to_bytes(trajectory))
    played[trajectory.task_id] = trajectory
    members[r.member] = admission.Member(0, r.seed, blob, facts.of(trajectory))
  return admission.Group(record.prompt, record.version, members), played


def run(
    cfg: config.Experiment,
    workdir: pathlib.Path,
    steps: Sequence[ledger_lib.StepRecord],
    host: player.Player,
    mesh: jax.sharding.Mesh,
    ended: Callable[[], None] = lambda: None,
) -> Replay:
  """Replays a run from its warm start to its newest checkpoint.

  Args:
    cfg: the run's experiment.
    workdir: directory of the run; its id and its checkpoints are read.
    steps: what its newest checkpoint has consumed.
    host: host with sandboxes and a grader; its engine is not used.
    mesh: the trainer's.
    ended: called after every step.

  Returns:
    The first difference, or that there is none.
  """
  tx = cfg.rl_optimizer.build()
  warm = pipeline.warm_state(cfg, workdir, mesh).params
  reference = (
      jax.tree.map(jnp.copy, warm)
      if loss_inputs.needs_reference(cfg.loss)
      else None
  )
  state = step_lib.restart(warm, tx, mesh)
  weights: dict[int, Weights] = {}
  renamed: dict[int, int] = {}
  count = unverified = 0
  for number, record in enumerate(steps):
    named = rl.published_arrays(state.params)
    root = codec.root(named, cfg.weights.tile_elements)
    params = jax.device_put(feed.decode_params(named))
    weights[record.version] = Weights(params, root)
    before = steps[number - 1].version if number else None
    renamed |= dispatcher.renamed(record.version, before)
    weights |= {old: weights[new] for old, new in renamed.items()}
    if root != (record.digest or root):
      return Replay(number, count, unverified, f'weights of step {number}')
    groups, payloads = [], {}
    for old in (*record.trained, *record.untrained):
      group, played = _played(cfg, host, manifest.run_id(workdir), weights, old)
      payloads |= played
      count += len(group.members)
      if any(r.outcome != 'valid' for r in old.rollouts):
        unverified += 1
      elif ledger_lib.group_digest(group) != old.sha256:
        what = f'a rollout of prompt {old.prompt}, step {number}'
        return Replay(number, count, unverified, what)
      groups.append(group)
    trained = len(record.trained)
    batch = admission.Consumed(
        step=number,
        version=record.version,
        groups=tuple(groups[:trained]),
        untrained=tuple(groups[trained:]),
        in_flight=(),
        next_prompt=0,
        cursor=0,
    )
    step = dispatcher.Step(batch, payloads, renamed)
    state, _, _ = rl.train(
        cfg, state, step, tx=tx, mesh=mesh, reference=reference
    )
    ended()
  want = run_digest.of_state(run_digest.restored(cfg, workdir, 'rl', mesh))
  got = run_digest.of_state(state)
  differing = [name for name in want if got[name] != want[name]]
  what = f'final {differing[0]}' if differing else ''
  return Replay(len(steps), count, unverified, what)
