"""Tool calls: what a template writes is read as it was, and nothing else is."""

import functools
import json
import re

from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import assume
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from tests import family_templates

from composer_jax.agents import tools as tools_lib
from composer_jax.chat import chat_renderer
from composer_jax.chat import tool_calls

_READERS = ('JSON', 'XML', 'KIMI', 'LLAMA', 'MISTRAL', 'DEEPSEEK')
_DECLARED = {
    'text': {'type': 'string'},
    'more': {'anyOf': [{'type': 'string'}, {'type': 'null'}]},
    'count': {'type': 'integer'},
    'part': {'type': 'number'},
    'flag': {'type': 'boolean'},
    'none': {'anyOf': [{'type': 'integer'}, {'type': 'null'}]},
    'items': {'type': 'array'},
    'table': {'$ref': '#/$defs/Table'},
    'choice': {'enum': [1, 2, 3]},
}
_TOOLS = [
    {
        'type': 'function',
        'function': {
            'name': name,
            'parameters': {
                'type': 'object',
                'properties': _DECLARED,
                '$defs': {'Table': {'type': 'object'}},
            },
        },
    }
    for name in ('note', 'run_it')
]
_MARKS = (
    *('<tool_call>', '</tool_call>', '</parameter>', '</function>', '```'),
    *('<|tool_call_end|>', '<|tool_calls_section_end|>', '[TOOL_CALLS]'),
    *('<|tool_call_begin|>', '<｜tool▁call▁end｜>', '<|im_end|>', '<|eot_id|>'),
    *('<function=f>', '<parameter=x>', '<think>', '</think>', '; ', '}', '"'),
    *('\n', '\\', '{"name": "note", "arguments": {}}', 'null', '1', 'True'),
    *('é', ' ', '<', '日本', '\u2028'),
)
_TEXT = st.lists(st.sampled_from(_MARKS), max_size=6).map(''.join)
_TEXT |= st.text(st.characters(exclude_categories=['Cs', 'Co']), max_size=9)
_NUMBER = st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _NUMBER | _TEXT,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(_TEXT, x, max_size=3),
    max_leaves=6,
)
_VALUES = {
    'text': _TEXT,
    'more': _TEXT,
    'count': st.integers(),
    'part': _NUMBER,
    'flag': st.booleans(),
    'none': st.none() | st.integers(),
    'items': st.lists(_JSON, max_size=3),
    'table': st.dictionaries(_TEXT, _JSON, max_size=3),
    'choice': st.sampled_from([1, 2, 3]),
}
_CALLS = st.lists(
    st.tuples(
        st.sampled_from(['note', 'run_it']),
        st.fixed_dictionaries({}, optional=_VALUES),
    ),
    min_size=1,
    max_size=3,
)
# What the marks of Qwen3-Coder's parameters cannot tell from their own end.
_AMBIGUOUS = re.compile(
    r'</parameter>\s*(<parameter=[^>\s]+>|</function>\s*</tool_call>)'
)

_format = functools.cache(family_templates.chat_format)


def _reply(form, calls):
  made = [
      {
          'id': f'functions.{name}:{i}',
          'type': 'function',
          'function': {'name': name, 'arguments': arguments},
      }
      for i, (name, arguments) in enumerate(calls)
  ]
  said = {'role': 'assistant', 'content': '', 'tool_calls': made}
  return form.turn([{'role': 'user', 'content': 'go'}, said], _TOOLS, 1)[1]


def _said(reply):
  return [(c.name, json.loads(c.arguments)) for c in reply.tool_calls]


def _json(arguments, name='replace'):
  call = json.dumps({'name': name, 'arguments': arguments})
  return f'<tool_call>\n{call}\n</tool_call>'


def _xml(*values, name='replace'):
  body = ''.join(f'<parameter={k}>\n{v}\n</parameter>\n' for k, v in values)
  return f'<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>'


