"""Router kernels under the interpreter, against float64."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from kernels_triton import router
from tests import kernel_cases

_BLANK = 255
_N, _E, _K = 9, 12, 3
_IMPLEMENTATIONS = ('interpret', 'reference')


def _limited(value, groups, top_groups):
  """The values in the best groups, -inf elsewhere."""
  parts = value.reshape(groups, -1)
  score = np.sort(parts, axis=1)[:, -2:].sum(axis=1)
  best = sorted(range(groups), key=lambda g: (-score[g], g))[:top_groups]
  kept = np.isin(np.arange(groups), best)[:, None]
  return np.where(kept, parts, -np.inf).reshape(-1)


def _exact(
    logits,
    bias,
    recorded,
    scores,
    renormalize,
    scale,
    threshold,
    groups=1,
    top_groups=1,
):
  """Gates and experts, row by row."""
  gates, chosen = [], []
  for x, record in zip(logits, recorded, strict=True):
    if scores == 'sigmoid':
      score = 1 / (1 + np.exp(-x))
      value = score + bias
    else:
      value = score = np.exp(x) / np.exp(x).sum()
    order = _limited(value, groups, top_groups)
    live = sorted(range(_E), key=lambda e: (-order[e], e))[:_K]  # noqa: B023
    ids = live
    if record[0] != _BLANK:
      floor = threshold * value[live[-1]] if threshold else -np.inf
      keep = [e for e in record if value[e] >= floor]
      spare = (e for e in live if e not in keep)
      ids = [e if e in keep else next(spare) for e in record]
    gate = score[ids]
    gates.append(scale * (gate / gate.sum() if renormalize else gate))
    chosen.append(ids)
  return np.array(gates), np.array(chosen)


class RouterTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    # Few distinct values: ties, within the first k and at their border.
    self.logits = rng.integers(-4, 5, (_N, _E)).astype(np.float32) / 2
    self.bias = rng.integers(-2, 3, _E).astype(np.float32) / 8
    recorded = np.stack([rng.permutation(_E)[:_K] for _ in range(_N)])
    recorded[::3] = _BLANK
    self.recorded = recorded.astype(np.uint8)
    self.dgates = rng.standard_normal((_N, _K)).astype(np.float32)

  def _run(self, implementation, **rule):
    bias = self.bias if rule['scores'] == 'sigmoid' else None

    @jax.jit
    def run(logits, dgates):
      def f(logits):
        gates, experts, live = router.route(
            logits,
            bias,
            jnp.asarray(self.recorded),
            top_k=_K,
            blank=_BLANK,
            implementation=implementation,
            **rule,
        )
        return (gates * dgates).sum(), (gates, experts, live)

      return jax.grad(f, has_aux=True)(logits)

    dlogits, out = run(self.logits, self.dgates)
    return *out, dlogits

  @parameterized.parameters(
      *itertools.product(
          (('softmax', 1, 1), ('sigmoid', 1, 1), ('sigmoid', 3, 2)),
          ((True, 1.0), (False, 2.5)),
          (0.0, 0.7),
      )
  )
  def test_values_and_gradients(self, choice, gate, threshold):
    scores, groups, top_groups = choice
    renormalize, scale = gate
    rule = dict(
        scores=scores,
        renormalize=renormalize,
        scale=scale,
        threshold=threshold,
        groups=groups,
        top_groups=top_groups,
    )
    exact = self.logits.astype(np.float64), self.bias, self.recorded
    gates, chosen = _exact(*exact, **rule)
    cases = kernel_cases.Cases('float32')
    results = [self._run(i, **rule) for i in _IMPLEMENTATIONS]
    for got in results:
      np.testing.assert_array_equal(got[1], chosen)
      cases.check(got[0], gates)
    ours, reference = results
    np.testing.assert_array_equal(ours[2], reference[2])
    cases.check(ours[3], kernel_cases.exact(reference[3]))
    # Central differences along one direction.
    step = 1e-5 * np.random.default_rng(2).standard_normal((_N, _E))
    # The choice is held: it has no derivative.
    held = exact[1], np.asarray(chosen), scores, renormalize, scale, 0.0
    high, low = (_exact(exact[0] + s * step, *held)[0] for s in (1, -1))
    slope = ((high - low) * self.dgates).sum() / 2
    np.testing.assert_allclose(
        (kernel_cases.exact(ours[3]) * step).sum(), slope, 1e-3, 1e-9
    )

  def test_bias_with_softmax_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'sigmoid'):
      router.route(
          self.logits, self.bias, self.recorded, top_k=_K, blank=_BLANK
      )


if __name__ == '__main__':
  absltest.main()
