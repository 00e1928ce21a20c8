"""Published models: parity with transformers both ways, and bad folders."""

import dataclasses
import json
import pathlib
import tracemalloc
import unittest
import warnings

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tests import fresh
from tests import hub_configs
from safetensors import numpy as safetensors_numpy

from composer_jax import config
from composer_jax import rope
from composer_jax.model import decode
from composer_jax.model import families
from composer_jax.model import hf
from composer_jax.model import params as params_lib
from composer_jax.model import transformer
from kernels_triton import contract

try:
  import torch
  import transformers
except ModuleNotFoundError:
  torch = None

_COMMON = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
)
_YARN = {
    'rope_type': 'yarn',
    'rope_theta': 10_000.0,
    'factor': 4.0,
    'original_max_position_embeddings': 32,
}
_LATENT = {
    'num_hidden_layers': 3,
    'num_key_value_heads': 4,
    'head_dim': 6,
    'q_lora_rank': 20,
    'kv_lora_rank': 16,
    'qk_nope_head_dim': 8,
    'qk_rope_head_dim': 6,
    'v_head_dim': 10,
    'first_k_dense_replace': 1,
    'n_routed_experts': 12,
    'num_experts_per_tok': 4,
    'n_shared_experts': 2,
    'moe_intermediate_size': 16,
    'n_group': 4,
    'topk_group': 2,
}
# Name of the model, and a remark -> what is special about its config.
_FAMILIES = {
    'Llama': {
        'rope_parameters': {
            'rope_type': 'llama3',
            'rope_theta': 10_000.0,
            'factor': 8.0,
            'low_freq_factor': 1.0,
            'high_freq_factor': 4.0,
            'original_max_position_embeddings': 32,
        }
    },
    'Qwen2': {
        'tie_word_embeddings': True,
        'rope_parameters': _YARN | {'truncate': False, 'attention_factor': 1.3},
    },
    'Qwen3': {},
    'DeepseekV3': _LATENT
    | {
        'rope_parameters': _YARN
        | {'mscale': 1.0, 'mscale_all_dim': 0.7, 'beta_fast': 8.0}
    },
    'DeepseekV3 plain': _LATENT
    | {
        'q_lora_rank': None,
        'n_group': 1,
        'topk_group': 1,
        'first_k_dense_replace': 0,
        'norm_topk_prob': False,
        'num_hidden_layers': 2,
    },
    'Mixtral': {'num_local_experts': 4, 'num_experts_per_tok': 2},
    'Qwen2Moe': {
        'num_experts': 6,
        'num_experts_per_tok': 3,
        'moe_intermediate_size': 16,
        'shared_expert_intermediate_size': 32,
        'norm_topk_prob': False,
    },
    'Qwen3Moe': {
        'num_experts': 8,
        'num_experts_per_tok': 4,
        'moe_intermediate_size': 16,
        'norm_topk_prob': True,
    },
}
_TOKENS = 32  # a key block: rows of one shape for all families
_PROMPT, _SAMPLED = 16, 64


def _kind(name):
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # what transformers imports is its affair
    return getattr(transformers, name)


def _torch_model(name):
  torch.manual_seed(0)
  cfg = _kind(f'{name.split()[0]}Config')(**_COMMON | _FAMILIES[name])
  model = _kind(f'{name.split()[0]}ForCausalLM')(cfg).eval()
  with torch.no_grad():
    for key, p in model.named_parameters():
      if 'norm' in key or key.endswith('bias'):
        p.add_(0.3 * torch.randn_like(p))
      else:
        p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5)
    for p in _biases(model):
      p.copy_(0.1 * torch.randn_like(p))
  return model


def _biases(model):
  """What chooses experts and is no parameter."""
  return [b for k, b in model.named_buffers() if 'correction_bias' in k]


def _record_choices(model):
  """Returns a list that a forward appends every MoE layer's choice to."""
  chosen = []
  for name, module in model.named_modules():
    if name.endswith('mlp.gate') and _biases(model):
      module.register_forward_hook(
          lambda _, __, out: chosen.append(out[2].numpy())
      )
  return chosen


