"""The benchmark compares like with like, and counts what it says."""

import json
import pathlib
import tempfile

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax import config
from composer_jax.model import params as params_lib
from composer_jax.model import transformer
from experiments import bench
from experiments.bench_suites import mixtral
from experiments.bench_suites import paired
from experiments.bench_suites import sandbox
from experiments.bench_suites import train

_SMALL = config.ModelConfig(
    vocab=64,
    layers=2,
    embed=32,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    experts=4,
    top_k=2,
    moe_ffn=16,
)
_needs_peer = pytest.mark.skipif(
    not mixtral.installed(), reason="needs the extra 'peers'"
)


def _result(ours, peer):
  return paired.Result('x', 'tokens/s', ours, peer, 'peer', target=0.8)


class PairedTest(absltest.TestCase):

  def test_ratio_is_the_median_of_neighboring_rounds(self):
    # The machine slows down tenfold half way: the ratio does not notice.
    r = _result((100.0, 110.0, 9.0, 10.0, 12.0), (100.0, 100.0, 10.0, 10.0, 10))
    self.assertAlmostEqual(r.ratio, 1.0)
    self.assertIn('ratio 1.00 (target 0.8: ok)', str(r))
    self.assertIn('BELOW TARGET', str(_result((7.0,), (10.0,))))
    self.assertNotIn('ratio', str(_result((7.0,), ())))
    self.assertIsNone(_result((7.0,), ()).as_json()['ratio'])

  def test_rounds_alternate_and_the_fastest_peer_is_chosen(self):
    calls = []
    clock = [0.0]

    def side(name, seconds):
      def run():
        calls.append(name)
        clock[0] += seconds

      return run

    r = paired.measure(
        'x',
        side('ours', 2.0),
        {'slow': side('slow', 5.0), 'fast': side('fast', 4.0)},
        work=8,
        unit='u/s',
        pairs=3,
        target=1.0,
        clock=lambda: clock[0],
    )
    warmup = ['ours', 'slow', 'slow', 'fast', 'fast']
    self.assertEqual(
        calls, warmup + ['ours', 'fast', 'fast', 'ours', 'ours', 'fast']
    )
    self.assertEqual(r.ours, (4.0,) * 3)
    self.assertEqual(r.peer, (2.0,) * 3)
    self.assertEqual((r.ratio, r.peer_name), (2.0, 'fast'))


class SuiteTest(absltest.TestCase):

  def test_train(self):
    r = train.measure(
        pairs=2, cfg=_SMALL, rows=4, tokens_per_row=64, steps=1, devices=(2,)
    )
    self.assertLen(r.ours, 2)
    self.assertGreater(min(r.ours), 0)
    self.assertEqual(bool(r.peer), mixtral.installed())

  def test_sandbox(self):
    figures = {f.name: f for f in sandbox.run(pairs=1)}
    name, *_ = figures  # of the best level here
    self.assertEndsWith(name, ': 16 sessions up')
    level = name.partition(':')[0]
    for what in ('exec', 'python', 'snapshot', 'throughput'):
      self.assertGreater(figures[f'{level}: {what}'].value, 0)

  def test_report_is_json(self):
    results = [_result((7.0,), (10.0,))]
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder, 'x.json')
      bench.write(str(path), 'train', bench.conditions(), results)
      report = json.loads(path.read_text())
    self.assertEqual(report['results'][0]['ratio'], 0.7)
    self.assertEqual(report['machine']['jax'], jax.__version__)


@_needs_peer
class PeerTest(absltest.TestCase):
  """The peer is the same model: same size, and the same function."""

  def test_same_number_of_parameters(self):
    for cfg in (_SMALL, mixtral.MODEL):
      for model in mixtral.models(cfg, 64).values():
        size = sum(p.numel() for p in model.parameters())
        self.assertEqual(size, params_lib.count(cfg)[0])

  def test_same_log_probs_from_the_same_weights(self):
    import torch

    params = params_lib.init(_SMALL, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 64, (2, 32), np.int32)
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), (2, 32))
    targets = np.roll(tokens, -1, axis=1)
    ids, ones, at, aim = map(
        jnp.asarray, (tokens, np.ones_like(tokens), positions, targets)
    )
    out = transformer.forward(params, ids, ones, at, cfg=_SMALL)
    logps, _ = transformer.token_logps(params, out.hidden, aim, cfg=_SMALL)
    for name, model in mixtral.models(_SMALL, 32).items():
      state = _state_dict(params)
      state = {k: torch.from_numpy(np.array(v)) for k, v in state.items()}
      model.load_state_dict(state)
      with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens).long()).logits
      want = torch.log_softmax(logits, -1).numpy()
      want = np.take_along_axis(want, targets[..., None], -1)[..., 0]
      np.testing.assert_allclose(logps, want, atol=2e-5, err_msg=name)

  def test_generates_the_asked_number_of_tokens(self):
    prompts = np.ones((3, 5), np.int32)
    for model in mixtral.models(_SMALL, 64).values():
      out = mixtral.generate(model, prompts, 9)
      self.assertEqual(out.shape, (3, 14))

  def test_trains(self):
    tokens = np.random.default_rng(0).integers(0, 64, (4, 32), np.int32)
    for model in mixtral.models(_SMALL, 64).values():
      trainer = mixtral.Trainer(model, 1e-2)
      first = trainer.step(tokens)
      for _ in range(10):
        last = trainer.step(tokens)
      self.assertLess(last, 0.9 * first)


def _state_dict(params: params_lib.Params) -> dict[str, np.ndarray]:
  """Our tensors under the names and in the layout of transformers 5."""
  p = {k: np.asarray(v) for k, v in params_lib.names(params).items()}
  out = {
      'model.embed_tokens.weight': p['embedding'],
      'model.norm.weight': p['norm'],
      'lm_head.weight': p['unembed'].T,
  }
  for i in range(p['layers/moe/norm'].shape[0]):
    at = f'model.layers.{i}.'
    a, m = 'layers/attention/', 'layers/moe/'
    embed = p['embedding'].shape[1]
    for name in ('wq', 'wk', 'wv'):
      w = p[a + name][i].reshape(embed, -1)
      out[f'{at}self_attn.{name[1]}_proj.weight'] = w.T
    out[f'{at}self_attn.o_proj.weight'] = p[a + 'wo'][i].reshape(-1, embed).T
    out[f'{at}input_layernorm.weight'] = p[a + 'norm'][i]
    out[f'{at}post_attention_layernorm.weight'] = p[m + 'norm'][i]
    out[f'{at}mlp.gate.weight'] = p[m + 'router'][i].T
    w_in = p[m + 'w_in'][i]  # [E D 2 F]
    out[f'{at}mlp.experts.gate_up_proj'] = w_in.reshape(
        *w_in.shape[:2], -1
    ).swapaxes(1, 2)
    out[f'{at}mlp.experts.down_proj'] = p[m + 'w_out'][i].swapaxes(1, 2)
  return out


if __name__ == '__main__':
  absltest.main()
