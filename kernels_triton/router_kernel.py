"""Triton kernels of `router`: one program per row."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels_triton import launch

CONFIGS = {('float32', 90): launch.Config({}, warps=1, stages=1)}


@triton.jit
def _scores(x, SIGMOID: tl.constexpr):
  """Of logits [BE] that are -inf past the last expert: 0 there."""
  if SIGMOID:
    out = 1.0 / (1.0 + tl.exp(-x))
  else:
    out = tl.exp(x - tl.max(x, 0))
  return out


@triton.jit
def _two_best(values, i, BE: tl.constexpr):
  """Sum of the two largest of each row of values [BG BE]."""
  best = tl.max(values, 1)
  at = tl.min(tl.where(values == best[:, None], i[None, :], BE), 1)
  rest = tl.where(i[None, :] == at[:, None], float('-inf'), values)
  return best + tl.max(rest, 1)


@triton.jit
def _limited(
    value,
    i,
    E: tl.constexpr,
    BE: tl.constexpr,
    GROUPS: tl.constexpr,
    BG: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):
  """value [BE] in the best groups; -inf elsewhere."""
  g = tl.arange(0, BG)
  mine = i[None, :] // (E // GROUPS) == g[:, None]
  score = _two_best(tl.where(mine, value[None, :], float('-inf')), i, BE)
  score = tl.where(g < GROUPS, score, float('-inf'))
  kept = tl.zeros((BG,), tl.int32)
  for _ in tl.static_range(TOP_GROUPS):
    best = tl.min(tl.where(score == tl.max(score, 0), g, BG), 0)
    kept = tl.where(g == best, 1, kept)
    score = tl.where(g == best, float('-inf'), score)
  keep = tl.max(tl.where(mine, kept[:, None], 0), 0)
  return tl.where(keep == 1, value, float('-inf'))


@triton.jit
def _at(values, ids, i):
  """values [BE] at ids [BK]; a sum of one term is exact."""
  hit = ids[:, None] == i[None, :]
  return tl.sum(tl.where(hit, values[None, :], 0.0), 1)


@triton.jit
def _ordered_sum(values, k, K: tl.constexpr):
  """Sum of values [BK] over the k, ascending."""
  total = tl.sum(tl.where(k == 0, values, 0.0), 0)
  for j in tl.static_range(1, K):
    total += tl.sum(tl.where(k == j, values, 0.0), 0)
  return total


@triton.jit
def route_forward(
    logits,
    bias,
    recorded,
    gates,
    experts,
    live,
    E: tl.constexpr,
    K: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
    BLANK: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    THRESHOLD: tl.constexpr,
    GROUPS: tl.constexpr,
    BG: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):
  row = tl.program_id(0).to(tl.int64)
  i = tl.arange(0, BE)
  k = tl.arange(0, BK)
  x = tl.load(logits + row * E + i, mask=i < E, other=float('-inf'))
  score = _scores(x, SIGMOID)
  value = score
  left = x
  if SIGMOID:
    value = score + tl.load(bias + i, mask=i < E, other=0.0)
    left = tl.where(i < E, value, float('-inf'))
  if GROUPS > 1:
    left = _limited(left, i, E, BE, GROUPS, BG, TOP_GROUPS)
  chosen = tl.zeros((BK,), tl.int32)
  for j in tl.static_range(K):
    peak = tl.max(left, 0)
    best = tl.min(tl.where(left == peak, i, BE), 0)  # a tie: the lowest id
    chosen = tl.where(k == j, best, chosen)
    left = tl.where(i == best, float('-inf'), left)
  record = tl.load(recorded + row * K + k, mask=k < K, other=0).to(tl.int32)
  first = tl.load(recorded + row * K).to(tl.int32)
  ids = tl.where(first == BLANK, chosen, record)
  if THRESHOLD > 0.0:
    weakest = tl.sum(tl.where(k == K - 1, chosen, 0), 0)
    least = tl.sum(tl.where(i == weakest, value, 0.0), 0)
    keep = (_at(value, ids, i) >= THRESHOLD * least) & (k < K)
    same = (chosen[:, None] == ids[None, :]) & keep[None, :]
    free = (tl.max(same.to(tl.int32), 1) == 0) & (k < K)
    drop = (keep == 0) & (k < K)
    order = tl.cumsum(free.to(tl.int32), 0)
    wanted = tl.cumsum(drop.to(tl.int32), 0)
    spot = free[None, :] & (order[None, :] == wanted[:, None])
    spare = tl.sum(tl.where(spot, chosen[None, :], 0), 1)
    ids = tl.where(keep, ids, spare)
  weight = _at(score, ids, i)
  if RENORMALIZE:
    weight = weight / _ordered_sum(weight, k, K)
  elif not SIGMOID:
    weight = weight / tl.sum(score, 0)
  out = row * K + k
  tl.store(gates + out, weight * SCALE, mask=k < K)
  tl.store(experts + out, ids, mask=k < K)
  tl.store(live + out, chosen, mask=k < K)


@triton.jit
def route_backward(
    logits,
    experts,
    dgates,
    dlogits,
    E: tl.constexpr,
    K: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
):
  row = tl.program_id(0).to(tl.int64)
  i = tl.arange(0, BE)
  k = tl.arange(0, BK)
  x = tl.load(logits + row * E + i, mask=i < E, other=float('-inf'))
  score = _scores(x, SIGMOID)
  ids = tl.load(experts + row * K + k, mask=k < K, other=BE)
  d = tl.load(dgates + row * K + k, mask=k < K, other=0.0) * SCALE
  if RENORMALIZE:
    weight = _at(score, ids, i)
    total = _ordered_sum(weight, k, K)
    d = (d - _ordered_sum(d * weight, k, K) / total) / total
  hit = ids[:, None] == i[None, :]
  dscore = tl.sum(tl.where(hit, d[:, None], 0.0), 0)
  if SIGMOID:
    dx = dscore * score * (1.0 - score)
  elif RENORMALIZE:
    dx = dscore * score
  else:
    p = score / tl.sum(score, 0)
    dx = p * (dscore - tl.sum(dscore * p, 0))
  tl.store(dlogits + row * E + i, dx, mask=i < E)


def _constants(logits, rule):
  e = logits.shape[1]
  return dict(
      E=e,
      K=rule.top_k,
      BE=triton.next_power_of_2(e),
      BK=triton.next_power_of_2(rule.top_k),
      SIGMOID=rule.scores == 'sigmoid',
      RENORMALIZE=rule.renormalize,
      SCALE=rule.scale,
  )


def forward(logits, bias, recorded, rule, implementation):
  """Returns (gates, experts, live choice), each [n K]."""
  n = logits.shape[0]
  ids = jax.ShapeDtypeStruct((n, rule.top_k), jnp.int32)
  return launch.call(
      route_forward,
      logits,
      bias,
      recorded,
      out=[jax.ShapeDtypeStruct((n, rule.top_k), jnp.float32), ids, ids],
      grid=(n,),
      config=launch.config(CONFIGS, logits.dtype, implementation),
      implementation=implementation,
      BLANK=rule.blank,
      THRESHOLD=rule.threshold,
      GROUPS=rule.groups,
      BG=triton.next_power_of_2(rule.groups),
      TOP_GROUPS=rule.top_groups,
      **_constants(logits, rule),
  )


def backward(logits, experts, dgates, rule, implementation):
  """Returns the gradient of the logits."""
  (dlogits,) = launch.call(
      route_backward,
      logits,
      experts,
      dgates,
      out=[jax.ShapeDtypeStruct(logits.shape, jnp.float32)],
      grid=(logits.shape[0],),
      config=launch.config(CONFIGS, logits.dtype, implementation),
      implementation=implementation,
      **_constants(logits, rule),
  )
  return dlogits