def _greedy(params, cfg, prompt):
  """Ids i32 [_SAMPLED] after the prompt, from the decoder's own cache."""
  length = len(prompt) + _SAMPLED
  width = -(-length // contract.KEY_BLOCK)
  table = jnp.arange(width, dtype=jnp.int32)[None]

  @jax.jit
  def run(params, prompt):
    def step(carry, at):
      pages, last = carry
      fed = jnp.where(at < prompt.size, prompt[at % prompt.size], last)
      logps, pages, _ = decode.step(
          params, pages, fed[None], at[None], table, cfg=cfg
      )
      best = jnp.argmax(logps[0]).astype(jnp.int32)
      return (pages, best), best

    start = decode.init_pages(cfg, width), jnp.int32(0)
    return jax.lax.scan(step, start, jnp.arange(length - 1))[1]

  return np.asarray(run(params, jnp.asarray(prompt)))[len(prompt) - 1 :]


def _ours(params, cfg, tokens, recorded=None):
  """(log-probs of the next token [T V], routing [T L K])."""
  shape = tokens[None].shape
  out = transformer.forward(
      params,
      jnp.asarray(tokens[None]),
      jnp.ones(shape, jnp.int32),
      jnp.arange(shape[1], dtype=jnp.int32)[None],
      cfg=cfg,
      routing=recorded,
  )
  normed = out.hidden[0].astype(jnp.float32)
  scale = jnp.sqrt(jnp.mean(normed**2, -1, keepdims=True) + cfg.norm_eps)
  logits = normed / scale * params.norm[None] @ params.head
  return jax.nn.log_softmax(logits, axis=-1), out.routing[0]


@unittest.skipIf(torch is None, 'needs the extra "peers"')
class ParityTest(parameterized.TestCase):

  @parameterized.parameters(*_FAMILIES)
  def test_same_model_both_ways(self, name):
    model = _torch_model(name)
    folder = pathlib.Path(self.create_tempdir().full_path)
    model.save_pretrained(folder / 'theirs')
    fields = hf.read_config(folder / 'theirs')
    cfg = families.to_config(fields)
    named = hf.load(folder / 'theirs', cfg, np.float32)
    params = params_lib.from_names(jax.tree.map(jnp.asarray, named))
    tokens = np.random.default_rng(0).integers(0, cfg.vocab, _TOKENS, np.int32)
    target = np.roll(tokens, -1)

    def loss(params):
      logps, routing = _ours(params, cfg, tokens)
      rows = jnp.arange(_TOKENS - 1)
      return -logps[rows, target[:-1]].mean(), (logps, routing)

    (value, (logps, routing)), grads = jax.jit(
        jax.value_and_grad(loss, has_aux=True)
    )(params)
    batch = torch.tensor(tokens[None].astype(np.int64))
    choices = _record_choices(model)
    more = {}
    if cfg.router == 'softmax' and cfg.experts:
      more = {'output_router_logits': True}
    out = model(batch, labels=batch, **more)
    want = torch.log_softmax(out.logits[0].detach(), -1).numpy()
    np.testing.assert_allclose(np.asarray(logps), want, rtol=0, atol=1e-4)
    if more:
      choices = [
          scores.detach().topk(cfg.top_k).indices.numpy()
          for scores in out.router_logits
      ]
    self.assertLen(choices, cfg.moe_layers * (cfg.experts > 0))
    for layer, best in enumerate(choices):
      np.testing.assert_array_equal(
          np.sort(np.asarray(routing[:, layer]), axis=1), np.sort(best, axis=1)
      )
    prompt = batch[:, :_PROMPT]
    text = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=_SAMPLED,
        eos_token_id=None,
        pad_token_id=0,
    )
    np.testing.assert_array_equal(
        _greedy(params, cfg, tokens[:_PROMPT]), text[0, _PROMPT:].numpy()
    )
    model.zero_grad()
    torch.nn.functional.cross_entropy(
        out.logits[0, :-1], batch[0, 1:]
    ).backward()
    self._compare_gradients(cfg, model, grads, folder)

    # The way back, in several files.
    hf.save(folder / 'ours', cfg, named, {}, 128, shard_bytes=20_000)
    self.assertGreater(len([*(folder / 'ours').glob('*.safetensors')]), 1)
    back = (
        _kind(f'{name.split()[0]}ForCausalLM')
        .from_pretrained(folder / 'ours', dtype=torch.float32)
        .eval()
    )
    with torch.no_grad():
      np.testing.assert_array_equal(
          back(batch).logits.numpy(), out.logits.detach().numpy()
      )
    self.assertEqual(families.to_config(hf.read_config(folder / 'ours')), cfg)

  def _compare_gradients(self, cfg, model, grads, folder):
    """Of every tensor, by way of a file in the family's own form."""
    with torch.no_grad():
      for p in model.parameters():
        p.copy_(p.grad if p.grad is not None else torch.zeros_like(p))
      for b in _biases(model):
        b.zero_()
    model.save_pretrained(folder / 'gradients')
    want = hf.load(folder / 'gradients', cfg, np.float32)
    for key, got in params_lib.names(grads).items():
      np.testing.assert_allclose(
          np.asarray(got), want[key], rtol=0, atol=1e-4, err_msg=key
      )


