"""Kernel references against float64 numpy, values and gradients."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from kernels_triton import attention
from kernels_triton import contract
from kernels_triton import grouped
from kernels_triton import logprob
from kernels_triton import rmsnorm
from kernels_triton import router
from kernels_triton import rows

_RNG = np.random.default_rng(0)


def _normal(*shape):
  return _RNG.standard_normal(shape).astype(np.float32)


def _softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def _close(got, want, tolerance=2e-5):
  np.testing.assert_allclose(np.asarray(got), want, tolerance, tolerance)


def _attention(q, k, v, segments, positions):
  """float64, token by token."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  group = q.shape[2] // k.shape[2]
  out = np.zeros(q.shape)
  for b, t, n in np.ndindex(*q.shape[:3]):
    seen = (segments[b] == segments[b, t]) & (positions[b] <= positions[b, t])
    m = n // group
    weights = _softmax(k[b, seen, m] @ q[b, t, n])
    out[b, t, n] = weights @ v[b, seen, m]
  return out


def _packed_segments():
  """Two rows of 96: segments of 40 and 20 tokens, and one of 96."""
  segments = np.zeros((2, 96), np.int32)
  positions = np.zeros((2, 96), np.int32)
  for row, start, length, number in (
      (0, 0, 40, 1),
      (0, 64, 20, 2),
      (1, 0, 96, 1),
  ):
    segments[row, start : start + length] = number
    positions[row, start : start + length] = np.arange(length)
  return segments, positions


class AttentionTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.q, self.k, self.v = (
        _normal(2, 96, 4, 16),
        _normal(2, 96, 2, 16),
        _normal(2, 96, 2, 16),
    )
    self.segments, self.positions = _packed_segments()
    self.real = (self.segments > 0)[:, :, None, None]

  def test_values(self):
    got = attention.segment_attention(
        self.q, self.k, self.v, self.segments, self.positions
    )
    want = _attention(self.q, self.k, self.v, self.segments, self.positions)
    _close(got * self.real, want * self.real)

  def test_gradients_match_those_of_plain_attention(self):
    weights = _normal(2, 96, 4, 16) * self.real
    mask = (self.segments[:, :, None] == self.segments[:, None]) & (
        self.positions[:, None] <= self.positions[:, :, None]
    )

    def plain(q, k, v):
      k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
      s = jnp.einsum('btnh,bsnh->bnts', q, k)
      p = jax.nn.softmax(jnp.where(mask[:, None], s, -1e30), axis=-1)
      return jnp.sum(jnp.einsum('bnts,bsnh->btnh', p, v) * weights)

    def ours(q, k, v):
      out = attention.segment_attention(q, k, v, self.segments, self.positions)
      return jnp.sum(out * weights)

    args = self.q, self.k, self.v
    got = jax.jit(jax.grad(ours, (0, 1, 2)))(*args)
    want = jax.jit(jax.grad(plain, (0, 1, 2)))(*args)
    for a, b in zip(got, want, strict=True):
      _close(a, b, 1e-4)

  def test_gradients_have_the_type_of_their_operands(self):
    args = [x.astype(jnp.bfloat16) for x in (self.q, self.k, self.v)]
    f = lambda *a: attention.segment_attention(
        *a, self.segments, self.positions
    ).sum()
    for g in jax.jit(jax.grad(f, (0, 1, 2)))(*args):
      self.assertEqual(g.dtype, jnp.bfloat16)

  def test_rows_that_do_not_fit_the_blocks_are_refused(self):
    q, k = _normal(1, 40, 2, 16), _normal(1, 40, 2, 16)
    with self.assertRaisesRegex(ValueError, 'multiple of'):
      attention.segment_attention(
          q, k, k, np.ones((1, 40), np.int32), np.arange(40)[None]
      )


