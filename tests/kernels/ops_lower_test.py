"""Kernels compiled ahead of time for sm_90, lowered through JAX."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp

from composer_jax import config
from composer_jax.learner import batch as batch_lib
from composer_jax.learner import losses
from composer_jax.learner import step
from composer_jax.model import decode
from composer_jax.model import params as params_lib
from kernels_triton import grouped
from kernels_triton import launch
from kernels_triton import rmsnorm
from kernels_triton import router
from tests import lowered

_Shape = jax.ShapeDtypeStruct


class LowerTest(parameterized.TestCase):

  def _compiled(self, f, *args):
    """PTX by kernel name, checked for what no kernel may do."""
    found = lowered.kernels(f, *args)
    for ptx in found:
      self.assertEmpty(lowered.atomics(ptx))
      self.assertEqual(lowered.resources(ptx)['spilled'], 0)
    return {lowered.name(ptx): ptx for ptx in found}

  def test_rms_norm(self):
    def f(x, scale):
      y = rmsnorm.rms_norm(x, scale, 1e-6, implementation='triton')
      return (y * y).sum()

    got = self._compiled(
        jax.grad(f, (0, 1)),
        _Shape((100, 2048), jnp.bfloat16),
        _Shape((2048,), jnp.float32),
    )
    self.assertCountEqual(
        got, ['rms_norm_forward', 'rms_norm_backward', 'sum_rows']
    )

  @parameterized.parameters('float32', 'bfloat16')
  def test_grouped_matmul(self, dtype):
    def f(x, w, sizes):
      y = grouped.grouped_matmul(x, w, sizes, dtype, 'triton')
      return (y * y).sum()

    got = self._compiled(
        jax.grad(f, (0, 1)),
        _Shape((65536, 2048), jnp.float32),
        _Shape((128, 2048, 1536), jnp.float32),
        _Shape((128,), jnp.int32),
    )
    self.assertCountEqual(got, ['grouped_rows', 'grouped_weights'])
    for ptx in got.values():
      tensor_cores = 'wgmma.mma_async' in ptx
      self.assertEqual(tensor_cores, dtype == 'bfloat16')
      self.assertNotIn('tf32', ptx)

  @parameterized.parameters('softmax', 'sigmoid')
  def test_router(self, scores):
    def f(logits, recorded):
      bias = jnp.zeros(256) if scores == 'sigmoid' else None
      gates, *_ = router.route(
          logits,
          bias,
          recorded,
          top_k=8,
          blank=65535,
          scores=scores,
          threshold=0.1,
          groups=8 if scores == 'sigmoid' else 1,
          top_groups=4 if scores == 'sigmoid' else 1,
          implementation='triton',
      )
      return (gates * gates).sum()

    got = self._compiled(
        jax.grad(f),
        _Shape((100, 256), jnp.float32),
        _Shape((100, 8), jnp.uint16),
    )
    self.assertCountEqual(got, ['route_forward', 'route_backward'])

  def test_program_does_not_depend_on_the_number_of_rows(self):
    def programs(n):
      f = lambda x, scale: rmsnorm.rms_norm(
          x, scale, 1e-6, implementation='triton'
      ).sum()
      g = lambda x, w, sizes: grouped.grouped_matmul(
          x, w, sizes, 'bfloat16', 'triton'
      ).sum()
      x = _Shape((n, 64), jnp.float32)
      w, sizes = _Shape((4, 64, 32), jnp.float32), _Shape((4,), jnp.int32)
      scale = _Shape((64,), jnp.float32)
      return [
          *lowered.kernels(jax.value_and_grad(f, (0, 1)), x, scale),
          *lowered.kernels(jax.value_and_grad(g, (0, 1)), x, w, sizes),
      ]

    self.assertEqual(programs(1), programs(33))

  @parameterized.named_parameters(
      ('grouped', dict(shared_gate=True, qkv_bias=True, qk_norm=True)),
      (
          'latent',
          dict(
              layers=3,
              dense_layers=1,
              dense_ffn=64,
              expert_groups=2,
              kv_heads=1,
              kv_latent=32,
              rope_dim=16,
              value_dim=32,
          ),
      ),
  )
  def test_model_decodes_and_trains_by_kernels(self, changes):
    cfg = config.ModelConfig(
        **dict(
            vocab=64,
            layers=2,
            embed=64,
            experts=4,
            moe_ffn=64,
            router='sigmoid',
            shared_experts=1,
            tied=True,
            dtype='bfloat16',
            kernels='triton',
        )
        | changes
    )
    params = params_lib.abstract(cfg)
    pages = jax.eval_shape(lambda: decode.init_pages(cfg, 8))
    ids = _Shape((4,), jnp.int32)
    forward = {'rms_norm_forward', 'grouped_rows', 'route_forward'}
    got = self._compiled(
        lambda *args: decode.step(*args, cfg=cfg),
        params,
        pages,
        ids,
        ids,
        _Shape((4, 2), jnp.int32),
    )
    self.assertLessEqual(forward, set(got))

    shape = (2, 64)
    kinds = dict.fromkeys(batch_lib.Batch.__dataclass_fields__, jnp.int32)
    kinds |= dict(sampled=jnp.bool_, behaviour_logps=jnp.float32)
    kinds |= dict(advantages=jnp.float32)
    fields = {name: _Shape(shape, kind) for name, kind in kinds.items()}
    fields['routing'] = _Shape((*shape, 2, 2), jnp.uint8)
    mesh = step.make_mesh(config.MeshConfig(data=1, expert=2))
    got = self._compiled(
        lambda params, batch, z: step.gradients(
            params, batch, z, cfg=cfg, loss=losses.DppoTv(), mesh=mesh
        ),
        params,
        batch_lib.Batch(**fields),
        _Shape((), jnp.float32),
    )
    backward = {'rms_norm_backward', 'grouped_weights', 'route_backward'}
    self.assertLessEqual(forward | backward | {'sum_rows'}, set(got))

  def test_a_gpu_without_tile_sizes_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'sm_75.*add a row'):
      with launch.ahead_of_time(75):
        launch.config({('float32', 90): None}, jnp.float32, 'triton')

  def test_without_a_gpu_triton_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'no GPU'):
      launch.resolve('triton')

  def test_tables_have_a_digest(self):
    with launch.ahead_of_time(90):
      facts = launch.facts('triton')
    self.assertLen(facts['tables'], 64)
    tables = launch.tables()
    self.assertIn('bfloat16/sm_90', tables['grouped_kernel']['CONFIGS'])
    self.assertIs(tables['fp_fusion'], False)


if __name__ == '__main__':
  absltest.main()
