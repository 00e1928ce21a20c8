"""The numeric contract: decode and trainer give the same bits, naive code not."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import config
from composer_jax import rope
from composer_jax.learner import batch as batch_lib
from composer_jax.learner import items
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.model import decode
from composer_jax.model import params as params_lib
from kernels_triton import contract
from tests import fresh

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


KINDS = {
    'softmax': {},
    'sigmoid': {'router': 'sigmoid', 'shared_experts': 1, 'routed_scale': 2.5},
    'dense': {'experts': 0, 'top_k': 0, 'shared_experts': 2},
    'deepseek': {
        'router': 'sigmoid',
        'shared_experts': 1,
        'expert_groups': 2,
        'dense_layers': 1,
        'dense_ffn': 48,
        'kv_heads': 1,
        'kv_latent': 24,
        'q_latent': 20,
        'rope_dim': 8,
        'value_dim': 12,
        'rope_scaling': rope.Yarn(
            4.0, 32, beta_fast=4.0, mscale=1.0, mscale_all_dim=0.8
        ),
    },
}
BATCHES = ((1, 5, None), (3, 31, 7), (7, 32, 13), (33, 17, 1))


def _cfg(dtype, kind='softmax'):
  return dataclasses.replace(_CFG, dtype=dtype, **KINDS[kind])


@functools.cache
def _params(seed=0, kind='softmax'):
  masters = fresh.params(_cfg('float32', kind), seed)
  moe = masters.layers.moe
  if moe.bias is not None:  # zero at first; the choice shall depend on it
    bias = 0.1 * jax.random.normal(jax.random.key(9), moe.bias.shape)
    moe = moe.replace(bias=bias)
    masters = masters.replace(layers=masters.layers.replace(moe=moe))
  return jax.tree.map(
      lambda x: x.astype(jnp.float32), params_lib.publish_dtype(masters)
  )


@functools.cache
def _texts(count=33):
  rng = np.random.default_rng(1)
  lengths = rng.integers(33, _LENGTH, count)
  return tuple(rng.integers(0, _CFG.vocab, n).astype(np.int32) for n in lengths)


def _bits(x):
  return np.asarray(x, np.float32).view(np.uint32)


_prefill = jax.jit(
    decode.prefill, static_argnames='cfg', donate_argnames='pages'
)
_step = jax.jit(decode.step, static_argnames='cfg', donate_argnames='pages')
_TILE = contract.QUERY_ROWS


def _chunk(params, pages, text, start, stop, table, cfg):
  """Prefills text[start:stop], padded to whole tiles."""
  tokens = np.zeros(_LENGTH, np.int32)
  positions = np.full(_LENGTH, -1, np.int32)
  tokens[: stop - start] = text[start:stop]
  positions[: stop - start] = np.arange(start, stop)
  tokens, positions = (x.reshape(-1, _TILE) for x in (tokens, positions))
  rows = np.broadcast_to(table, (len(tokens), len(table)))
  pages, routing = _prefill(params, pages, tokens, positions, rows, cfg=cfg)
  routing = np.asarray(routing).reshape(_LENGTH, *routing.shape[2:])
  return pages, routing[: stop - start]


def _decoded(params, texts, prompt, cfg, *, cut=None, swap=None):
  """Log-prob of every token after the prompt, and routing of every input.

  Args:
    params: the model's.
    texts: sequences to feed.
    prompt: tokens of each that are prefilled.
    cfg: the model.
    cut: most tokens of a chunk of the prefill.
    swap: (position, params) to go on with, or None.
  """
  n, width = len(texts), _LENGTH // contract.KEY_BLOCK
  # Shuffled pages with gaps: where a sequence lies must not matter.
  table = np.random.default_rng(2).permutation(n * width + 3)[: n * width]
  table = table.reshape(n, width).astype(np.int32)
  pages = decode.init_pages(cfg, n * width + 3)
  logps, routes = [[] for _ in texts], [[] for _ in texts]
  for i, text in enumerate(texts):
    for start in range(0, prompt, cut or prompt):
      stop = min(start + (cut or prompt), prompt)
      pages, routing = _chunk(params, pages, text, start, stop, table[i], cfg)
      routes[i].extend(routing)
  for at in range(prompt, max(map(len, texts)) - 1):
    if swap is not None and at == swap[0]:
      params = swap[1]
    fed = np.array([t[at] if at < len(t) else 0 for t in texts], np.int32)
    where = np.array([at if at < len(t) else -1 for t in texts], np.int32)
    out, pages, routing = _step(params, pages, fed, where, table, cfg=cfg)
    out, routing = np.asarray(out), np.asarray(routing)
    for i, text in enumerate(texts):
      if at + 1 < len(text):
        logps[i].append(out[i, text[at + 1]])
        routes[i].append(routing[i])
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


def check_decode_equals_trainer(dtype, kind, count, prompt, cut):
  """Log-probs of equal bits and equal routes, for the first `count` texts."""
  cfg, params = _cfg(dtype, kind), _params(kind=kind)
  logps, routes = _decoded(params, _texts()[:count], prompt, cfg, cut=cut)
  # The trainer packs every text, decode runs the first few.
  trained = _trained(params, _texts(), cfg, 24, 128, 2)
  for got, route, (want, want_route) in zip(
      logps, routes, trained[:count], strict=True
  ):
    np.testing.assert_array_equal(_bits(got), _bits(want[prompt + 1 :]))
    np.testing.assert_array_equal(route, want_route[:-1])


class BitwiseTest(parameterized.TestCase):

  @parameterized.product(dtype=('float32', 'bfloat16'), batch=BATCHES)
  def test_decode_equals_trainer(self, dtype, batch):
    check_decode_equals_trainer(dtype, 'softmax', *batch)

  @parameterized.product(
      dtype=('float32', 'bfloat16'), kind=('sigmoid', 'dense', 'deepseek')
  )
  def test_other_models_too(self, dtype, kind):
    check_decode_equals_trainer(dtype, kind, *BATCHES[2])

  @parameterized.parameters(
      (33, 64, 1), (18, 128, 2), (12, 256, 4), (36, 64, 4)
  )
  def test_packing_and_devices_leave_the_bits(self, rows, length, devices):
    cfg = _cfg('float32')
    want = _trained(_params(), _texts(), cfg, 24, 128, 2)
    got = _trained(_params(), _texts(), cfg, rows, length, devices)
    for (a, r), (b, s) in zip(got, want, strict=True):
      np.testing.assert_array_equal(_bits(a[1:]), _bits(b[1:]))
      np.testing.assert_array_equal(r, s)

  def test_a_swap_changes_later_tokens_only(self):
    cfg = _cfg('float32')
    texts, prompt, at = _texts()[:3], 9, 20
    old, _ = _decoded(_params(), texts, prompt, cfg)
    swapped = [
        _decoded(
            _params(), texts[:n], prompt, cfg, swap=(at, _params(1)), cut=c
        )
        for n, c in ((3, None), (2, 5))
    ]
    for i in range(2):
      alone, other = swapped[0][0][i], swapped[1][0][i]
      np.testing.assert_array_equal(_bits(alone), _bits(other))
      np.testing.assert_array_equal(swapped[0][1][i], swapped[1][1][i])
      k = at - prompt
      np.testing.assert_array_equal(_bits(alone[:k]), _bits(old[i][:k]))
      self.assertTrue(np.all(_bits(alone[k:]) != _bits(old[i][k:])))

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
