"""Router: top-k choice, replayed choice, gates. Runs inside `rows.rowwise`.

Scores are a softmax over the experts, or a sigmoid of each (DeepSeek-V3, arXiv
2412.19437); a bias per expert then joins the sigmoid where experts are chosen,
and only there: gates never see it. The choice may be limited to the experts of
a few groups.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from kernels_triton import launch

SOFTMAX, SIGMOID = 'softmax', 'sigmoid'


def select(logits: jax.Array, top_k: int) -> jax.Array:
  """Ids of the k largest values; a tie goes to the lowest id.

  Args:
    logits: f32 [R E], or other values to choose by.
    top_k: k.

  Returns:
    i32 [R K], best first.
  """
  ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
  left = lax.stop_gradient(logits)
  chosen = []
  for _ in range(top_k):
    peak = jnp.max(left, axis=-1, keepdims=True)
    best = jnp.min(jnp.where(left == peak, ids, ids.size), axis=-1)
    chosen.append(best)
    left = jnp.where(ids == best[:, None], -jnp.inf, left)
  return jnp.stack(chosen, axis=-1).astype(jnp.int32)


def limited(values: jax.Array, groups: int, top: int) -> jax.Array:
  """Values of the experts in the best groups; -inf elsewhere.

  Args:
    values: f32 [R E], the scores to choose by.
    groups: number of groups of neighbors, of two experts or more; a group
      scores what its two best experts do together.
    top: groups to keep; a tie goes to the lowest.

  Returns:
    f32 [R E].
  """
  values = lax.stop_gradient(values)
  split = values.reshape(values.shape[0], groups, -1)
  flat = split.reshape(-1, split.shape[2])
  best = select(flat, 2)
  score = _pick(flat, best[:, 0]) + _pick(flat, best[:, 1])
  kept = select(score.reshape(-1, groups), top)
  ids = jnp.arange(groups, dtype=jnp.int32)[None, :, None]
  keep = jnp.any(kept[:, None, :] == ids, axis=2)[:, :, None]
  return jnp.where(keep, split, -jnp.inf).reshape(values.shape)


def replayed(live: jax.Array, recorded: jax.Array, blank: int) -> jax.Array:
  """Recorded ids where a row was recorded, the live choice where blank.

  Args:
    live: i32 [R K].
    recorded: unsigned [R K]; a row is blank iff its first id is `blank`.
    blank: `trace.blank_route`.

  Returns:
    i32 [R K].
  """
  is_blank = recorded[:, :1] == blank
  return jnp.where(is_blank, live, recorded.astype(jnp.int32))


def filtered(
    experts: jax.Array, live: jax.Array, values: jax.Array, threshold: float
) -> jax.Array:
  """Replaces replayed experts that the live router would by now rank far down.

  Dropped are those whose value is below `threshold` times the least value of
  the live choice; the best live experts that are not kept take their places,
  so the k ids stay distinct.

  Args:
    experts: i32 [R K], distinct in a row.
    live: i32 [R K], best first.
    values: f32 [R E] that the live choice was made by.
    threshold: in (0, 1].

  Returns:
    i32 [R K].
  """
  values = lax.stop_gradient(values)
  least = _pick(values, live[:, -1])
  at = [_pick(values, experts[:, i]) for i in range(experts.shape[1])]
  keep = jnp.stack(at, axis=-1) >= threshold * least[:, None]
  same = live[:, :, None] == experts[:, None, :]
  free = ~jnp.any(same & keep[:, None, :], axis=2)
  order = jnp.cumsum(free.astype(jnp.int32), axis=1)[:, None, :]
  wanted = jnp.cumsum((~keep).astype(jnp.int32), axis=1)[:, :, None]
  chosen = free[:, None, :] & (order == wanted)
  spare = jnp.sum(jnp.where(chosen, live[:, None, :], 0), axis=2)
  return jnp.where(keep, experts, spare)


def _pick(values, experts):
  """values [R E] at one expert per row, exactly: the sum has one term."""
  ids = jnp.arange(values.shape[-1], dtype=jnp.int32)[None, :]
  return jnp.sum(jnp.where(ids == experts[:, None], values, 0.0), axis=-1)


def _scores(logits, scores):
  """Scores up to a factor per row: e^(logit - peak), or sigmoid(logit)."""
  if scores == SIGMOID:
    return jax.nn.sigmoid(logits)
  peak = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  return jnp.exp(logits - peak)


def gates(
    logits: jax.Array,
    experts: jax.Array,
    *,
    scores: str = SOFTMAX,
    renormalize: bool = True,
    scale: float = 1.0,
) -> jax.Array:
  """Scores of the chosen experts.

  Always recomputed from live logits, so a replayed choice still gives the
  router its gradient.

  Args:
    logits: f32 [R E].
    experts: i32 [R K].
    scores: 'softmax' or 'sigmoid'.
    renormalize: divides by their sum over the chosen.
    scale: factor of every gate.

  Returns:
    f32 [R K]; rows sum to `scale` if renormalised.
  """
  weights = _scores(logits, scores)
  picked = [_pick(weights, experts[:, i]) for i in range(experts.shape[1])]
  out = jnp.stack(picked, axis=-1)
  if renormalize:
    total = picked[0]
    for p in picked[1:]:  # fixed order: a reduce may associate differently
      total = total + p
    out = out / total[:, None]
  elif scores == SOFTMAX:
    out = out / jnp.sum(weights, axis=-1, keepdims=True)
  return out if scale == 1.0 else out * scale


class _Rule(NamedTuple):
  top_k: int
  blank: int
  scores: str
  renormalize: bool
  scale: float
  threshold: float
  groups: int
  top_groups: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _route(logits, bias, recorded, rule, implementation):
  return _forward(logits, bias, recorded, rule, implementation)[0]


def _forward(logits, bias, recorded, rule, implementation):
  from kernels_triton import router_kernel  # needs triton

  out = router_kernel.forward(logits, bias, recorded, rule, implementation)
  return out, (logits, out[1])


def _backward(rule, implementation, residuals, cotangents):
  from kernels_triton import router_kernel  # needs triton

  logits, experts = residuals
  dlogits = router_kernel.backward(
      logits, experts, cotangents[0], rule, implementation
  )
  return dlogits, None, None


_route.defvjp(_forward, _backward)


def route(
    logits: jax.Array,
    bias: jax.Array | None,
    recorded: jax.Array,
    *,
    top_k: int,
    blank: int,
    scores: str = SOFTMAX,
    renormalize: bool = True,
    scale: float = 1.0,
    threshold: float = 0.0,
    groups: int = 1,
    top_groups: int = 1,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Chooses experts and weighs them.

  Args:
    logits: f32 [R E].
    bias: f32 [E] added to sigmoid scores to choose by, or None; no gradient.
    recorded: unsigned [R K]; blank rows take the live choice.
    top_k: k.
    blank: `trace.blank_route`.
    scores: 'softmax' or 'sigmoid'; see `gates`.
    renormalize: see `gates`.
    scale: see `gates`.
    threshold: of `filtered`; 0 obeys the record whatever it says. It compares
      experts of all groups.
    groups: see `limited`; more than 1 only with scores='sigmoid'.
    top_groups: groups that the live choice is made from.
    implementation: see `launch`.

  Returns:
    (gates f32 [R K], experts i32 [R K], live choice i32 [R K]).
  """
  implementation = launch.resolve(implementation)
  if scores == SOFTMAX and (bias is not None or groups > 1):
    raise ValueError(f'bias, groups: only with scores={SIGMOID!r}')
  if implementation != launch.REFERENCE:
    rule = _Rule(
        top_k,
        blank,
        scores,
        renormalize,
        scale,
        threshold,
        groups,
        top_groups,
    )
    bias = jnp.zeros(logits.shape[1:], jnp.float32) if bias is None else bias
    return _route(logits, bias, recorded, rule, implementation)
  values = _scores(logits, scores)
  values = values if bias is None else values + bias[None, :]
  # Logits order as their softmax does, without its rounding.
  ordered = logits if scores == SOFTMAX else values
  if groups > 1:
    ordered = limited(ordered, groups, top_groups)
  live = select(ordered, top_k)
  experts = replayed(live, recorded, blank)
  if threshold:
    experts = filtered(experts, live, values, threshold)
  weights = gates(
      logits, experts, scores=scores, renormalize=renormalize, scale=scale
  )
  return weights, experts, live
