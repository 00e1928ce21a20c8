"""The numeric contract: decode and trainer give the same bits, naive code not."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax.learner import batch as batch_lib
from composer_jax.learner import items
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.model import decode
from composer_jax.model import params as params_lib
from kernels_triton import contract

_LENGTH = 64
_CFG = config.ModelConfig(
    vocab=64,
    layers=2,
    embed=32,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    experts=4,
    moe_ffn=32,
)


def _cfg(dtype):
  return config.ModelConfig(**{**_CFG.__dict__, 'dtype': dtype})


@functools.cache
def _params(seed=0):
  masters = params_lib.init(_CFG, jax.random.key(seed))
  return jax.tree.map(
      lambda x: x.astype(jnp.float32), params_lib.publish_dtype(masters)
  )


@functools.cache
def _texts(count=7):
  rng = np.random.default_rng(1)
  lengths = rng.integers(33, _LENGTH, count)
  return tuple(rng.integers(0, _CFG.vocab, n).astype(np.int32) for n in lengths)


def _bits(x):
  return np.asarray(x, np.float32).view(np.uint32)


_prefill = jax.jit(decode.prefill, static_argnames='cfg')
_step = jax.jit(decode.step, static_argnames='cfg', donate_argnames='cache')
_insert = jax.jit(decode.insert)


def _decoded(params, texts, prompt, cfg, slots=None):
  """Log-prob of every token after the prompt, and routing of every input."""
  n = len(texts)
  slots = np.arange(n, dtype=np.int32) if slots is None else slots
  width = -(-prompt // contract.KEY_BLOCK) * contract.KEY_BLOCK
  tokens = np.zeros((n, width), np.int32)
  for i, text in enumerate(texts):
    tokens[i, :prompt] = text[:prompt]
  done = _prefill(params, tokens, np.full(n, prompt, np.int32), cfg=cfg)
  cache = decode.init_cache(cfg, int(slots.max()) + 1, _LENGTH)
  rows = np.arange(n, dtype=np.int32)
  cache = _insert(cache, done.k, done.v, rows, slots)
  logps = [[np.asarray(done.logps)[i, t[prompt]]] for i, t in enumerate(texts)]
  routes = [[*np.asarray(done.routing)[i, :prompt]] for i in range(n)]
  width = int(slots.max()) + 1
  for at in range(prompt, max(map(len, texts)) - 1):
    fed = np.zeros(width, np.int32)
    where = np.zeros(width, np.int32)
    for i, text in enumerate(texts):
      fed[slots[i]] = text[at] if at < len(text) else 0
      where[slots[i]] = at
    out, cache, routing = _step(params, cache, fed, where, cfg=cfg)
    out, routing = np.asarray(out), np.asarray(routing)
    for i, text in enumerate(texts):
      if at + 1 < len(text):
        logps[i].append(out[slots[i], text[at + 1]])
        routes[i].append(routing[slots[i]])
  return [np.array(x) for x in logps], [np.array(x) for x in routes]


def _trained(params, texts, cfg, rows, tokens_per_row, devices):
  """The same from the trainer's forward on packed rows."""
  shape = packing.Shape(rows, tokens_per_row, contract.KEY_BLOCK)
  packed = [
      items.Item(i, items.document(t), 1.0) for i, t in enumerate(texts, 1)
  ]
  batch, _ = packing.pack(packed, shape, now=0)
  mesh = step.make_mesh(config.MeshConfig(devices))
  logps, routing = jax.device_get(step.score(params, batch, cfg=cfg, mesh=mesh))
  out = []
  for i, text in enumerate(texts, 1):
    row, start = np.argwhere(batch.rollouts == i)[0]
    span = slice(start, start + len(text))
    out.append((logps[row, span], routing[row, span]))
  return out


class BitwiseTest(parameterized.TestCase):

  @parameterized.product(
      dtype=('float32', 'bfloat16'), batch=(1, 7), prompt=(5, 32)
  )
  def test_decode_equals_trainer(self, dtype, batch, prompt):
    cfg = _cfg(dtype)
    texts = _texts()[:batch]
    # Shuffled slots with a gap: where a sequence sits must not matter.
    slots = np.random.default_rng(2).permutation(batch + 1)[:batch]
    logps, routes = _decoded(
        _params(), texts, prompt, cfg, slots.astype(np.int32)
    )
    trained = _trained(_params(), _texts(), cfg, 8, 128, 2)
    # The trainer packs every text, decode runs the first few.
    for got, route, (want, want_route) in zip(
        logps, routes, trained[:batch], strict=True
    ):
      np.testing.assert_array_equal(_bits(got), _bits(want[prompt:]))
      np.testing.assert_array_equal(route, want_route[:-1])

  @parameterized.parameters((8, 64, 1), (4, 128, 2), (4, 256, 4), (8, 64, 4))
  def test_packing_and_devices_leave_the_bits(self, rows, length, devices):
    cfg = _cfg('float32')
    want = _trained(_params(), _texts(), cfg, 8, 128, 2)
    got = _trained(_params(), _texts(), cfg, rows, length, devices)
    for (a, r), (b, s) in zip(got, want, strict=True):
      np.testing.assert_array_equal(_bits(a[1:]), _bits(b[1:]))
      np.testing.assert_array_equal(r, s)

  def test_prefill_cut_leaves_the_bits(self):
    cfg = _cfg('float32')
    at5, _ = _decoded(_params(), _texts()[:2], 5, cfg)
    at31, _ = _decoded(_params(), _texts()[:2], 31, cfg)
    for a, b in zip(at5, at31, strict=True):
      np.testing.assert_array_equal(_bits(a[26:]), _bits(b))

  def test_negative_control_naive_code_breaks_it(self):
    """Without the blocks the same comparison MUST fail, or it proves nothing."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((48, 128)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((128, 512)), jnp.float32)
    naive = jax.jit(lambda x: jax.nn.log_softmax(x @ w, axis=-1))
    whole = _bits(naive(x))
    alone = np.concatenate([_bits(naive(x[i : i + 1])) for i in range(48)])
    self.assertGreater((whole != alone).any(axis=1).sum(), 0)

  def test_batch_is_a_pytree_of_one_row_type(self):
    # A batch may be mapped to anything that is not an array.
    fields = batch_lib.Batch.__dataclass_fields__
    batch = batch_lib.Batch(**{name: 0 for name in fields})
    self.assertLen(jax.tree.leaves(jax.tree.map(lambda _: 'x', batch)), 9)


if __name__ == '__main__':
  absltest.main()
