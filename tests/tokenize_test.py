"""Token shards: exact ids and masks, resume after kill -9, what is refused."""

import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pyarrow
from pyarrow import parquet
import tokenizers

from composer_jax import config
from composer_jax.chat import compact_renderer
from composer_jax.chat import hub_files
from composer_jax.chat import template
from composer_jax.data import corpus
from composer_jax.data import inputs
from composer_jax.data import shards
from composer_jax.data import stream
from composer_jax.data import tokenization
from tests import small_run

_TEXTS = [
    f'def f{i}(x):\n  return x + {i} # né\n' * (1 + i % 5) for i in range(200)
]
_CHATS = [
    {
        'messages': [
            {'role': 'system', 'content': 'Be brief.'},
            {'role': 'user', 'content': f'What is {i} + 1?'},
            {'role': 'assistant', 'content': f'It is {i + 1}'},
            {'role': 'user', 'content': 'Say <|end|>.'},
            {'role': 'assistant', 'content': 'No: <|end|> ends.'},
        ]
    }
    for i in range(40)
]
# Drops what an earlier reply said before its last word, as templates that strip
# thoughts do.
_FORGETFUL = """
{%- for m in messages %}
  {%- if m.role == 'assistant' and not loop.last %}
    {{- '<|act|>' ~ m.content.split(' ')[-1] ~ '<|end|>' }}
  {%- elif m.role == 'assistant' %}
    {{- '<|act|>' ~ m.content ~ '<|end|>' }}
  {%- else %}
    {{- '<|task|>' ~ m.content }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|act|>' }}
{%- endif %}
"""


def _digest(folder: pathlib.Path) -> dict[str, str]:
  return {
      p.name: hashlib.sha256(p.read_bytes()).hexdigest()
      for p in sorted(folder.iterdir())
      if p.is_file()
  }


class TokenizeTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.tokenizer = compact_renderer.train_tokenizer(_TEXTS, 384)

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.tokenizer_path = self.folder / 'tokenizer.json'
    self.tokenizer.save(str(self.tokenizer_path))

  def _jsonl(self, rows, name='in.jsonl') -> str:
    path = self.folder / name
    path.write_text(''.join(json.dumps(r) + '\n' for r in rows))
    return str(path)

  def _texts(self) -> str:
    return self._jsonl([{'text': t} for t in _TEXTS])

  def _make(
      self,
      *paths,
      out='out',
      field='text',
      tokenizer=None,
      dtype=None,
      heldout=0.1,
      shard_tokens=1 << 20,
  ) -> pathlib.Path:
    files = inputs.find(paths, '.py')
    tokenizer = str(tokenizer or self.tokenizer_path)
    encoder = tokenization.open_encoder(tokenizer, field, None)
    header = tokenization.header(encoder, files, dtype, heldout, shard_tokens)
    output = self.folder / out
    writer = shards.ShardWriter(output, header, encoder.source)
    tokenization.run(files, encoder, writer, lambda *_, **__: None)
    return output

  def _open(self, output, **kwargs) -> shards.Shards:
    return shards.Shards(config.ShardsConfig('x', str(output), **kwargs))

  def _documents(self, tokens: stream.Tokens):
    spans = zip(tokens.starts[:-1], tokens.starts[1:], strict=True)
    return [tokens.document(int(b), int(e)) for b, e in spans]

  def test_equals_the_corpus_that_is_encoded_in_memory(self):
    made = self._open(self._make(self._texts(), shard_tokens=1))
    names = [f'in.jsonl:{i}' for i in range(1, len(_TEXTS) + 1)]
    for side, tokens in ((False, made.train()), (True, made.heldout())):
      want = corpus.encode(
          [
              corpus.Document(n, t)
              for n, t in zip(names, _TEXTS, strict=True)
              if corpus.is_heldout(n, 0.1) == side
          ],
          self.tokenizer,
          start=self.tokenizer.token_to_id(compact_renderer.BOS),
      )
      self.assertGreater(len(want.starts), 5)
      np.testing.assert_array_equal(tokens.starts, want.starts)
      self.assertEqual(tokens.utf8_bytes, want.utf8_bytes)
      got = np.concatenate([d.tokens for d in self._documents(tokens)])
      np.testing.assert_array_equal(got, want.ids)
    raw = np.fromfile(self.folder / 'out/00000.train.ids', '<u2')
    np.testing.assert_array_equal(raw[:9], self._first(made.train(), 9))

  def _first(self, tokens, count):
    return np.concatenate([d.tokens for d in self._documents(tokens)])[:count]

  def test_every_input_gives_the_same_tokens(self):
    column = pyarrow.table({'text': _TEXTS})
    parquet.write_table(column, self.folder / 'in.parquet', row_group_size=7)
    texts = self.folder / 'texts'
    for i, text in enumerate(_TEXTS):
      path = texts / f'd{i % 3}' / f'{i:03}.py'
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(text.encode())
    (texts / 'd0' / 'binary.py').write_bytes(b'\xff\xfe')
    (texts / 'd0' / 'notes.txt').write_text('not code')

    def all_of(path, out):
      made = self._open(self._make(str(path), out=out))
      documents = self._documents(made.train())
      documents += self._documents(made.heldout())
      return sorted(d.tokens.tobytes() for d in documents)

    want = all_of(self._texts(), 'a')
    self.assertEqual(all_of(self.folder / 'in.parquet', 'b'), want)
    self.assertEqual(all_of(texts, 'c'), want)

  def test_shards_do_not_change_what_is_read(self):
    one = self._open(self._make(self._texts(), out='one'))
    many = self._make(self._texts(), self._texts(), out='many', shard_tokens=9)
    # Two inputs of 200 records: a shard ends where a batch does.
    self.assertTrue((many / '00000.train.ids').exists())
    source = stream.Stream(one.train(), 32, 8, seed=0)
    other = stream.Stream(self._open(many).train(), 32, 8, seed=0)
    self.assertEqual(len(other), 2 * len(source))
    chunks, _ = other.next(stream.Cursor(), 4)
    self.assertGreater(sum(map(len, chunks)), 64)
    self.assertNotEqual(source.digest, other.digest)

  def test_heldout_is_capped_by_whole_documents(self):
    output = self._make(self._texts())
    whole = self._open(output).heldout()
    some = self._open(output, heldout_bytes=300).heldout()
    self.assertBetween(some.utf8_bytes, 1, 300)
    self.assertLess(len(some.starts), len(whole.starts))
    self.assertEqual(
        self._open(output, heldout_bytes=0).heldout().utf8_bytes, 0
    )

  def test_killed_anywhere_it_continues_to_the_same_bytes(self):
    rows = [{'text': t} for t in _TEXTS * 60]
    command = [
        sys.executable, '-m', 'experiments.tokenize',
        f'--input={self._jsonl(rows)}',
        f'--tokenizer={self.tokenizer_path}', '--shard_tokens=9000',
    ]  # fmt: skip

    def start(out):
      return subprocess.Popen(
          [*command, f'--output={self.folder / out}'],
          cwd=small_run.ROOT,
          env=os.environ | {'RAYON_NUM_THREADS': '1'},
          stdout=subprocess.DEVNULL,
      )

    self.assertEqual(start('whole').wait(600), 0)
    shard = self.folder / 'killed' / '00003.train.ids'
    process = start('killed')
    while process.poll() is None and not shard.exists():
      time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    index = json.loads((self.folder / 'killed/index.json').read_text())
    self.assertFalse(index['complete'])
    with self.assertRaisesRegex(ValueError, 'incomplete; run'):
      self._open(self.folder / 'killed')
    self.assertEqual(start('killed').wait(600), 0)
    found = _digest(self.folder / 'killed')
    found = {k: v for k, v in found.items() if not k.endswith('.part')}
    self.assertEqual(found, _digest(self.folder / 'whole'))
    self.assertEqual(start('whole').wait(600), 0)  # nothing left to do

  def test_chats_train_replies_alone_with_exact_ids(self):
    output = self._make(self._jsonl(_CHATS), field='messages', heldout=0.0)
    made = self._open(output).train()
    documents = self._documents(made)
    self.assertLen(documents, len(_CHATS))
    form = template.compact(self.tokenizer)
    for row, document in zip(_CHATS, documents, strict=True):
      messages = row['messages']
      prompt = form.prompt(messages[:4])
      ids = document.tokens.tolist()
      self.assertEqual(ids[: len(prompt)], prompt)
      trained = document.tokens[document.sampled].tolist()
      (stop,) = form.stop_ids
      replies = [m['content'] for m in messages if m['role'] == 'assistant']
      want = [form.encode(r) + [stop] for r in replies]
      self.assertEqual(trained, want[0] + want[1])
      # Content that spells the stop token does not hold it.
      self.assertEqual(trained.count(stop), 2)
    size = sum(
        len(m['content'])
        for row in _CHATS
        for m in row['messages']
        if m['role'] == 'assistant'
    )
    self.assertEqual(made.utf8_bytes, size)

  def test_a_template_that_forgets_gets_every_reply_in_its_own_context(self):
    folder = self.folder / 'model'
    folder.mkdir()
    source = self.tokenizer.to_str()
    files = hub_files.write(source, _FORGETFUL, ['<|end|>'], {})
    for name, text in files.items():
      (folder / name).write_text(text)
    output = self._make(
        self._jsonl(_CHATS[:1]), field='messages', tokenizer=folder, heldout=0.0
    )
    first, second = self._documents(self._open(output).train())
    form = template.ChatFormat(self.tokenizer, _FORGETFUL, ['<|end|>'])
    messages = _CHATS[0]['messages']
    for document, at in ((first, 2), (second, 4)):
      prompt = form.prompt(messages[:at])
      self.assertEqual(document.tokens[: len(prompt)].tolist(), prompt)
      self.assertFalse(document.sampled[: len(prompt)].any())
      self.assertTrue(document.sampled[len(prompt) :].all())

  def test_wide_ids(self):
    output = self._make(self._texts(), dtype='uint32')
    raw = np.fromfile(output / '00000.train.ids', '<u4')
    np.testing.assert_array_equal(
        raw[:9], self._first(self._open(output).train(), 9)
    )

  @parameterized.named_parameters(
      ('folder', dict(path='/nowhere'), '/nowhere: no such file'),
      ('json', dict(path='bad.jsonl'), 'bad.jsonl:2: no JSON'),
      ('field', dict(path='other.jsonl'), "other.jsonl:1: no field 'text'"),
      ('type', dict(path='number.jsonl'), 'number.jsonl:1: text is int'),
      ('surrogate', dict(path='half.jsonl'), 'half.jsonl:1: text is no Unico'),
      ('empty', dict(path='empty.jsonl'), 'holds no document'),
      ('suffix', dict(path='.'), 'no .py file'),
      ('parquet', dict(path='bad.parquet'), 'no readable Parquet'),
      ('taken', dict(out='.'), 'holds no index.json'),
      ('roles', dict(path='roles.jsonl', field='messages'), 'messages.role='),
      ('tokenizer', dict(tokenizer='good.jsonl'), 'not a tokenizer'),
      ('ids', dict(tokenizer='wide.json', dtype='uint16'), 'has 65537 ids'),
      ('split', dict(heldout=1.0), 'heldout_fraction=1.0'),
  )
  def test_bad_input_is_refused_and_nothing_is_written(self, changes, part):
    self._bad_inputs()
    changes = {'path': 'good.jsonl', **changes}
    for name in ('path', 'tokenizer'):
      if name in changes:
        changes[name] = str(self.folder / changes[name])
    before = _digest(self.folder)
    with self.assertRaisesRegex(ValueError, part):
      self._make(changes.pop('path'), **changes)
    self.assertEqual(_digest(self.folder), before)

  def test_the_command_says_it_in_one_line(self):
    self._bad_inputs()
    for extra, part in (
        ('--input=bad.jsonl', 'bad.jsonl:2: no JSON'),
        ('--input=good.jsonl --start=<s>', '--start=<s>'),
    ):
      done = subprocess.run(
          [
              *(sys.executable, '-m', 'experiments.tokenize', '--output=out'),
              *(f'--tokenizer={self.tokenizer_path}', *extra.split()),
          ],
          cwd=self.folder,
          env=os.environ | {'PYTHONPATH': str(small_run.ROOT)},
          capture_output=True,
          text=True,
          check=False,
      )
      self.assertEqual(done.returncode, 2, done.stderr)
      self.assertLen(done.stderr.strip().splitlines(), 1, done.stderr)
      self.assertIn(part, done.stderr)
      self.assertFalse((self.folder / 'out').exists())

  def _bad_inputs(self):
    good = json.dumps({'text': 'x = 1'}) + '\n'
    for name, text in {
        'good.jsonl': good,
        'bad.jsonl': good + '{"text": \n',
        'other.jsonl': '{"content": "x"}\n',
        'number.jsonl': '{"text": 3}\n',
        'half.jsonl': '{"text": "\\ud800"}\n',
        'empty.jsonl': '\n{"text": ""}\n',
        'roles.jsonl': '{"messages": [{"content": "x"}]}\n',
        'bad.parquet': 'PAR0',
    }.items():
      (self.folder / name).write_text(text)
    vocab = {'<|bos|>': 0} | {f't{i}': i for i in range(1, 65537)}
    wide = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, 't1'))
    wide.save(str(self.folder / 'wide.json'))

  def test_other_settings_do_not_mix(self):
    self._make(self._texts())
    with self.assertRaisesRegex(ValueError, 'another heldout_fraction; choose'):
      self._make(self._texts(), heldout=0.2)
    self.tokenizer_path.write_text(
        compact_renderer.train_tokenizer(_TEXTS, 370).to_str()
    )
    with self.assertRaisesRegex(ValueError, 'another tokenizer'):
      self._make(self._texts())
    with self.assertRaisesRegex(ValueError, 'x.path=.*another tokenizer than'):
      self._open(self.folder / 'out').check(self.tokenizer_path)

  def test_damage_is_found_when_opened(self):
    output = self._make(self._texts())
    path = output / '00000.train.ids'
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    want = rf'train.ids: has {len(data) - 2} bytes, want {len(data)}'
    with self.assertRaisesRegex(ValueError, want):
      self._open(output)
    path.unlink()
    with self.assertRaisesRegex(ValueError, 'train.ids: missing'):
      self._open(output)
    with self.assertRaisesRegex(ValueError, 'holds no index.json'):
      self._open(self.folder)


if __name__ == '__main__':
  absltest.main()
