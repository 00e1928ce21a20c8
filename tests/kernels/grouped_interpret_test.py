"""Grouped and dense matmul kernels under the interpreter, against float64."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from kernels_triton import grouped
from kernels_triton import matmul
from tests import kernel_cases

# Empty groups first, between and last; ragged; a tile filled to the brim.
_SIZES = ((0, 70, 0, 29, 1), (64, 0), (0, 1), (33,))


class GroupedTest(parameterized.TestCase):

  @parameterized.product(sizes=_SIZES, dtype=('float32', 'bfloat16'))
  def test_values_and_gradients(self, sizes, dtype):
    cases = kernel_cases.Cases(dtype)
    n, k, width = sum(sizes), 40, 72
    x, w = cases.normal(n, k), cases.normal(len(sizes), k, width)
    dy = cases.normal(n, width)

    @jax.jit
    def run(*args):
      x, w, dy = (a.astype(jnp.float32) for a in args)
      f = lambda x, w: grouped.grouped_matmul(
          x, w, jnp.asarray(sizes, jnp.int32), dtype, 'interpret'
      )
      y, vjp = jax.vjp(f, x, w)
      return y, *vjp(dy)

    y, dx, dw = run(x, w, dy)
    x, w, dy = (kernel_cases.exact(a) for a in (x, w, dy))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    cases.check(y, np.einsum('nk,nkm->nm', x, w[owner]))
    cases.check(dx, np.einsum('nm,nkm->nk', dy, w[owner]))
    sums = [x[owner == e].T @ dy[owner == e] for e in range(len(sizes))]
    cases.check(dw, np.stack(sums))
    for e in np.flatnonzero(np.asarray(sizes) == 0):
      self.assertTrue((np.asarray(dw[e]) == 0).all(), 'written, not left over')

  @parameterized.parameters('float32', 'bfloat16')
  def test_dense(self, dtype):
    cases = kernel_cases.Cases(dtype)
    x, w = cases.normal(70, 40), cases.normal(40, 24)
    f = jax.jit(
        lambda x, w: matmul.matmul(
            x, w, dtype=dtype, implementation='interpret'
        )
    )
    exact = [kernel_cases.exact(a) for a in (x, w)]
    cases.check(f(x, w), exact[0] @ exact[1])
    dw = jax.grad(lambda w: f(x, w).sum())(w)
    self.assertEqual(dw.dtype, w.dtype)
    cases.check(dw, np.tile(exact[0].sum(0)[:, None], (1, 24)))

  @parameterized.parameters(
      ('float32', 37, 2), ('bfloat16', 37, 2), ('float32', 1, 1)
  )
  def test_experts(self, dtype, n, k):
    cases = kernel_cases.Cases(dtype)
    rng = np.random.default_rng(1)
    # Expert 4 of 5 is never chosen.
    chosen = np.stack([rng.permutation(4)[:k] for _ in range(n)])
    experts = jnp.asarray(chosen, jnp.int32)
    args = (
        cases.normal(n, 16).astype(jnp.float32),
        jnp.abs(cases.normal(n, k)).astype(jnp.float32),
        cases.normal(5, 16, 2, 24),
        cases.normal(5, 24, 16),
    )

    def run(implementation):
      def f(x, gates, w_in, w_out):
        y = grouped.expert_ffn(
            x,
            gates,
            experts,
            w_in,
            w_out,
            dtype=dtype,
            implementation=implementation,
        )
        return (y * jnp.cos(jnp.arange(16.0))[None]).sum(), y

      return jax.jit(jax.grad(f, (0, 1, 2, 3), has_aux=True))(*args)

    (got, y), (want, exact) = run('interpret'), run('reference')
    cases.check(y, kernel_cases.exact(exact))
    for a, b in zip(got, want, strict=True):
      cases.check(a, kernel_cases.exact(b))

  def test_absent_experts_are_zero(self):
    """Rows that no kernel writes are read by no gather."""
    cases = kernel_cases.Cases('float32')
    experts = jnp.asarray([[0, 3], [-1, 2], [5, -2]], jnp.int32)
    args = (
        cases.normal(3, 16),
        cases.normal(3, 2),
        cases.normal(2, 16, 2, 24),
        cases.normal(2, 24, 16),
    )

    def run(implementation):
      f = lambda x, gates, w_in, w_out: grouped.expert_choices(
          x, gates, experts, w_in, w_out, implementation=implementation
      )
      y, vjp = jax.vjp(f, *args)
      return y, *vjp(jnp.ones_like(y))

    got, want = jax.jit(run, static_argnums=0)('interpret'), run('reference')
    self.assertFalse(np.asarray(got[0]).reshape(6, 16)[1:].any())
    for a, b in zip(got, want, strict=True):
      cases.check(a, kernel_cases.exact(b))


if __name__ == '__main__':
  absltest.main()