_SMALL = config.ModelConfig(
    vocab=64,
    layers=1,
    embed=16,
    q_heads=2,
    kv_heads=1,
    head_dim=8,
    experts=4,
    moe_ffn=16,
)


class FolderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / 'model'
    params = params_lib.publish_dtype(fresh.params(_SMALL))
    self.named = {k: np.asarray(v) for k, v in params_lib.names(params).items()}

  def _save(self, **changes):
    hf.save(self.folder, _SMALL, self.named, {'a.txt': 'b'}, 64, **changes)

  @parameterized.parameters(2000, 1 << 30)
  def test_round_trip_is_exact(self, shard_bytes):
    self._save(shard_bytes=shard_bytes)
    read = []
    found = hf.load(self.folder, _SMALL, read=read.append)
    self.assertEqual(found.keys(), self.named.keys())
    for name, want in self.named.items():
      self.assertEqual(found[name].dtype, ml_dtypes.bfloat16)
      self.assertEqual(found[name].tobytes(), want.tobytes(), name)
    self.assertEqual(sum(read), params_lib.count(_SMALL)[0])
    self.assertEqual((self.folder / 'a.txt').read_text(), 'b\n')

  @hypothesis.given(st.data())
  def test_any_part_is_that_part_of_the_whole(self, data):
    if not self.folder.exists():
      self._save(shard_bytes=2000)
    with hf.Reader(self.folder, _SMALL) as reader:
      name = data.draw(st.sampled_from(sorted(reader.shapes)))
      index = []
      for size in reader.shapes[name]:
        first = data.draw(st.integers(0, size - 1))
        index.append(slice(first, data.draw(st.integers(first + 1, size))))
      part = reader.part(name, tuple(index))
    want = self.named[name][tuple(index)]
    self.assertEqual(part.shape, want.shape)
    self.assertEqual(part.tobytes(), want.tobytes())

  def test_onto_a_mesh(self):
    self._save()
    mesh = jax.sharding.Mesh(
        np.asarray(jax.devices()).reshape(2, 2), ('a', 'b')
    )
    rules = {'embed': 'a', 'experts': 'b', 'vocab': 'b', 'layers': None}
    shardings = jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec),
        params_lib.pspecs(params_lib.abstract(_SMALL), rules),
    )
    params = hf.load_sharded(self.folder, _SMALL, shardings, jnp.bfloat16)
    for name, leaf in params_lib.names(params).items():
      self.assertEqual(np.asarray(leaf).tobytes(), self.named[name].tobytes())
    w_in = params.layers.moe.w_in
    self.assertEqual(w_in.sharding, shardings.layers.moe.w_in)
    self.assertEqual(w_in.addressable_shards[0].data.size * 4, w_in.size)

  def test_a_part_needs_the_memory_of_a_part(self):
    cfg = dataclasses.replace(_SMALL, experts=64, embed=256, moe_ffn=512)
    named = {
        name: np.zeros(leaf.shape, ml_dtypes.bfloat16)
        for name, leaf in params_lib.names(params_lib.abstract(cfg)).items()
    }
    hf.save(self.folder, cfg, named, {}, 64)
    whole = named['layers/moe/w_in'].nbytes
    index = (slice(None), slice(8, 16), slice(0, 128), slice(None), slice(None))
    with hf.Reader(self.folder, cfg) as reader:
      tracemalloc.start()
      part = reader.part('layers/moe/w_in', index)
      peak = tracemalloc.get_traced_memory()[1]
      tracemalloc.stop()
    self.assertEqual(part.nbytes * 16, whole)
    one = whole // cfg.experts
    self.assertLess(peak, part.nbytes + one)

  def test_never_overwrites_and_leaves_nothing_behind(self):
    self._save()
    with self.assertRaisesRegex(ValueError, 'exists'):
      self._save()
    del self.named['norm']
    self.folder = self.folder.with_name('other')
    with self.assertRaises(KeyError):
      self._save()
    self.assertEqual([p.name for p in self.folder.parent.iterdir()], ['model'])

  def test_all_that_is_wrong_is_said_at_once(self):
    self._save()
    wide = dataclasses.replace(_SMALL, layers=2, moe_ffn=32)
    with self.assertRaisesRegex(
        ValueError, r'missing 19: .*layers\.1.*; of another shape 12: .*want'
    ):
      hf.load(self.folder, wide)
    one = dataclasses.replace(_SMALL, experts=3)
    with self.assertRaisesRegex(ValueError, r'unexpected 3: .*experts\.3\.w1'):
      hf.load(self.folder, one)

  def test_a_cut_or_missing_file_is_named(self):
    self._save(shard_bytes=4000)
    last = sorted(self.folder.glob('*.safetensors'))[-1]
    last.write_bytes(last.read_bytes()[:-10])
    with self.assertRaisesRegex(ValueError, f'{last.name}: missing or damaged'):
      hf.load(self.folder, _SMALL)
    last.unlink()
    with self.assertRaisesRegex(ValueError, f'{last.name}: missing or damaged'):
      hf.load(self.folder, _SMALL)
    with self.assertRaisesRegex(ValueError, 'name a folder of a model'):
      hf.read_config(self.folder / 'nothing')

  def test_weights_that_are_no_numbers_are_refused(self):
    for value in (np.nan, np.inf):
      self.folder = self.folder.with_name(str(value))
      self.named['norm'] = np.full_like(self.named['norm'], value)
      self._save()
      with self.assertRaisesRegex(ValueError, 'model.norm.weight holds NaN or'):
        hf.load(self.folder, _SMALL)

  @parameterized.parameters(
      ('{', 'no JSON'),
      ('{}', 'has no weight_map'),
      ('[]', 'has no weight_map'),
      ('{"weight_map": {}}', 'is no file name'),
      ('{"weight_map": {"a": "../b"}}', 'is no file name'),
      ('{"weight_map": {"a": 3}}', 'is no file name'),
  )
  def test_a_bad_index_is_named(self, text, part):
    self._save()
    index = 'model.safetensors.index.json'
    (self.folder / index).write_text(text)
    with self.assertRaisesRegex(ValueError, f'{index}: .*{part}'):
      hf.load(self.folder, _SMALL)

  def test_a_tensor_that_is_there_twice_is_refused(self):
    self._save()
    path = self.folder / 'model.safetensors'
    tensors = safetensors_numpy.load_file(path)
    one = {'model.norm.weight': tensors['model.norm.weight'] * 2}
    safetensors_numpy.save_file(one, self.folder / 'b.safetensors')
    files = dict.fromkeys(tensors, path.name) | {'x': 'b.safetensors'}
    index = self.folder / 'model.safetensors.index.json'
    index.write_text(json.dumps({'weight_map': files}))
    with self.assertRaisesRegex(ValueError, 'another file has model.norm'):
      hf.load(self.folder, _SMALL)

  def test_a_head_beside_tied_embeddings_must_be_the_same(self):
    cfg = dataclasses.replace(_SMALL, tied=True)
    named = {k: v for k, v in self.named.items() if k != 'unembed'}
    hf.save(self.folder, cfg, named, {}, 64)
    path = self.folder / 'model.safetensors'
    tensors = safetensors_numpy.load_file(path)
    head = tensors['model.embed_tokens.weight']
    for other, refused in ((head, False), (head * 2, True)):
      tensors['lm_head.weight'] = other
      safetensors_numpy.save_file(tensors, path)
      if not refused:
        hf.load(self.folder, cfg)
        continue
      with self.assertRaisesRegex(ValueError, 'lm_head.weight is not'):
        hf.load(self.folder, cfg)

  @parameterized.parameters(
      ({'model_type': 'gpt2'}, "model_type='gpt2'; must be one of llama"),
      ({'hidden_act': 'gelu'}, "hidden_act='gelu' is not supported"),
      ({'rope_scaling': {'type': 'linear'}}, "rope_type='linear'.*'yarn'"),
      (
          {'rope_scaling': {'type': 'yarn', 'factor': 0.5}},
          'Yarn.factor=0.5: must be at least 1',
      ),
      ({'quantization_config': {'quant_method': 'fp8'}}, "'fp8'.*convert"),
      ({'topk_method': 'greedy'}, "topk_method='greedy'.*only 'noaux_tc'"),
      ({'mlp_only_layers': [0]}, r'mlp_only_layers=\[0\] is not supported'),
      ({'hidden_size': None}, 'has no hidden_size'),
      ({'num_hidden_layers': '2'}, "num_hidden_layers='2': want an integer"),
      ({'vocab_size': 0}, 'vocab_size=0: want an integer above 0'),
      ({'max_position_embeddings': 0}, 'max_position_embeddings=0: want'),
      ({'rope_theta': '1e4'}, "rope_theta='1e4': want a number"),
      ({'layer_types': ['sliding_attention']}, 'layer_types: only'),
      ({'rope_local_base_freq': 1e4}, 'rope_local_base_freq=10000.0 is not'),
      (
          {
              'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e4},
              'rope_scaling': {'type': 'yarn', 'factor': 4.0},
          },
          'rope_parameters and rope_scaling differ; remove one',
      ),
      (
          {'rope_parameters': {'full_attention': {'rope_theta': 1e6}}},
          'only one object of numbers for all layers',
      ),
      (
          {'rope_theta': 1e4, 'rope_parameters': {'rope_theta': 1e6}},
          'rope_theta=10000.0, but 1000000.0 beside rope_type',
      ),
      (
          {
              'rope_scaling': {
                  'type': 'yarn',
                  'factor': 4.0,
                  'low_freq_factor': 1,
              }
          },
          "rope_type='yarn' does not use low_freq_factor",
      ),
      (
          {'rope_scaling': {'type': 'default', 'mrope_section': 3}},
          "rope_type='default' does not use mrope_section",
      ),
      ({'rope_scaling': {'type': 'yarn', 'factor': '4'}}, "factor='4': want"),
  )
  def test_what_is_not_understood_is_refused(self, change, text):
    fields = {**_COMMON, 'model_type': 'qwen3', **change}
    with self.assertRaisesRegex(ValueError, text):
      families.to_config(json.loads(json.dumps(fields)))

  @parameterized.parameters(
      ('kimi_k2', {}, 1_026_408_232_448, 32_861_500_928),
      (
          'deepseek_v3',
          {
              'first_k_dense_replace': 3,
              'num_attention_heads': 128,
              'n_routed_experts': 256,
              'n_group': 8,
              'topk_group': 4,
              'vocab_size': 129_280,
          },
          671_026_419_200,
          37_552_297_472,
      ),
  )
  def test_configs_of_the_hub(self, kind, changes, total, active):
    fields = {**hub_configs.KIMI_K2, **changes, 'model_type': kind}
    cfg = families.to_config(fields)
    self.assertEqual(params_lib.count(cfg), (total, active))
    self.assertEqual(
        cfg.rope_scaling, rope.Yarn(32.0, 4096, 1.0, 1.0, True, 1, 1)
    )
    back = families.to_fields(cfg, 4096)
    self.assertEqual(families.to_config(json.loads(json.dumps(back))), cfg)

  def test_layers_that_predict_further_tokens_are_left_out(self):
    latent = dict(rope_dim=2, value_dim=4, router='sigmoid')
    cfg = dataclasses.replace(_SMALL, kv_latent=8, **latent)
    named = params_lib.names(fresh.params(cfg))
    named = {k: np.asarray(v) for k, v in named.items()}
    hf.save(self.folder, cfg, named, {}, 64)
    path = self.folder / 'model.safetensors'
    tensors = safetensors_numpy.load_file(path)
    tensors['model.layers.1.eh_proj.weight'] = np.zeros((2, 2), np.float32)
    safetensors_numpy.save_file(tensors, path)
    found = hf.load(self.folder, cfg, np.float32)
    for name, want in named.items():
      np.testing.assert_array_equal(found[name], want, name)
    del tensors['model.layers.1.eh_proj.weight']
    tensors['model.layers.1.mlp.x'] = np.zeros((2, 2), np.float32)
    safetensors_numpy.save_file(tensors, path)
    with self.assertRaisesRegex(ValueError, r'unexpected 1: .*1\.mlp\.x'):
      hf.load(self.folder, cfg, np.float32)
    del tensors['model.layers.1.mlp.x']
    tensors['model.layers.0.eh_proj.weight'] = np.zeros((2, 2), np.float32)
    safetensors_numpy.save_file(tensors, path)
    with self.assertRaisesRegex(ValueError, r'unexpected 1: .*0\.eh_proj'):
      hf.load(self.folder, cfg, np.float32)

  def test_the_bias_that_chooses_stays_f32(self):
    latent = dict(rope_dim=2, value_dim=4, router='sigmoid')
    cfg = dataclasses.replace(_SMALL, kv_latent=8, **latent)
    params = fresh.params(cfg)
    bias = jnp.full_like(params.layers.moe.bias, 12.3456789)
    moe = params.layers.moe.replace(bias=bias)
    params = params.replace(layers=params.layers.replace(moe=moe))
    named = params_lib.names(params_lib.publish_dtype(params))
    hf.save(self.folder, cfg, named, {}, 64)
    found = hf.load(self.folder, cfg)
    np.testing.assert_array_equal(found['layers/moe/bias'], bias)

  def test_a_model_without_a_family_is_refused(self):
    odd = dataclasses.replace(_SMALL, router='sigmoid')
    with self.assertRaisesRegex(ValueError, 'no published family'):
      families.family_of(odd)
    self.assertEqual(families.family_of(_SMALL), 'mixtral')


if __name__ == '__main__':
  absltest.main()