class GroupedTest(parameterized.TestCase):

  @parameterized.named_parameters(
      (
          'even',
          lambda n: np.stack([np.arange(n) % 4, (np.arange(n) + 1) % 4], 1),
      ),
      ('empty_experts', lambda n: np.tile([[2, 0]], (n, 1))),
      ('one_row', lambda n: np.array([[3, 1]])),
  )
  def test_values_and_gradients(self, choose):
    experts = choose(37).astype(np.int32)
    n = len(experts)
    x, gates = _normal(n, 16), _softmax(_normal(n, 2)).astype(np.float32)
    w_in, w_out = _normal(4, 16, 2, 12), _normal(4, 12, 16)
    weights = _normal(n, 16)

    def plain(x, gates, w_in, w_out):
      a, b = jnp.einsum('nd,nkdgf->gnkf', x, w_in[experts])
      y = jnp.einsum('nkf,nkfd->nkd', jax.nn.silu(a) * b, w_out[experts])
      return jnp.sum(y * gates[..., None], axis=1)

    def ours(x, gates, w_in, w_out):
      return grouped.expert_ffn(x, gates, experts, w_in, w_out)

    args = x, gates, w_in, w_out
    with jax.enable_x64(True):
      exact = plain(*(np.asarray(a, np.float64) for a in args))
    _close(jax.jit(ours)(*args), exact, 1e-4)
    loss = lambda f: lambda *a: jnp.sum(f(*a) * weights)
    got = jax.jit(jax.grad(loss(ours), (0, 1, 2, 3)))(*args)
    want = jax.jit(jax.grad(loss(plain), (0, 1, 2, 3)))(*args)
    for a, b in zip(got, want, strict=True):
      _close(a, b, 1e-3)

  @parameterized.parameters(0, 1)
  def test_experts_in_two_ranges_give_the_bits_of_all(self, shift):
    """Also where one range has every choice, so that the other one has none."""
    experts = np.stack([np.arange(37) % 2 + 2 * shift, np.full(37, 3)], 1)
    experts = np.where(experts == 3, experts[:, :1] ^ 1, experts)
    experts[0] = 1 + shift, 2 * shift  # choices of one row in both ranges
    experts = experts.astype(np.int32)
    x, gates = _normal(37, 16), _normal(37, 2)
    w_in, w_out = _normal(4, 16, 2, 12), _normal(4, 12, 16)

    def parts(x, gates, w_in, w_out):
      lower, upper = (
          grouped.expert_choices(
              x, gates, experts - e, w_in[e : e + 2], w_out[e : e + 2]
          )
          for e in (0, 2)
      )
      y = lower + upper
      return y[:, 0] + y[:, 1]

    def ours(x, gates, w_in, w_out):
      return grouped.expert_ffn(x, gates, experts, w_in, w_out)

    args = x, gates, w_in, w_out
    np.testing.assert_array_equal(jax.jit(parts)(*args), jax.jit(ours)(*args))
    got, want = (
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), range(4)))
        for f in (parts, ours)
    )
    for a, b in zip(got(*args), want(*args), strict=True):
      _close(a, b, 1e-5)  # blocks of the backward differ

  def test_unused_expert_has_zero_gradient(self):
    experts = np.tile(np.array([[1, 2]], np.int32), (20, 1))
    gates = np.full((20, 2), 0.5, np.float32)
    f = lambda w: jnp.sum(
        grouped.expert_ffn(_normal(20, 8), gates, experts, w, _normal(4, 8, 8))
    )
    g = jax.grad(f)(_normal(4, 8, 2, 8))
    self.assertEqual(float(jnp.abs(g[jnp.array([0, 3])]).max()), 0.0)


