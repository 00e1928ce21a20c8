"""Messages have one normal form, whichever way they came."""

import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import pyarrow
from pyarrow import parquet
from tests import family_templates

from composer_jax.chat import compact_renderer
from composer_jax.chat import hub_files
from composer_jax.chat import messages
from composer_jax.data import inputs
from composer_jax.data import tokenization
from composer_jax.serving import api_errors
from composer_jax.serving import openai_requests

_GO = {'role': 'user', 'content': 'go'}
_OK = {'role': 'assistant', 'content': 'ok'}
_TOOLS = [
    {
        'type': 'function',
        'function': {
            'name': 'run',
            'description': None,
            'parameters': {
                'type': 'object',
                'properties': {'cmd': {'type': 'string', 'default': None}},
            },
        },
    }
]


def _called(arguments, content='', **more):
  function = {'name': 'run', 'arguments': arguments}
  calls = [{'type': 'function', 'function': function, **more}]
  return {'role': 'assistant', 'content': content, 'tool_calls': calls}


def _parts(*texts):
  return [{'type': 'text', 'text': text, 'image': None} for text in texts]


# Name -> rows that are the same conversation; the first is plain.
_SAME = {
    'tools': [
        {'messages': [_GO, _OK], 'tools': _TOOLS},
        {'messages': [_GO, _OK], 'tools': json.dumps(_TOOLS)},
        {'messages': [_GO, _OK], 'tools': [*map(json.dumps, _TOOLS)]},
    ],
    'no tools': [
        {'messages': [_GO, _OK]},
        {'messages': [_GO, _OK], 'tools': None},
        {'messages': [_GO, _OK], 'tools': 'null'},
        {'messages': [_GO, _OK], 'tools': '[]'},
    ],
    'parts': [
        {'messages': [{'role': 'user', 'content': 'a\nb'}, _OK]},
        {'messages': [{'role': 'user', 'content': _parts('a', 'b')}]
         + [{'role': 'assistant', 'content': _parts('ok')}]},
    ],
    'null content': [
        {'messages': [_GO, _called('{"cmd": "x"}'), {'role': 'tool', 'content': ''}, _OK]},
        {'messages': [_GO, _called('{"cmd": "x"}', None), {'role': 'tool', 'content': None}, _OK]},
        {'messages': [_GO, _called({'cmd': 'x', 'path': None}, None), {'role': 'tool'}, _OK]},
    ],
    'arguments': [
        {'messages': [_GO, _called('{}')]},
        {'messages': [_GO, _called(None)]},
        {'messages': [_GO, _called('')]},
        {'messages': [_GO, _called('{}', id=None)]},
    ],
    'developer': [
        {'messages': [{'role': 'system', 'content': 'Be brief.'}, _GO, _OK]},
        {'messages': [{'role': 'developer', 'content': 'Be brief.'}, _GO, _OK]},
    ],
}  # fmt: skip
_REFUSED = {
    'tools': {'tools': 'run'},
    'tools ': {'tools': ['{']},
    'tools  ': {'tools': {'name': 'run'}},
    'messages.role': {'messages': [{'role': 'human', 'content': 'x'}, _OK]},
    'messages.role ': {'messages': [{'content': 'x'}, _OK]},
    'messages.content': {
        'messages': [{'role': 'user', 'content': [{'type': 'image'}]}]
    },
    'messages.tool_calls': {'messages': [_GO, _called('{"cmd": ')]},
    'messages.tool_calls ': {'messages': [_GO, _called('[1]')]},
    'messages.tool_calls  ': {
        'messages': [_GO, {'role': 'assistant', 'tool_calls': ['run']}]
    },
}


class NormalFormTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def _tokenizer(self, family):
    folder = self.folder / 'model'
    folder.mkdir()
    if family == 'own':
      made = compact_renderer.train_tokenizer(['def f(x):'], 400)
      made.save(str(folder / 'tokenizer.json'))
      return str(folder / 'tokenizer.json')
    template, stop = family_templates.FAMILIES[family]
    source = family_templates.tokenizer().to_str()
    for name, text in hub_files.write(source, template, [stop], {}).items():
      (folder / name).write_text(text)
    return str(folder)

  def _rows(self, encoder, path):
    file = inputs.File(path.name, path, path.stat().st_size)
    found = encoder([*inputs.records(file, 'messages', 0)])
    return [[d.ids.tolist() for d in documents] for _, documents in found]

  def _lines(self, rows):
    path = self.folder / 'in.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path

  def _parquet(self, row):
    path = self.folder / 'in.parquet'
    table = pyarrow.Table.from_pylist([row])
    parquet.write_table(table, path)
    return path

  @parameterized.product(name=[*_SAME], family=['own', 'qwen'])
  def test_the_same_tokens_all_ways(self, name, family):
    encoder = tokenization.open_encoder(
        self._tokenizer(family), 'messages', None
    )
    rows = _SAME[name]
    want, *others = self._rows(encoder, self._lines(rows))
    self.assertTrue(want)
    for other in others:
      self.assertEqual(other, want)
    for row in rows:
      self.assertEqual(self._rows(encoder, self._parquet(row)), [want])
      ask = self._ask(row)
      form = encoder.chats
      last = len(ask.messages) - 1
      prompt, reply = form.turn(ask.messages, ask.tools, last)
      self.assertEqual(prompt + reply, want[-1])

  def _ask(self, row):
    body = {k: v for k, v in row.items() if v is not None}
    return openai_requests.parse({'model': 'm', **body}, chat=True, train=False)

  @parameterized.named_parameters((k, k) for k in _REFUSED)
  def test_what_is_not_understood_is_refused_all_ways(self, name):
    row = {'messages': [_GO, _OK], **_REFUSED[name]}
    field = name.strip()
    encoder = tokenization.open_encoder(
        self._tokenizer('own'), 'messages', None
    )
    for path in (self._lines([row]), self._parquet(row)):
      with self.assertRaisesRegex(ValueError, f'^{path.name}:1: .*{field}='):
        self._rows(encoder, path)
    with self.assertRaises(api_errors.ApiError) as e:
      self._ask(row)
    self.assertEqual(e.exception.body['error']['param'], field)

  @parameterized.parameters('\ud800', float('nan'))
  def test_what_is_no_json_text_is_refused(self, value):
    row = {'messages': [{**_GO, 'name': value}, _OK]}
    encoder = tokenization.open_encoder(
        self._tokenizer('own'), 'messages', None
    )
    with self.assertRaisesRegex(ValueError, '^in.jsonl:1: .*messages='):
      self._rows(encoder, self._lines([row]))
    with self.assertRaisesRegex(messages.FieldError, 'tools='):
      messages.tools([value])

  def test_a_deep_value_is_refused(self):
    deep = json.loads('[' * 900 + ']' * 900)
    for _ in range(200):
      deep = [deep]
    for text in (deep, '[' * 100_000):
      with self.assertRaises(messages.FieldError):
        messages.tools(text)


if __name__ == '__main__':
  absltest.main()
