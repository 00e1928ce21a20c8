"""What every implementation owes: bits that do not depend on the batch."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import triton

from composer_jax import config
from composer_jax.model import decode
from composer_jax.model import params as params_lib
from composer_jax.model import transformer
from kernels_triton import contract
from kernels_triton import grouped
from kernels_triton import launch
from kernels_triton import matmul
from kernels_triton import rmsnorm
from kernels_triton import router
from kernels_triton import rows
from tests import kernel_cases

if triton.knobs.runtime.interpret:
  _IMPLEMENTATIONS = ['interpret', 'reference']
elif jax.default_backend() == 'gpu':
  _IMPLEMENTATIONS = ['triton', 'reference']
else:
  _IMPLEMENTATIONS = ['reference']

_RNG = np.random.default_rng(0)
_D, _E, _K = 48, 6, 2


def _normal(*shape):
  return jnp.asarray(_RNG.standard_normal(shape), jnp.float32)


_NORM, _W = _normal(_D), _normal(_D, 80)
_ROUTER, _IN, _OUT = (
    _normal(_D, _E),
    _normal(_E, _D, 2, 32),
    _normal(_E, 32, _D),
)


def _rows(f, implementation):
  return lambda x: rows.run_rows(
      lambda _, x: f(x, implementation), None, x, implementation=implementation
  )


def _norm_and_project(x, implementation):
  x = rmsnorm.rms_norm(x, _NORM, 1e-6, implementation=implementation)
  return matmul.matmul(
      x, _W, dtype='bfloat16', implementation=implementation
  ), matmul.matmul(x, _W, implementation=implementation)


def _route(x, implementation):
  recorded = jnp.full((x.shape[0], _K), 255, jnp.uint8)
  logits = matmul.matmul(x, _ROUTER, implementation=implementation)
  out = []
  for scores in ('softmax', 'sigmoid'):
    out += router.route(
        logits,
        None,
        recorded,
        top_k=_K,
        blank=255,
        scores=scores,
        implementation=implementation,
    )
  return tuple(out)


def _experts(x, implementation):
  block = _rows(_route, implementation)
  gates, experts, *_ = block(x)
  return grouped.expert_ffn(
      x, gates, experts, _IN, _OUT, implementation=implementation
  )


_OPS = {
    'norm_and_project': lambda i: _rows(_norm_and_project, i),
    'route': lambda i: _rows(_route, i),
    'experts': lambda i: lambda x: _experts(x, i),
}
_MODEL = dict(
    vocab=64,
    layers=1,
    embed=32,
    q_heads=2,
    kv_heads=1,
    head_dim=16,
    experts=4,
    moe_ffn=32,
)

_LATENT = dict(
    layers=2,
    dense_layers=1,
    dense_ffn=48,
    router='sigmoid',
    expert_groups=2,
    kv_latent=24,
    q_latent=20,
    rope_dim=8,
    value_dim=12,
)


class ContractTest(parameterized.TestCase):

  @parameterized.product(implementation=_IMPLEMENTATIONS, op=list(_OPS))
  def test_bits_of_a_row_do_not_depend_on_the_others(self, implementation, op):
    f = jax.jit(_OPS[op](implementation))
    x = _normal(70, _D)
    whole = jax.tree.map(kernel_cases.bits, f(x))
    order = np.random.default_rng(1).permutation(70)
    for rows_taken in ([69], order[:17], order):
      part = jax.tree.map(kernel_cases.bits, f(x[jnp.asarray(rows_taken)]))
      jax.tree.map(
          lambda a, b, r=rows_taken: np.testing.assert_array_equal(a, b[r]),
          part,
          whole,
      )

  @parameterized.parameters(*((i,) for i in _IMPLEMENTATIONS))
  def test_gradients_repeat(self, implementation):
    @jax.jit
    def grads(x):
      f = lambda x: sum(
          jnp.sum(a * a) for a in _OPS['norm_and_project'](implementation)(x)
      ) + jnp.sum(_OPS['experts'](implementation)(x))
      return jax.grad(f)(x)

    x = _normal(20, _D)
    first, second = (kernel_cases.bits(grads(x)) for _ in range(2))
    np.testing.assert_array_equal(first, second)

  @parameterized.product(dtype=('float32', 'bfloat16'), latent=(False, True))
  def test_decode_equals_trainer(self, dtype, latent):
    model = _MODEL | (_LATENT if latent else {})
    kernels = _IMPLEMENTATIONS[0]
    cfg = config.ModelConfig(**model, dtype=dtype, kernels=kernels)
    params = params_lib.publish_dtype(params_lib.init(cfg, jax.random.key(0)))
    tokens = jnp.asarray(_RNG.integers(0, 64, (2, 64)), jnp.int32)
    positions = jnp.tile(jnp.arange(64, dtype=jnp.int32)[None], (2, 1))

    @jax.jit
    def trained(params):
      out = transformer.forward(
          params, tokens, jnp.ones_like(tokens), positions, cfg=cfg
      )
      targets = jnp.roll(tokens, -1, axis=1)
      logps, _ = transformer.token_logps(params, out.hidden, targets, cfg=cfg)
      return logps, out.routing

    want, want_routing = map(np.asarray, trained(params))
    # One sequence alone, on pages in another order, in tiles of the prefill.
    table = jnp.asarray([[2, 0]], jnp.int32)
    tile = contract.QUERY_ROWS
    prompt = 32 - tile // 2  # the last tile is half full
    ids = jnp.arange(32, dtype=jnp.int32).reshape(-1, tile)
    pages, _ = jax.jit(decode.prefill, static_argnames='cfg')(
        params,
        decode.init_pages(cfg, 3),
        tokens[1, :32].reshape(-1, tile),
        jnp.where(ids < prompt, ids, -1),
        jnp.repeat(table, len(ids), axis=0),
        cfg=cfg,
    )
    step = jax.jit(decode.step, static_argnames='cfg')
    unused = jnp.asarray([-1, 0, -1], jnp.int32)
    tables = jnp.asarray([[9, 9], [2, 0], [9, 9]], jnp.int32)
    for at in range(prompt, 35):
      logps, pages, routing = step(
          params,
          pages,
          jnp.full(3, tokens[1, at]),
          jnp.where(unused < 0, -1, at),
          tables,
          cfg=cfg,
      )
      picked = np.asarray(logps)[1, tokens[1, at + 1]]
      np.testing.assert_array_equal(
          kernel_cases.bits(picked), kernel_cases.bits(want[1, at])
      )
      np.testing.assert_array_equal(routing[1], want_routing[1, at])

  def test_unknown_implementation_is_refused(self):
    with self.assertRaisesRegex(ValueError, "'cuda'.*must be"):
      launch.resolve('cuda')


if __name__ == '__main__':
  absltest.main()
