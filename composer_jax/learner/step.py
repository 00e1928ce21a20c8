"""The train step: forward with replay, mask, global denominator, accumulation.

A loss only turns `TokenStats` into a number per token. Everything that must
not differ between losses lives here, once. The loss is evaluated on the WHOLE
micro-batch, gathered from every device: a sequence-level loss sees all
segments of a rollout wherever they were packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import jax.numpy as jnp
import numpy as np
import optax

from composer_jax import config
from composer_jax.learner import balancing as balancing_lib
from composer_jax.learner import batch as batch_lib
from composer_jax.learner import loss_inputs
from composer_jax.learner import mtp_loss
from composer_jax.learner import processes
from composer_jax.model import params as params_lib
from composer_jax.model import sharding
from composer_jax.model import transformer

Batch = batch_lib.Batch
_EXPLICIT = (jax.sharding.AxisType.Explicit,) * len(sharding.AXES)
_UNBALANCED, _NO_MTP = config.Balancing(), config.Mtp()  # as in RL


def make_mesh(cfg: config.MeshConfig) -> jax.sharding.Mesh:
  """The trainer's mesh over the first devices.

  Raises:
    ValueError: there are fewer devices.
  """
  devices = jax.devices()
  if cfg.devices > len(devices):
    raise ValueError(
        f'{cfg.text()}: only {len(devices)} device(s) here; lower it with'
        ' --set=mesh.data=N'
    )
  shape = dataclasses.astuple(cfg)
  return jax.sharding.Mesh(
      np.asarray(devices[: cfg.devices]).reshape(shape),
      sharding.AXES,
      axis_types=_EXPLICIT,
  )


def abstract_mesh(cfg: config.MeshConfig) -> jax.sharding.AbstractMesh:
  """Mesh without devices, to find out what each of them would hold."""
  shape = dataclasses.astuple(cfg)
  return jax.sharding.AbstractMesh(shape, sharding.AXES, axis_types=_EXPLICIT)


def abstract_state(
    cfg: config.ModelConfig,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
) -> batch_lib.TrainState:
  """Shapes and shardings of a state, to restore one to.

  Raises:
    ValueError: the mesh cannot split the model.
  """
  params_lib.check_split(cfg, sharding.RULES, mesh.shape)

  def place(x, spec):
    to = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to)

  params = params_lib.abstract(cfg)
  specs = params_lib.pspecs(params, sharding.RULES)
  fresh = functools.partial(_fresh, tx=tx)
  state = jax.eval_shape(fresh, jax.tree.map(place, params, specs))
  # The optimizer's tensors are split like the parameters; a counter is not.
  return jax.tree.map(
      lambda x: place(x, x.sharding.spec if x.sharding else P()), state
  )


def _fresh(params, tx):
  return batch_lib.TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))


def init_state(
    cfg: config.ModelConfig,
    tx: optax.GradientTransformation,
    seed: int,
    mesh: jax.sharding.Mesh,
) -> batch_lib.TrainState:
  """Initial f32 masters with a fresh optimizer; no device holds all of them.

  Raises:
    ValueError: the mesh cannot split the model.
  """
  places = jax.tree.map(lambda x: x.sharding, abstract_state(cfg, tx, mesh))
  make = lambda key: _fresh(params_lib.init(cfg, key), tx)
  return jax.jit(make, out_shardings=places)(jax.random.key(seed))


def restart(
    params: params_lib.Params,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
) -> batch_lib.TrainState:
  """Step 0 with a fresh optimizer; its state is split like the parameters.

  Counters are on every device: one left on a single device would be restored
  onto a single device.
  """
  specs = params_lib.pspecs(params, sharding.RULES)
  places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  with jax.set_mesh(mesh):
    fresh = jax.jit(functools.partial(_fresh, tx=tx))
    return fresh(jax.device_put(params, places))


def rounded(params: params_lib.Params) -> params_lib.Params:
  """Masters as the rollout side sees them: bf16 values held in f32."""
  return params_lib.rounded(params, lambda x: lax.reduce_precision(x, 8, 7))


def target_stats(params, batch: Batch, cfg):
  """Log-prob and entropy of token t at index t, and what the router did."""
  out = transformer.forward(
      params,
      batch.tokens,
      batch.segments,
      batch.positions,
      cfg=cfg,
      routing=batch.routing,
  )
  targets = jnp.roll(batch.tokens, -1, axis=1)
  stats = transformer.token_logps(params, out.hidden, targets, cfg=cfg)
  logps, entropy = (jnp.roll(s, 1, axis=1) for s in stats)
  return logps, entropy, out


@functools.partial(
    jax.jit, static_argnames=('cfg', 'loss', 'mesh', 'balancing', 'mtp')
)
def gradients(
    params: params_lib.Params,
    batch: Batch,
    denominator: jax.Array,
    *,
    cfg: config.ModelConfig,
    loss: batch_lib.Loss,
    mesh: jax.sharding.Mesh,
    balancing: config.Balancing = _UNBALANCED,
    mtp: config.Mtp = _NO_MTP,
    tokens: jax.Array | float = 1.0,
    reference: params_lib.Params | None = None,
) -> tuple[params_lib.Params, batch_lib.Metrics]:
  """Gradient of sum(mask * per_token) / denominator over one micro-batch.

  The derivative is taken at the bf16-rounded masters (what rollouts ran) and
  applied to the f32 masters, straight through the rounding.

  Args:
    params: f32 masters.
    batch: [B T], B a multiple of the devices that split it.
    denominator: f32 [], the global constant Z; the same for every micro-batch
      of a step, so the sum over micro-batches is the step's gradient.
    cfg: the model.
    loss: loss, static; hashes by value.
    mesh: mesh of the trainer, from `make_mesh`.
    balancing: what is asked of the router; nothing in RL.
    mtp: what is asked of the modules that predict further tokens.
    tokens: f32 [], real tokens of the whole step, that its losses are means of.
    reference: masters whose log-probs become `TokenStats.ref_logps`.

  Returns:
    (gradients f32, split like the parameters; metrics).

  Raises:
    ValueError: the loss returns a wrong shape (at trace time).
  """
  specs = params_lib.pspecs(params, sharding.RULES)

  def local(params, batch, denominator, tokens, reference):
    def forward(params):
      logps, entropy, out = target_stats(params, batch, cfg)
      further = mtp_loss.loss(params, out.hidden, batch, mtp, cfg)
      return (logps, out.router_stats, further[0]), (entropy, *further)

    (logps, routers, _), vjp, (entropy, *further) = jax.vjp(
        forward, rounded(params), has_aux=True
    )
    gather = functools.partial(
        lax.all_gather, axis_name=sharding.ROWS, tiled=True
    )
    # The loss needs no routes, and they are the largest part of a batch.
    whole = jax.tree.map(gather, batch.replace(routing=None))
    entropy = gather(entropy)
    ref_logps = None
    if reference is not None:
      ref_logps = gather(target_stats(rounded(reference), batch, cfg)[0])

    def objective(logps):
      stats = loss_inputs.masked(whole, logps, entropy, ref_logps)
      per_token, metrics = loss_inputs.per_token(loss, stats)
      masked = jnp.where(stats.mask > 0, per_token, 0.0)
      return jnp.sum(masked) / denominator, (stats, masked, dict(metrics))

    every = gather(logps)
    d_every, (stats, masked, metrics) = jax.grad(objective, has_aux=True)(every)
    rows = logps.shape[0]
    d_logps = lax.dynamic_slice_in_dim(
        d_every, lax.axis_index(sharding.ROWS) * rows, rows
    )
    # Of sums over all devices: each adds its part of the same gradient.
    routers = lax.psum(routers, sharding.ROWS)
    real = jnp.sum(whole.segments > 0).astype(jnp.float32)
    d_routers, router_metrics = jax.grad(balancing_lib.loss, has_aux=True)(
        routers, real, tokens, cfg, balancing
    )
    (grads,) = vjp((d_logps, d_routers, mtp.weight / denominator))
    grads = sharding.summed(grads, specs)
    mean = batch_lib.Mean
    if mtp.weight:
      metrics['loss/mtp'] = mean(*lax.psum(further, sharding.ROWS))
    metrics |= router_metrics | loss_inputs.mismatch(whole, stats)
    metrics |= {
        'loss': mean(jnp.sum(masked), jnp.sum(stats.mask)),
        'routing/disagreement': mean(routers.disagreeing, routers.choices),
        'routing/blank': mean(routers.blank, cfg.moe_layers * real),
    }
    return grads, metrics

  return sharding.over_mesh(
      local,
      mesh,
      in_specs=(specs, P(sharding.ROWS), P(), P(), reference and specs),
      out_specs=(specs, P()),
  )(params, batch, denominator, jnp.asarray(tokens, jnp.float32), reference)


@functools.partial(jax.jit, static_argnames=('tx',), donate_argnums=0)
def apply_gradients(
    state: batch_lib.TrainState,
    grads: params_lib.Params,
    *,
    tx: optax.GradientTransformation,
) -> batch_lib.TrainState:
  """One optimizer update."""
  places = jax.tree.map(lambda x: jax.typeof(x).sharding, state)

  # An optimizer may multiply matrices and does not know how they are split: the
  # partitioner places its collectives.
  @jax.sharding.auto_axes(out_sharding=places)
  def update(state, grads):
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return batch_lib.TrainState(state.step + 1, params, opt_state)

  return update(state, grads)


_norm = jax.jit(optax.tree.norm)
_add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
_merge = jax.jit(batch_lib.merge)


def train_step(
    state: batch_lib.TrainState,
    batches: Sequence[Batch],
    denominator: float,
    *,
    cfg: config.ModelConfig,
    loss: batch_lib.Loss,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    balancing: config.Balancing = _UNBALANCED,
    mtp: config.Mtp = _NO_MTP,
    reference: params_lib.Params | None = None,
    on_nonfinite: Callable[[Batch], str] | None = None,
) -> tuple[batch_lib.TrainState, dict[str, float]]:
  """One optimizer update over micro-batches of equal shape.

  Args:
    state: donated.
    batches: numpy or device; their number may change without recompiling.
    denominator: Z of the whole step.
    cfg: the model.
    loss: what to minimise.
    tx: built once per run (a new object is a new jit key).
    mesh: the trainer's.
    balancing: what is asked of the router.
    mtp: what is asked of the modules that predict further tokens.
    reference: masters for a loss that `needs_reference`.
    on_nonfinite: saves the offending batch and returns where it did.

  Returns:
    (state, metrics by name).

  Raises:
    FloatingPointError: loss or gradient is not finite; state is untouched.
  """
  z = jnp.asarray(denominator, jnp.float32)
  tokens = float(sum(np.count_nonzero(b.segments) for b in batches))
  grads = metrics = None
  for batch in batches:
    batch = processes.place(batch, mesh)
    g, m = gradients(
        state.params,
        batch,
        z,
        cfg=cfg,
        loss=loss,
        mesh=mesh,
        balancing=balancing,
        mtp=mtp,
        tokens=tokens,
        reference=reference,
    )
    if not np.isfinite(jax.device_get(m['loss'].total)):
      where = on_nonfinite(jax.device_get(batch)) if on_nonfinite else 'no file'
      raise FloatingPointError(
          f'step {int(state.step)}: loss {type(loss).__name__} is'
          f' {float(m["loss"].total)}; offending batch: {where}'
      )
    grads = g if grads is None else _add(grads, g)
    metrics = m if metrics is None else _merge(metrics, m)
  norm = float(_norm(grads))
  if not np.isfinite(norm):
    where = on_nonfinite(jax.device_get(batch)) if on_nonfinite else 'no file'
    raise FloatingPointError(
        f'step {int(state.step)}: gradient norm is {norm} although the loss is'
        f' finite; last batch: {where}'
    )
  state = apply_gradients(state, grads, tx=tx)
  load = metrics.pop('routing/load').total
  if balancing.bias_speed:
    state = balancing_lib.rebias(state, load, balancing.bias_speed)
  metrics = jax.device_get(metrics)
  figures = {k: float(v.value()) for k, v in metrics.items()}
  figures['routing/max_load'] = balancing_lib.max_load(np.asarray(load))
  return state, figures | {'grad_norm': norm}


@functools.partial(jax.jit, static_argnames=('cfg', 'mesh'))
def score(
    params: params_lib.Params,
    batch: Batch,
    *,
    cfg: config.ModelConfig,
    mesh: jax.sharding.Mesh,
) -> tuple[jax.Array, jax.Array]:
  """The trainer's forward without a loss, for audits and held-out figures.

  Args:
    params: weights as published (bf16 values).
    batch: [B T]; its routing is replayed, None routes live.
    cfg: the model.
    mesh: the trainer's.

  Returns:
    (log-prob of token t at index t f32 [B T], routing [B T L K]).
  """

  def local(params, batch):
    logps, _, out = target_stats(params, batch, cfg)
    return logps, out.routing

  rows = P(sharding.ROWS)
  return sharding.over_mesh(
      local,
      mesh,
      in_specs=(params_lib.pspecs(params, sharding.RULES), rows),
      out_specs=(rows, rows),
  )(params, batch)


def compilations() -> int:
  """Programs compiled so far for training steps and scores."""
  jitted = (
      gradients,
      apply_gradients,
      score,
      balancing_lib.rebias,
      _norm,
      _add,
      _merge,
  )
  return sum(f._cache_size() for f in jitted)  # pylint: disable=protected-access