class RouterTest(parameterized.TestCase):

  def test_ties_take_the_lowest_index(self):
    logits = jnp.asarray([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(router.select(logits, 2), [[1, 2], [0, 1]])

  def test_gates_are_a_softmax_over_the_chosen(self):
    logits = _normal(8, 6)
    chosen = router.select(logits, 3)
    picked = np.take_along_axis(logits, np.asarray(chosen), 1)
    _close(router.gates(logits, chosen), _softmax(picked.astype(np.float64)))

  def test_record_is_obeyed_and_blank_is_live(self):
    live = jnp.asarray([[0, 1], [2, 3]])
    recorded = jnp.asarray([[3, 2], [255, 255]], jnp.uint8)
    np.testing.assert_array_equal(
        router.replayed(live, recorded, 255), [[3, 2], [2, 3]]
    )


class LogprobTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.params = 1 + 0.1 * _normal(16), _normal(16, 40)
    self.hidden, self.targets = _normal(53, 16), _RNG.integers(0, 40, 53)
    self.targets = self.targets.astype(np.int32)

  def _exact(self):
    scale, unembed = (np.asarray(p, np.float64) for p in self.params)
    x = self.hidden.astype(np.float64)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale
    return np.log(_softmax(x @ unembed))

  def test_values(self):
    logps, entropy = logprob.target_log_probs(
        self.params, self.hidden, self.targets, 1e-6
    )
    exact = self._exact()
    _close(logps, exact[np.arange(53), self.targets])
    _close(entropy, -(np.exp(exact) * exact).sum(-1))
    whole = logprob.log_probs(self.params, self.hidden, eps=1e-6)
    _close(whole, exact)
    # Decode picks from the row what the trainer computes: the same bits.
    picked = np.asarray(whole)[np.arange(53), self.targets]
    np.testing.assert_array_equal(
        picked.view(np.uint32), np.asarray(logps).view(np.uint32)
    )

  def test_gradients(self):
    weights = _normal(53)

    def plain(params, hidden):
      scale, unembed = params
      x = rmsnorm.rms_norm(hidden, scale, 1e-6)
      logps = jax.nn.log_softmax(x @ unembed, axis=-1)
      return jnp.sum(logps[jnp.arange(53), self.targets] * weights)

    def ours(params, hidden):
      logps, _ = logprob.target_log_probs(params, hidden, self.targets, 1e-6)
      return jnp.sum(logps * weights)

    got = jax.grad(ours, (0, 1))(self.params, self.hidden)
    want = jax.grad(plain, (0, 1))(self.params, self.hidden)
    jax.tree.map(functools.partial(_close, tolerance=1e-4), got, want)

  def test_all_rows_logits_are_never_held(self):
    n, d, v = 8192, 16, 2048
    f = lambda params, hidden, targets: jnp.sum(
        logprob.target_log_probs(params, hidden, targets, 1e-6)[0]
    )
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    program = jax.jit(jax.grad(f, (0, 1))).lower(
        (shape((d,)), shape((d, v))),
        shape((n, d)),
        jax.ShapeDtypeStruct((n,), jnp.int32),
    )
    held = program.compile().memory_analysis().temp_size_in_bytes
    self.assertLess(held, n * v * 4 * 0.6)


class RowsTest(parameterized.TestCase):

  @parameterized.parameters(1, 15, 16, 50)
  def test_bits_of_a_row_do_not_depend_on_the_others(self, count):
    x, w = _normal(64, 48), _normal(48, 80)
    f = jax.jit(
        lambda x: rows.run_rows(
            lambda w, x: jax.nn.log_softmax(x @ w, axis=-1), w, x
        )
    )
    whole = np.asarray(f(x))
    part = np.asarray(f(x[:count]))
    np.testing.assert_array_equal(
        part.view(np.uint32), whole[:count].view(np.uint32)
    )

  def test_backward_is_that_of_the_plain_function(self):
    x, w = _normal(20, 8), _normal(8, 12)
    f = lambda w, x: jnp.tanh(x @ w)
    got = jax.grad(lambda w, x: rows.rowwise(f)(w, x).sum(), (0, 1))(w, x)
    want = jax.grad(lambda w, x: f(w, x).sum(), (0, 1))(w, x)
    for a, b in zip(got, want, strict=True):
      _close(a, b)


class ContractTest(absltest.TestCase):

  def test_digest_names_the_constants(self):
    self.assertEqual(
        set(contract.constants()),
        {'rows', 'query_rows', 'key_block', 'expert_rows'},
    )
    self.assertLen(contract.digest(), 64)
    self.assertEqual(contract.KEY_BLOCK % contract.QUERY_ROWS, 0)


if __name__ == '__main__':
  absltest.main()