class RoundTripTest(parameterized.TestCase):

  @parameterized.parameters(*family_templates.FAMILIES)
  def test_random_calls_are_read_as_they_were(self, family):
    form = _format(family)
    self.assertTrue(form.reads_calls)

    @settings(deadline=None, max_examples=150)
    @given(_CALLS)
    def check(calls):
      calls = calls[:1] if family == 'llama' else calls
      if family == 'qwen coder':
        for value in (v for _, a in calls for v in a.values()):
          text = json.dumps(value) if not isinstance(value, str) else value
          assume(not _AMBIGUOUS.search(text))
      reply = form.parse(_reply(form, calls), _TOOLS)
      self.assertEqual(_said(reply), calls)
      self.assertIsNone(reply.content)

    check()

  @parameterized.parameters(*family_templates.FAMILIES)
  def test_a_call_cut_anywhere_does_not_run(self, family):
    form = _format(family)
    ids = _reply(form, [('note', {'text': 'a\n', 'count': 3})])[:-1]
    text = form.spelled(ids)
    ends = 1 if family == 'llama' else len('<|tool_calls_section_end|>')
    for size in range(len(text) - ends):
      reply = form.parse(form.encode(text[:size]), _TOOLS)
      self.assertEmpty(reply.tool_calls, text[:size])
      self.assertEqual(reply.content, text[:size])

  @parameterized.parameters(*family_templates.FAMILIES)
  def test_what_is_certain_is_the_content(self, family):
    form = _format(family)
    calls = form.spelled(_reply(form, [('note', {'count': 3})])[:-1])
    for text in ('Look. ' + calls, calls, '{"a": 1}', 'a [TOOL'):
      ids = form.encode(text)
      content = form.parse(ids, _TOOLS).content or ''
      for size in range(len(ids) + 1):
        self.assertStartsWith(content, form.visible(ids[:size]))

  @parameterized.parameters(*_READERS)
  def test_any_text_is_read(self, reader):

    @settings(deadline=None, max_examples=300)
    @given(st.lists(st.sampled_from(_MARKS)).map(''.join))
    def check(text):
      tool_calls.read(text, getattr(tool_calls, reader), _TOOLS)

    check()


class TypesTest(parameterized.TestCase):

  @parameterized.parameters(
      '{\n  "name": "demo"\n}', '[1, 2]', '42', '1.50', 'true', 'null',
      '"quoted"', '1e400', 'NaN', 'def f(): pass', '', '\n', ' x\n\n',
  )  # fmt: skip
  def test_text_stays_text_whatever_it_looks_like(self, new):
    values = [('path', 'package.json'), ('old', 'x'), ('new', new)]
    for tools in (chat_renderer.SCHEMAS, ()):
      reply = tool_calls.read(_xml(*values), tool_calls.XML, tools)
      ((name, arguments),) = _said(reply)
      self.assertEqual(arguments, dict(values))
      call = tools_lib.call_of(name, arguments)
      self.assertEqual(call, tools_lib.Replace('package.json', 'x', new))

  @parameterized.parameters(
      ('count', '3', 3),
      ('count', 'three', 'three'),
      ('count', '3 4', '3 4'),
      ('count', 'true', 'true'),
      ('part', '1e-3', 0.001),
      ('part', 'NaN', 'NaN'),
      ('part', '1e400', '1e400'),
      ('flag', 'True', True),
      ('flag', 'false', False),
      ('none', 'null', None),
      ('none', 'None', None),
      ('more', 'null', 'null'),
      ('items', '["a"]', ['a']),
      ('items', '[' * 100_000, '[' * 100_000),
      ('table', '{"a": 1}', {'a': 1}),
      ('unknown', '3', '3'),
  )
  def test_other_values_are_of_their_declared_type(self, name, text, want):
    reply = tool_calls.read(
        _xml((name, text), name='note'), tool_calls.XML, _TOOLS
    )
    ((_, arguments),) = _said(reply)
    self.assertEqual(arguments, {name: want})
    self.assertIs(type(arguments[name]), type(want))

  @parameterized.parameters(
      ({'type': 3},),
      ({'type': [None, 'integer']},),
      ({'anyOf': 1, 'enum': 1},),
      ({'$ref': '#/$defs/x', 'type': 'int'},),
      ({'oneOf': [None, {'$ref': '#'}, {'type': 'integer'}]},),
      ([],),
      (None,),
  )
  def test_any_schema_is_read(self, schema):
    function = {'name': 'f', 'parameters': {'properties': {'a': schema}}}
    for tool in ({'function': function}, {'function': None}, None):
      reply = tool_calls.read(
          _xml(('a', '3'), name='f'), tool_calls.XML, [tool]
      )
      self.assertIn(_said(reply), ([('f', {'a': 3})], [('f', {'a': '3'})]))


