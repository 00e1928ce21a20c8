"""Optimizers against float64 formulas, on the model's own parameter tree."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax.learner import optimizer
from composer_jax.model import params as params_lib
from tests import fresh

_CFG = config.ModelConfig(
    vocab=16, layers=2, embed=16, head_dim=4, experts=3, moe_ffn=8
)


def _tree(seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype),
      params_lib.abstract(_CFG),
  )


_PARAMS = _tree(100)


def _updates(tx, steps):
  """[{name: update}] of `steps` updates with fixed parameters."""
  state, out = tx.init(_PARAMS), []
  update = jax.jit(tx.update)
  for step in range(steps):
    updates, state = update(_tree(step), state, _PARAMS)
    out.append(
        {
            k: np.asarray(v, np.float64)
            for k, v in params_lib.names(updates).items()
        }
    )
  return out


class AdamWTest(parameterized.TestCase):

  @parameterized.parameters(dict(clip=1e9), dict(clip=1.0))
  def test_matches_float64(self, clip):
    made = optimizer.AdamW(
        learning_rate=0.01,
        b1=0.8,
        b2=0.9,
        eps=1e-3,
        weight_decay=0.1,
        clip_norm=clip,
    )
    got = _updates(made.build(), 3)
    params = params_lib.names(_PARAMS)
    mean = dict.fromkeys(params, 0.0)
    square = dict.fromkeys(params, 0.0)
    for step in range(3):
      grads = {
          k: np.asarray(v, np.float64)
          for k, v in params_lib.names(_tree(step)).items()
      }
      norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
      for name, grad in grads.items():
        grad = grad * min(1.0, clip / norm)
        mean[name] = 0.8 * mean[name] + 0.2 * grad
        square[name] = 0.9 * square[name] + 0.1 * grad**2
        first = mean[name] / (1 - 0.8 ** (step + 1))
        second = square[name] / (1 - 0.9 ** (step + 1))
        decay = 0.0 if 'norm' in name else 0.1
        want = -0.01 * (
            first / (np.sqrt(second) + 1e-3)
            + decay * np.asarray(params[name], np.float64)
        )
        np.testing.assert_allclose(
            got[step][name], want, rtol=2e-4, atol=1e-7, err_msg=name
        )

  @parameterized.named_parameters(
      ('constant', optimizer.Constant(4), {1: 0.5, 3: 1.0, 1000: 1.0}),
      ('at_once', optimizer.Constant(), {0: 1.0, 10_000: 1.0}),
      (
          'cosine',
          optimizer.Cosine(10, warmup_steps=4, final_fraction=0.25),
          {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 9: 0.625, 14: 0.25, 1000: 0.25},
      ),
      (
          'stable',
          optimizer.Wsd(6, 4, warmup_steps=2, final_fraction=0.0625),
          {0: 0.5, 1: 1.0, 8: 1.0, 9: 0.5, 10: 0.25, 12: 0.0625, 99: 0.0625},
      ),
  )
  def test_schedule(self, schedule, want):
    for cls in (optimizer.AdamW, optimizer.Muon):
      made = cls(learning_rate=0.4, schedule=schedule)
      rates = [float(made.rate(jnp.int32(i))) for i in want]
      np.testing.assert_allclose(
          rates, [0.4 * f for f in want.values()], rtol=1e-6
      )

  @parameterized.named_parameters(
      ('adamw', optimizer.AdamW), ('muon', optimizer.Muon)
  )
  def test_updates_follow_the_schedule(self, cls):
    # Both rules are linear in the rate: a decayed one is a scaled update.
    wsd = optimizer.Wsd(1, 1, final_fraction=0.125)
    flat = _updates(cls(learning_rate=0.01).build(), 3)
    scaled = _updates(cls(learning_rate=0.01, schedule=wsd).build(), 3)
    for step, factor in enumerate((1.0, 1.0, 0.125)):
      for name, update in flat[step].items():
        np.testing.assert_allclose(
            scaled[step][name], factor * update, 1e-5, 1e-9, err_msg=name
        )

  def test_schedules_refuse_what_they_cannot_do(self):
    for make in (
        lambda: optimizer.Constant(-1),
        lambda: optimizer.Cosine(0),
        lambda: optimizer.Wsd(3, 0),
        lambda: optimizer.Wsd(-1, 3),
        lambda: optimizer.Wsd(3, 3, final_fraction=0.0),
        lambda: optimizer.Cosine(3, final_fraction=1.5),
    ):
      with self.assertRaisesRegex(ValueError, r'^\w+\.\w+=[-\d.]+: '):
        make()

  @parameterized.parameters(
      dict(learning_rate=0.0),
      dict(clip_norm=-1.0),
  )
  def test_refuses(self, **fields):
    (name,) = fields
    for cls in (optimizer.AdamW, optimizer.Muon):
      with self.assertRaisesRegex(ValueError, f'{cls.__name__}.{name}='):
        cls(**fields)

  def test_is_hashable_configuration(self):
    self.assertLen({optimizer.AdamW(), optimizer.AdamW()}, 1)


class MuonTest(parameterized.TestCase):

  def test_orthogonalises_every_matrix_of_its_own(self):
    (got,) = _updates(optimizer.Muon(learning_rate=0.01).build(), 1)
    layers, e = _CFG.layers, _CFG.embed
    heads, kv, h = _CFG.q_heads, _CFG.kv_heads, _CFG.head_dim
    matrices = {
        'layers/attention/wq': (layers, e, heads * h),
        'layers/attention/wk': (layers, e, kv * h),
        'layers/attention/wo': (layers, heads * h, e),
        'layers/moe/w_out': (layers * _CFG.experts, _CFG.moe_ffn, e),
    }
    for name, shape in matrices.items():
      for m in got[name].reshape(shape):
        values = np.linalg.svd(m, compute_uv=False)
        self.assertLess(values.max() / values.min(), 2.0, name)
    w_in = np.moveaxis(got['layers/moe/w_in'], 3, 2)  # L E gates D F
    for m in w_in.reshape(-1, e, _CFG.moe_ffn):
      values = np.linalg.svd(m, compute_uv=False)
      self.assertLess(values.max() / values.min(), 2.0)
    # Adam's first step is the sign of the gradient, whatever its size.
    for name in ('embedding', 'unembed', 'norm', 'layers/moe/router'):
      signs = np.sign(np.asarray(params_lib.names(_tree(0))[name]))
      self.assertGreater(np.mean(np.sign(-got[name]) == signs), 0.999, name)

  def test_latent_matrices_too(self):
    cfg = config.ModelConfig(
        layers=3,
        embed=24,
        kv_heads=1,
        head_dim=8,
        kv_latent=16,
        q_latent=20,
        rope_dim=4,
        value_dim=6,
        dense_layers=2,
        dense_ffn=16,
    )
    named = params_lib.names(fresh.params(cfg))
    tree = {'dense_layers': {}}
    for name in ('q_down', 'q_up', 'kv_down', 'kv_up'):
      tree['dense_layers'][name] = named[f'dense_layers/attention/{name}']
    tx = optimizer.Muon().build()
    got, _ = jax.jit(tx.update)(tree, tx.init(tree), tree)
    for name, x in got['dense_layers'].items():
      self.assertLen(x, cfg.dense_layers)
      for m in np.asarray(x).reshape(*x.shape[:2], -1):
        values = np.linalg.svd(m, compute_uv=False)
        self.assertLess(values.max() / values.min(), 2.0, name)

  def test_norms_and_biases_of_any_layer_do_not_decay(self):
    tx = optimizer.AdamW(weight_decay=0.1).build()
    tree = {
        'dense_layers': {'norm': jnp.ones((2, 8)), 'w': jnp.ones((2, 8, 8))},
        'embedding': jnp.ones((8, 8)),
        'layers': {'bias': jnp.ones((2, 8)), 'w': jnp.ones((2, 8, 8))},
    }
    zeros = jax.tree.map(jnp.zeros_like, tree)
    got, _ = tx.update(zeros, tx.init(tree), tree)
    moved = jax.tree.map(lambda x: bool((x != 0).any()), got)
    want = {'norm': False, 'w': True}, True, {'bias': False, 'w': True}
    self.assertEqual(tuple(moved.values()), want)

  def test_experts_do_not_mix(self):
    tx = optimizer.Muon(clip_norm=float('inf')).build()
    grads, update = _tree(0), jax.jit(tx.update)
    one, _ = update(grads, tx.init(_PARAMS), _PARAMS)
    w = grads.layers.moe.w_out.at[:, 1].multiply(3.0).at[:, 2].set(0.5)
    moe = grads.layers.moe.replace(w_out=w)
    changed = grads.replace(layers=grads.layers.replace(moe=moe))
    two, _ = update(changed, tx.init(_PARAMS), _PARAMS)
    one, two = one.layers.moe.w_out, two.layers.moe.w_out
    np.testing.assert_array_equal(one[:, 0], two[:, 0])
    self.assertGreater(np.abs(one[:, 2] - two[:, 2]).max(), 1e-6)


if __name__ == '__main__':
  absltest.main()
