"""Replies of a form, by the openai client against a real endpoint."""

import concurrent.futures
import json
import random
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import jsonschema
import openai
from tests import family_templates
from tests import serving_kit as lib

from composer_jax.rollout import engine
from composer_jax.serving import constraints

_NOTE = {
    'type': 'function',
    'function': {
        'name': 'note',
        'parameters': {
            'type': 'object',
            'properties': {
                'text': {'type': 'string', 'maxLength': 8},
                'line': {'type': 'integer', 'minimum': 0, 'maximum': 99},
            },
            'required': ['text', 'line'],
            'additionalProperties': False,
        },
    },
}
_RUN = {'type': 'function', 'function': {'name': 'run'}}
_NAMED = {'type': 'function', 'function': {'name': 'note'}}


def _schema(rng, depth=2):
  """A schema of values that are not long."""
  kinds = ['string', 'integer', 'boolean', 'enum', 'const']
  kind = rng.choice(kinds + ['object', 'array', 'anyOf'] * bool(depth))
  if kind == 'string':
    return {'type': 'string', 'maxLength': rng.randint(0, 6)}
  if kind == 'integer':
    low = rng.randint(-50, 50)
    return {'type': kind, 'minimum': low, 'maximum': low + rng.randint(0, 99)}
  if kind == 'boolean':
    return {'type': kind}
  if kind == 'enum':
    return {'enum': rng.sample(['a', 'naïve ☃', '"', 7, None, True], 3)}
  if kind == 'const':
    return {'const': rng.choice([{'x': [1, '\n']}, '</tool_call>', -1])}
  if kind == 'array':
    items = _schema(rng, depth - 1)
    return {'type': kind, 'items': items, 'maxItems': rng.randint(0, 3)}
  if kind == 'anyOf':
    return {kind: [_schema(rng, depth - 1), {'type': 'null'}]}
  return _object(rng, depth)


def _object(rng, depth=2):
  names = rng.sample(['a', 'b c', 'ü', '"'], rng.randint(0, 3))
  return {
      'type': 'object',
      'properties': {name: _schema(rng, depth - 1) for name in names},
      'required': names[: rng.randint(0, 3)],
      'additionalProperties': False,
  }


class EndpointTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enter_context(tempfile.TemporaryDirectory())
    cls.kit = lib.Kit(folder, context_tokens=1024)
    cls.addClassCleanup(cls.kit.close)

  def setUp(self):
    super().setUp()
    self.name, key = self.kit.open('serve')
    self.client = self.client_of(key)
    self.addCleanup(lambda: self.assertTrue(self.kit.settled()))

  def client_of(self, key):
    client = openai.OpenAI(
        base_url=f'{self.kit.url}/v1', api_key=key, max_retries=0
    )
    self.addCleanup(client.close)
    return client

  def create(self, **fields):
    return self.client.chat.completions.create(
        **lib.ask(**{'max_tokens': 200, **fields})
    )

  def choices(self, schema, **fields):
    form = {'name': 'answer', 'schema': schema, 'strict': True}
    wanted = {'type': 'json_schema', 'json_schema': form}
    return self.create(response_format=wanted, **fields).choices

  def test_json_of_any_schema(self):
    rng = random.Random(0)
    schemas = [_object(rng) for _ in range(24)]

    def play(i, schema):
      heat = {'temperature': 0} if i % 3 == 0 else {'seed': i, 'n': 2}
      return self.choices(schema, **heat)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      replies = list(pool.map(play, range(24), schemas))
    whole = 0
    for schema, choices in zip(schemas, replies, strict=True):
      for choice in choices:
        text = choice.message.content or ''
        if choice.finish_reason == 'stop':
          whole += 1
          jsonschema.validate(json.loads(text), schema)
    self.assertGreater(whole, 30)  # of 40
    # Nobody but the policy itself is trained on.
    self.assertFalse(any(s.sampled.any() for s in self.kit.segments(self.name)))

  def test_any_object(self):
    reply = self.create(
        response_format={'type': 'json_object'}, max_tokens=230, seed=1
    )
    (choice,) = reply.choices
    self.assertStartsWith(choice.message.content, '{')
    if choice.finish_reason == 'stop':
      self.assertIsInstance(json.loads(choice.message.content), dict)

  @parameterized.parameters(('required',), (_NAMED,))
  def test_a_call(self, choice):
    fields = {'tools': [_RUN, _NOTE] if choice is _NAMED else [_NOTE]}
    for heat in ({'temperature': 0}, {'seed': 3}, {'seed': 4, 'top_p': 0.5}):
      (reply,) = self.create(tool_choice=choice, **fields, **heat).choices
      self.assertEqual(reply.finish_reason, 'tool_calls')
      self.assertIsNone(reply.message.content)
      (call,) = reply.message.tool_calls
      self.assertEqual(call.function.name, 'note')
      arguments = json.loads(call.function.arguments)
      jsonschema.validate(arguments, _NOTE['function']['parameters'])

  def test_a_call_of_one_of_several_in_a_stream(self):
    stream = self.create(
        tools=[_NOTE, _RUN], tool_choice='required', seed=2, stream=True
    )
    deltas = [c.choices[0].delta for c in stream]
    (call,) = [d.tool_calls[0] for d in deltas if d.tool_calls]
    self.assertIn(call.function.name, ('note', 'run'))
    self.assertFalse(any(d.content for d in deltas))

  def test_others_draw_what_they_would_draw_alone(self):
    def ids(**fields):
      reply = self.create(
          seed=5, extra_body={'return_token_ids': True}, **fields
      )
      return reply.choices[0].token_ids

    forced = {'tools': [_NOTE], 'tool_choice': 'required'}
    shaped = {'top_p': 0.9}
    alone = [ids(**x) for x in ({}, forced, shaped)]
    compiled = engine.compilations()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
      both = [pool.submit(ids, **x) for x in ({}, forced, shaped)]
    self.assertEqual([f.result() for f in both], alone)
    self.choices({'type': 'integer', 'maximum': 9, 'minimum': 0})
    self.assertEqual(engine.compilations(), compiled)

  def test_log_probs_are_the_models_own(self):
    (choice,) = self.choices({'const': 'x'}, logprobs=True)
    self.assertEqual(choice.message.content, '"x"')
    # Nothing else could be said, which the model did not know.
    self.assertLess(sum(t.logprob for t in choice.logprobs.content), -1.0)

  def test_a_grammar_that_grows_without_bounds_cuts_the_reply(self):
    part = '(.{0,900}[a-m].{0,900}[n-z]){0,900}q'
    pattern = f'^({part}|{part.replace("900", "700").replace("q", "r")})$'
    (choice,) = self.choices({'type': 'string', 'pattern': pattern}, seed=3)
    self.assertEqual(choice.finish_reason, 'length')
    with self.assertRaises(ValueError):
      json.loads(choice.message.content)

  def test_cut_by_its_length(self):
    (choice,) = self.choices(_NOTE['function']['parameters'], max_tokens=3)
    self.assertEqual(choice.finish_reason, 'length')
    self.assertStartsWith('{"text": "', choice.message.content)

  @parameterized.named_parameters(
      ('no_tools', {'tool_choice': 'required'}, 'tool_choice', 'offer: none'),
      (
          'other',
          {'tools': [_RUN], 'tool_choice': _NAMED},
          'tool_choice',
          'offer: run',
      ),
      ('word', {'tool_choice': 'any'}, 'tool_choice', 'want "auto"'),
      ('format', {'response_format': {'type': 'x'}}, 'response_format', 'want'),
      (
          'keyword',
          {'schema': {'type': 'string', 'format': 'no such format'}},
          'response_format',
          'cannot be obeyed',
      ),
      (
          'reference',
          {'schema': {'$ref': 'https://example.com/schema'}},
          'response_format',
          'cannot be obeyed',
      ),
      ('nothing', {'schema': {'type': 'x'}}, 'response_format', 'obeyed'),
      ('false', {'schema': {'allOf': [False]}}, 'response_format', 'obeyed'),
      (
          'large',
          {'schema': {'enum': ['x' * 70000]}},
          'response_format',
          'at most 65536',
      ),
  )
  def test_refused_in_a_line(self, fields, param, says):
    if schema := fields.get('schema'):
      form = {'name': 'a', 'schema': schema}
      fields = {'response_format': {'type': 'json_schema', 'json_schema': form}}
    with self.assertRaises(openai.BadRequestError) as caught:
      self.create(**fields)
    self.assertEqual(caught.exception.param, param)
    self.assertIn(says, caught.exception.message)
    self.assertNotIn('\\n', caught.exception.message)

  def test_what_is_trained_on_is_drawn_freely(self):
    _, key = self.kit.open('train')
    self.client = self.client_of(key)
    for fields in (
        {'tools': [_NOTE], 'tool_choice': 'required'},
        {'response_format': {'type': 'json_object'}},
    ):
      with self.assertRaisesRegex(openai.BadRequestError, 'trained on'):
        self.create(**fields)
    self.create(tool_choice='none', tools=[_NOTE], max_tokens=4)
    self.create(response_format={'type': 'text'}, max_tokens=4)


class FamilyTest(parameterized.TestCase):

  @parameterized.parameters(*family_templates.FAMILIES)
  def test_a_forced_call_is_one_that_is_read(self, family):
    chat = family_templates.chat_format(family)
    call = {
        'id': 'functions.note:0',
        'type': 'function',
        'function': {'name': 'note', 'arguments': {constraints._SLOT: 0}},
    }
    reply = {'role': 'assistant', 'content': '', 'tool_calls': [call]}
    if family == 'qwen coder':
      with self.assertRaisesRegex(ValueError, 'in a way of its own'):
        chat.frame(reply, constraints._ARGUMENTS, [_NOTE])
      return
    before, after = chat.frame(reply, constraints._ARGUMENTS, [_NOTE])
    ids = []
    for piece in (*before, '{"text": "a\\"b", "line": 7}', *after):
      ids += chat.encode(piece) if isinstance(piece, str) else [piece]
    (found,) = chat.parse([*ids, min(chat.stop_ids)], [_NOTE]).tool_calls
    self.assertEqual(found.name, 'note')
    self.assertEqual(json.loads(found.arguments), {'text': 'a"b', 'line': 7})


if __name__ == '__main__':
  absltest.main()