class LeftOverTest(parameterized.TestCase):

  def test_marks_inside_arguments_are_text(self):
    body = {'path': 'p.py', 'new': "END = '</tool_call>'"}
    quoted = {'path': 'p.py', 'new': _json({}, 'done')}
    other = _json({'path': 'q'})
    for text, want in (
        (_json(body), [body]),
        (f'{_json(body)}\n{other}', [body, {'path': 'q'}]),
        (_json(quoted), [quoted]),
        (f'I will.\n{other} trailing', [{'path': 'q'}]),
    ):
      reply = tool_calls.read(text, tool_calls.JSON)
      self.assertEqual(_said(reply), [('replace', w) for w in want])
    for value in ('END = "</tool_call>"', 'a </parameter> b', '</function>'):
      values = [('path', 'p.py'), ('new', value)]
      reply = tool_calls.read(_xml(*values), tool_calls.XML)
      self.assertEqual(_said(reply), [('replace', dict(values))])

  @parameterized.parameters(
      ('JSON', '<tool_call>{"name": "f"} x</tool_call>'),
      ('JSON', '<tool_call>{"name": "f"}{"name": "g"}</tool_call>'),
      ('JSON', '<tool_call>{"name": "f"}</tool_call></tool_call>'),
      ('JSON', _json({}) + '<tool_call>{"name": "f", </tool_call>'),
      ('JSON', '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
      ('JSON', '<tool_call>{"name":"f","arguments":"{} x"}</tool_call>'),
      ('XML', _xml(('new', 'x')).replace('</parameter>', '', 1)),
      ('XML', _xml(('a', 'x'), ('b', 'y')).replace('</parameter>', '', 1)),
      ('XML', _xml(('a', 'x'), ('b', 'y')).replace('\n</parameter>\n</f', '</f')),
      ('XML', _xml(('a', 'x'), ('a', 'y'))),
      ('XML', _xml(('a', 'x')).replace('</function>', 'x</function>')),
      ('XML', _xml(('a', 'x')).replace('</tool_call>', 'x</tool_call>')),
      ('XML', _xml(('a', 'x')).replace('</function>', '')),
      ('LLAMA', '{"name": "note", "parameters": {}} and so on'),
      ('LLAMA', 'It is {"name": "note", "parameters": {}}'),
      ('LLAMA', '{"a": 1}'),
      ('MISTRAL', '[TOOL_CALLS][{"name": "note", "arguments": {}}] x'),
      ('MISTRAL', '[TOOL_CALLS]{"name": "note", "arguments": {}}'),
      ('KIMI', '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{} x'
       '<|tool_call_end|>'),
      ('DEEPSEEK', '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}\n```<｜tool▁call▁end｜>'),
      ('DEEPSEEK', '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}'
       '<｜tool▁call▁end｜>'),
  )  # fmt: skip
  def test_no_call_runs_with_text_left_over(self, reader, text):
    reply = tool_calls.read(text, getattr(tool_calls, reader), _TOOLS)
    self.assertEqual(reply, tool_calls.Reply(text))

  def test_an_unclosed_parameter_does_not_run(self):
    tools = chat_renderer.SCHEMAS
    text = _xml(('path', 'p.py'), ('old', 'x'), ('new', 'y'))
    self.assertLen(tool_calls.read(text, tool_calls.XML, tools).tool_calls, 1)
    for number in range(3):
      pieces = text.split('\n</parameter>')
      pieces[number : number + 2] = [''.join(pieces[number : number + 2])]
      cut = '\n</parameter>'.join(pieces)
      reply = tool_calls.read(cut, tool_calls.XML, tools)
      self.assertEqual(reply, tool_calls.Reply(cut))

  def test_an_object_is_no_call_where_no_tool_is_on_offer(self):
    text = '{"name": "note", "parameters": {}}'
    self.assertEmpty(tool_calls.read(text, tool_calls.LLAMA).tool_calls)
    reply = tool_calls.read(f'{text}; {text}', tool_calls.LLAMA, _TOOLS)
    self.assertLen(reply.tool_calls, 2)


if __name__ == '__main__':
  absltest.main()
