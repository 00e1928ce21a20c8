"""Log-prob kernels under the interpreter: values, gradients, equal bits."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from kernels_triton import logprob
from tests import kernel_cases

_EPS = 1e-6


def _exact(scale, unembed, hidden):
  """Log-softmax of the normalised rows."""
  mean = jnp.mean(hidden * hidden, axis=-1, keepdims=True)
  normed = hidden / jnp.sqrt(mean + _EPS) * scale[None]
  return jax.nn.log_softmax(normed @ unembed, axis=-1)


def _operands(dtype, n, width, vocab):
  cases = kernel_cases.Cases(dtype)
  unembed = cases.normal(width, vocab) * 0.5
  params = 1 + 0.1 * cases.normal(width), unembed.astype(dtype)
  targets = np.random.default_rng(1).integers(0, vocab, n, np.int32)
  return cases, params, cases.normal(n, width), targets


def _logps(params, hidden, targets):
  return logprob.target_log_probs(
      params, hidden, targets, eps=_EPS, implementation='interpret'
  )


def _rows(params, hidden):
  return logprob.log_probs(params, hidden, eps=_EPS, implementation='interpret')


class LogprobTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ('several_tiles', 'float32', 70, 40, 150),
      ('one_row', 'float32', 1, 16, 64),
      ('bf16', 'bfloat16', 37, 72, 200),
  )
  def test_values_and_gradients(self, dtype, n, width, vocab):
    cases, params, hidden, targets = _operands(dtype, n, width, vocab)
    g = kernel_cases.Cases('float32').normal(n)
    # Chunks that end in the middle of a tile and of the vocabulary.
    with mock.patch.object(logprob, '_BACKWARD_COLUMNS', 90):
      (got, entropy), vjp = jax.vjp(
          lambda *a: _logps(a[:2], a[2], targets), *params, hidden
      )
      gradients = vjp((g, jnp.zeros(n)))
    with jax.enable_x64(True):
      exact = [kernel_cases.exact(a) for a in (*params, hidden)]
      rows, exact_vjp = jax.vjp(_exact, *exact)
      onehot = np.eye(vocab)[targets] * kernel_cases.exact(g)[:, None]
      wanted = exact_vjp(jnp.asarray(onehot))
    rows, wanted = jax.device_get((rows, wanted))
    cases.check(got, rows[np.arange(n), targets])
    cases.check(entropy, -(np.exp(rows) * rows).sum(-1))
    for a, b, x in zip(gradients, wanted, (*params, hidden), strict=True):
      self.assertEqual(a.dtype, x.dtype)
      cases.check(a, b)

  def test_gradient_is_the_slope(self):
    _, (scale, unembed), hidden, targets = _operands('float32', 5, 16, 64)
    along = kernel_cases.Cases('float32').normal(*unembed.shape)
    loss = lambda w: jnp.sum(_logps((scale, w), hidden, targets)[0])
    step = 1e-2
    ends = [float(loss(unembed + s * along)) for s in (-step, step)]
    slope = float(jnp.sum(jax.grad(loss)(unembed) * along))
    np.testing.assert_allclose(slope, (ends[1] - ends[0]) / 2 / step, 1e-2)

  @parameterized.parameters('float32', 'bfloat16')
  def test_a_row_has_its_bits_anywhere(self, dtype):
    _, params, hidden, targets = _operands(dtype, 70, 40, 150)
    trained = kernel_cases.bits(_logps(params, hidden, targets)[0])
    for rows in ([69], [3, 50, 4]):
      alone = _logps(params, hidden[np.array(rows)], targets[rows])[0]
      np.testing.assert_array_equal(kernel_cases.bits(alone), trained[rows])
      decoded = kernel_cases.bits(_rows(params, hidden[np.array(rows)]))
      picked = decoded[np.arange(len(rows)), targets[rows]]
      np.testing.assert_array_equal(picked, trained[rows])


if __name__ == '__main__':
  absltest.main()
