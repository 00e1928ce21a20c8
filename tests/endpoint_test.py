"""The endpoint over loopback: replies, refusals, retries, swaps, no leaks."""

import asyncio
import base64
import concurrent.futures
import contextlib
import json
import re
import socket
import tempfile
import threading
import time
import urllib.parse

from absl.testing import absltest
from absl.testing import parameterized
import httpx
import numpy as np
from tests import serving_kit as lib

from composer_jax.chat import template
from composer_jax.serving import web

_CHAT = '/v1/chat/completions'
_PLAIN = '/v1/completions'
_EXACT = dict(return_token_ids=True, return_routed_experts=True)


class _Case(parameterized.TestCase):
  """One engine and one server for all tests of a class."""

  SIZES: dict[str, int] = {}

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = cls.enter_context(_folder())
    cls.kit = lib.Kit(cls.folder, **cls.SIZES)
    cls.addClassCleanup(cls.kit.close)

  def setUp(self):
    super().setUp()
    self.http = httpx.Client(base_url=self.kit.url, timeout=120)
    self.addCleanup(self.http.close)
    self.addCleanup(lambda: self.assertTrue(self.kit.settled()))
    self.addCleanup(self.kit.gate.set)

  def post(self, path, key, body, **headers):
    return self.http.post(
        path, json=body, headers={**lib.bearer(key), **headers}
    )

  def error(self, response, status):
    self.assertEqual(response.status_code, status, response.text)
    error = response.json()['error']
    self.assertNotIn('\n', error['message'])
    return error

  def events(self, response):
    """The events of a stream; the last one says that it is done."""
    self.assertEqual(response.status_code, 200, response.text)
    kind = response.headers['content-type']
    self.assertStartsWith(kind, 'text/event-stream')
    *events, last, end = response.text.split('\n\n')
    self.assertEqual((last, end), ('data: [DONE]', ''))
    return [json.loads(e.removeprefix('data: ')) for e in events]

  def metric(self, name):
    text = self.http.get('/metrics').text
    return float(re.search(rf'^composer_{name} (\S+)$', text, re.M)[1])


@contextlib.contextmanager
def _folder():

  with tempfile.TemporaryDirectory() as folder:
    yield folder


def _experts(choice):
  routed = choice['routed_experts']
  data = base64.b64decode(routed['data'])
  return np.frombuffer(data, routed['dtype']).reshape(routed['shape'])


class ReplyTest(_Case):

  def test_turns_go_on_from_exact_ids_and_are_scored_alike_by_the_trainer(self):
    name, key = self.kit.open()
    messages = [{'role': 'user', 'content': 'add a b'}]
    before = []
    for turn in range(3):
      body = {**lib.ask(**_EXACT), 'messages': messages, 'temperature': 0}
      reply = self.post(_CHAT, key, body).json()
      (choice,) = reply['choices']
      ids = [*choice['prompt_token_ids'], *choice['token_ids']]
      self.assertEqual(ids[: len(before)], before)
      self.assertEqual(
          reply['usage']['total_tokens'], len(ids), 'every token is counted'
      )
      experts = _experts(choice)
      self.assertLen(experts, len(ids))
      self.assertTrue(np.all(experts[:-1] < 4))
      before = ids
      said = {**choice['message'], 'refusal': None}
      messages += [said, {'role': 'user', 'content': f'turn {turn}'}]
    (segment,) = self.kit.segments(name)
    self.assertEqual(segment.tokens.tolist(), before)
    self.assertGreater(segment.sampled.sum(), 12)
    lib.check_rescored(self, [segment])

  def test_another_history_is_another_segment(self):
    name, key = self.kit.open()
    for text in ('one', 'two', 'one'):
      self.post(_CHAT, key, lib.ask(text))
    segments = self.kit.segments(name)
    self.assertLen(segments, 3)
    lib.check_rescored(self, segments)

  def test_training_overrules_how_to_sample(self):
    replies = []
    for fields in ({}, {'temperature': 0, 'top_p': 0.1, 'seed': 3}, {}):
      _, key = self.kit.open(seed=9)
      reply = self.post(_CHAT, key, lib.ask(**_EXACT, **fields)).json()
      replies.append(reply['choices'][0]['token_ids'])
    _, key = self.kit.open(seed=10)
    other = self.post(_CHAT, key, lib.ask(**_EXACT)).json()
    self.assertEqual(replies[0], replies[1])
    self.assertEqual(replies[0], replies[2])
    self.assertNotEqual(replies[0], other['choices'][0]['token_ids'])
    error = self.error(self.post(_CHAT, key, lib.ask(n=2)), 400)
    self.assertEqual(error['param'], 'n')

  def test_serving_obeys(self):
    _, key = self.kit.open('serve')

    def ids(**fields):
      body = lib.ask(**_EXACT, **fields)
      choices = self.post(_CHAT, key, body).json()['choices']
      return [c['token_ids'] for c in choices]

    self.assertEqual(ids(temperature=0), ids(temperature=0))
    self.assertEqual(ids(seed=5), ids(seed=5))
    self.assertNotEqual(ids(seed=5), ids(seed=6))
    self.assertNotEqual(ids(), ids())
    several = ids(n=3, seed=5)
    self.assertLen({tuple(s) for s in several}, 3)
    self.assertEqual(several[:1], ids(seed=5))
    self.assertLen(ids(max_completion_tokens=2)[0], 2)

  def test_shaped_samples_are_served_and_never_trained(self):
    name, key = self.kit.open('serve')

    def ids(**fields):
      body = lib.ask(**_EXACT, seed=5, parallel_tool_calls=False, **fields)
      (choice,) = self.post(_CHAT, key, body).json()['choices']
      return choice['token_ids']

    plain, greedy = ids(reasoning_effort='low'), ids(temperature=0)
    self.assertNotEqual(plain, greedy)
    for cut in ({'top_k': 1}, {'top_p': 1e-6}, {'min_p': 1}):
      self.assertEqual(ids(**cut), greedy)
      self.assertNotEqual(ids(**cut, frequency_penalty=2), plain)
    self.assertEqual(ids(top_p=1, top_k=-1), plain)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      both = [pool.submit(ids), pool.submit(ids, top_k=1)]
    self.assertEqual([f.result() for f in both], [plain, greedy])
    trained = [s for s in self.kit.segments(name) if s.sampled.any()]
    self.assertNotEmpty(trained)
    drawn = {tuple(s.tokens[s.sampled].tolist()) for s in trained}
    self.assertLessEqual(drawn, {tuple(plain), tuple(greedy)})

  def test_tokens_in_tokens_out(self):
    name, key = self.kit.open()
    prompt = self.kit.chat.encode('def add')
    body = {'model': lib.MODEL, 'prompt': prompt, 'max_tokens': 5, **_EXACT}
    reply = self.post(_PLAIN, key, {**body, 'logprobs': 1}).json()
    (choice,) = reply['choices']
    self.assertEqual(choice['prompt_token_ids'], prompt)
    drawn = choice['token_ids']
    self.assertEqual(choice['text'], self.kit.chat.text(drawn))
    self.assertEqual(choice['weights_version'], 0)
    tail = self.post(
        _PLAIN, key, {**body, 'routed_experts_start_len': 4}
    ).json()
    self.assertLen(_experts(tail['choices'][0]), len(prompt) + 1)
    longer = [*prompt, *drawn, 40, 41]
    self.post(_PLAIN, key, {**body, 'prompt': longer})
    text = self.post(_PLAIN, key, {**body, 'prompt': 'def add'}).json()
    self.assertEqual(text['choices'][0]['prompt_token_ids'], prompt)
    segments = self.kit.segments(name)
    self.assertLen(segments, 3)
    went_on = segments[1]  # the others are leaves of their own
    logps = went_on.logps[went_on.sampled][: len(drawn)]
    got = np.array(choice['logprobs']['token_logprobs'], np.float32)
    self.assertEqual(got.tobytes(), logps.tobytes())
    lib.check_rescored(self, segments)

  @parameterized.parameters(_CHAT, _PLAIN)
  def test_a_stream_says_what_the_reply_would(self, path):
    bodies = []
    for seed in range(6):
      body = lib.ask(max_tokens=60, seed=seed, logprobs=True)
      if path == _PLAIN:
        body = {**body, 'prompt': 'add', 'logprobs': 1}
        del body['messages']
      bodies.append(body)
    _, key = self.kit.open('serve')
    for i, body in enumerate(bodies):
      whole = self.post(path, key, body).json()
      asked = {'stream': True, 'stream_options': {'include_usage': True}}
      self.kit.delay = 0.05 if i == 0 else 0.0
      *events, usage = self.events(self.post(path, key, {**body, **asked}))
      self.assertEqual(usage['usage'], whole['usage'])
      self.assertEqual(usage['choices'], [])
      choices = [e['choices'][0] for e in events]
      if path == _CHAT:
        self.assertEqual(choices[0]['delta']['role'], 'assistant')
        pieces = [c['delta'].get('content', '') for c in choices]
        want = whole['choices'][0]['message']['content']
      else:
        pieces = [c['text'] for c in choices]
        want = whole['choices'][0]['text']
      self.assertEqual(''.join(pieces), want)
      if i == 0:
        self.assertGreater(sum(map(bool, pieces)), 3)
      last = choices[-1]
      for field in ('finish_reason', 'logprobs'):
        self.assertEqual(last[field], whole['choices'][0][field])
      self.assertTrue(all(c['finish_reason'] is None for c in choices[:-1]))

  def test_bytes_of_tokens_are_those_of_the_text(self):
    _, key = self.kit.open('serve')
    parts = 0
    for seed in range(4):
      body = lib.ask(max_tokens=40, seed=seed, logprobs=True)
      (choice,) = self.post(_CHAT, key, body).json()['choices']
      tokens = choice['logprobs']['content']
      pieces = [bytes(t['bytes']) for t in tokens]
      joined = b''.join(pieces).decode(errors='replace')
      self.assertEqual(joined, choice['message']['content'])
      self.assertNotIn('\ufffd'.encode(), pieces)
      parts += sum('\ufffd' in t['token'] for t in tokens)
    self.assertGreater(parts, 0)

  def test_offsets_of_tokens_are_within_the_text(self):
    _, key = self.kit.open('serve')
    body = {'model': lib.MODEL, 'prompt': 'add', 'logprobs': 1, 'seed': 1}
    free = self.post(_PLAIN, key, {**body, 'max_tokens': 40}).json()
    text = free['choices'][0]['text']
    for stop in ([], [text[len(text) // 2 :][:2]]):
      reply = self.post(_PLAIN, key, {**body, 'max_tokens': 40, 'stop': stop})
      (choice,) = reply.json()['choices']
      shown = choice['logprobs']
      self.assertEqual(''.join(shown['tokens']), choice['text'])
      for at, token in zip(shown['text_offset'], shown['tokens'], strict=True):
        self.assertEqual(choice['text'][at : at + len(token)], token)

  def test_routes_by_turns_begin_one_token_before_the_turn(self):
    _, key = self.kit.open('serve')
    messages, rows, total, seen = lib.ask()['messages'], [], 0, 0
    for start in (0, 1):  # tokens that the first row is behind the turn's end
      body = {
          **lib.ask(**_EXACT, seed=1),
          'messages': messages,
          'routed_experts_start_len': max(total - start, 0),
      }
      (choice,) = self.post(_CHAT, key, body).json()['choices']
      ids = [*choice['prompt_token_ids'], *choice['token_ids']]
      self.assertGreater(len(ids), seen)
      total = seen = len(ids)
      rows.append(_experts(choice))
      messages = [*messages, choice['message'], lib.ask('b')['messages'][0]]
    # What sampled last was no input yet: its row comes with the next turn.
    self.assertTrue(np.all(rows[0][-1] == 255))
    joined = np.concatenate([rows[0][:-1], rows[1]])
    self.assertLen(joined, total)
    self.assertTrue(np.all(joined[:-1] < 4))

  def test_stop_strings_end_the_sample_where_they_are_complete(self):
    name, key = self.kit.open('serve')
    body = lib.ask(max_tokens=40, seed=1, **_EXACT)
    (free,) = self.post(_CHAT, key, body).json()['choices']
    text = free['message']['content']
    stop = text[len(text) // 2 :][:2]
    (cut,) = self.post(_CHAT, key, {**body, 'stop': stop}).json()['choices']
    shown = text[: text.index(stop)]
    self.assertEqual(cut['message']['content'], shown)
    self.assertEqual(cut['finish_reason'], 'stop')
    ids = cut['token_ids']
    self.assertEqual(ids, free['token_ids'][: len(ids)])
    self.assertIn(stop, self.kit.chat.text(ids))
    self.assertNotIn(stop, self.kit.chat.text(ids[:-1]))
    self.assertTrue(np.all(_experts(cut)[-1] == 255))
    streamed = {**body, 'stop': [stop, 'nowhere'], 'stream': True}
    events = self.events(self.post(_CHAT, key, streamed))
    pieces = [e['choices'][0]['delta'].get('content', '') for e in events]
    self.assertEqual(''.join(pieces), shown)
    lib.check_rescored(self, self.kit.segments(name))

  def test_who_asks_what_is_served(self):
    _, key = self.kit.open()
    (model,) = self.http.get('/v1/models', headers=lib.bearer(key)).json()[
        'data'
    ]
    self.assertEqual((model['id'], model['max_model_len']), (lib.MODEL, 256))
    self.assertEqual(self.http.get('/health').status_code, 200)
    ready = self.http.get('/ready').json()
    self.assertEqual(ready['digest'], 'digest-0')
    calls = self.metric('decoded_tokens_total')
    for path in ('/v1/messages/count_tokens', '/tokenize'):
      counted = self.post(path, key, {'messages': lib.ask()['messages']}).json()
      self.assertEqual(counted['input_tokens'], len(counted['tokens']))
    self.assertEqual(self.metric('decoded_tokens_total'), calls)


class RefusalTest(_Case):

  @parameterized.named_parameters(
      ('top_p', {'top_p': 0}, 'top_p'),
      ('temperature', {'temperature': -1}, 'temperature'),
      ('infinite', {'temperature': 1e999}, 'temperature'),
      ('text_temperature', {'temperature': 'hot'}, 'temperature'),
      ('max_tokens', {'max_tokens': 0}, 'max_tokens'),
      ('bool', {'max_tokens': True}, 'max_tokens'),
      ('n', {'n': 1000}, 'n'),
      ('penalty', {'presence_penalty': 3}, 'presence_penalty'),
      ('top_k', {'top_k': 0.5}, 'top_k'),
      ('bias', {'logit_bias': {'5': 1}}, 'logit_bias'),
      ('top_logprobs', {'logprobs': True, 'top_logprobs': 3}, 'top_logprobs'),
      ('unknown', {'beam_width': 3}, 'beam_width'),
      (
          'variable',
          {'chat_template_kwargs': {'messages': []}},
          'chat_template_kwargs',
      ),
      ('stop', {'stop': ['']}, 'stop'),
      ('choice', {'tool_choice': 'required'}, 'tool_choice'),
      ('format', {'response_format': {'type': 'json'}}, 'response_format'),
      ('no_messages', {'messages': []}, 'messages'),
      ('role', {'messages': [{'role': 'x'}]}, 'messages.role'),
      ('roles', {'messages': [{'role': []}]}, 'messages.role'),
      ('message', {'messages': ['x']}, 'messages'),
      (
          'image',
          {'messages': [{'role': 'user', 'content': [{'type': 'image'}]}]},
          'messages.content',
      ),
      (
          'call',
          {'messages': [{'role': 'assistant', 'tool_calls': 5}]},
          'messages.tool_calls',
      ),
      ('tools', {'tools': [{}]}, 'tools'),
  )
  def test_names_the_field(self, fields, param):
    _, key = self.kit.open('serve')
    response = self.http.post(
        _CHAT,
        content=json.dumps({**lib.ask(), **fields}),
        headers=lib.bearer(key),
    )
    error = self.error(response, 400)
    self.assertEqual(error['param'], param)
    self.assertEqual(error['type'], 'invalid_request_error')
    self.assertIn(param, error['message'])

  @parameterized.parameters(
      b'', b'{', b'[]', b'"x"', b'\xff', b'{"model": "\\ud800"}', b'[' * 100_000
  )
  def test_malformed(self, content):
    _, key = self.kit.open()
    response = self.http.post(_CHAT, content=content, headers=lib.bearer(key))
    self.error(response, 400)

  def test_prompts_past_the_limit(self):
    name, key = self.kit.open()
    error = self.error(self.post(_CHAT, key, lib.ask('x' * 10_000)), 400)
    self.assertEqual(error['code'], 'context_length_exceeded')
    body = {'model': lib.MODEL, 'prompt': [1] * 256}
    error = self.error(self.post(_PLAIN, key, body), 400)
    self.assertEqual(error['code'], 'context_length_exceeded')
    for prompt in ([], [384], [-1], [[1]], ['a']):
      self.error(self.post(_PLAIN, key, {**body, 'prompt': prompt}), 400)
    self.assertEqual(self.kit.segments(name), ())  # and none counts as lost

  @parameterized.parameters(
      ({'tools': '{}'},),
      (
          {
              'tools': [
                  {'type': 'function', 'function': {'name': 'f', 'x': '{}'}}
              ]
          },
      ),
      ({'messages': [{'role': 'user', 'content': 'x', 'extra': '{}'}]},),
      ({'metadata': '{}'},),
  )
  def test_nested_too_deeply(self, fields):
    _, key = self.kit.open('serve')
    for depth in (70, 500, 900, 40_000):
      for opened, closed in (('[', ']'), ('{"a":', '}')):
        nested = opened * depth + '1' * (opened != '[') + closed * depth
        body = json.dumps({**lib.ask(), **fields}).replace('"{}"', nested)
        response = self.http.post(_CHAT, content=body, headers=lib.bearer(key))
        self.assertIn('nested too deeply', self.error(response, 400)['message'])

  def test_arguments_may_be_any_text(self):
    _, key = self.kit.open('serve')
    user = {'role': 'user', 'content': 'x'}
    for text in ('{"a":' * 80 + '1' + '}' * 80, '[' * 990 + ']' * 990, '[' * 9):
      function = {'name': 'f', 'arguments': text}
      call = {'id': 'x', 'type': 'function', 'function': function}
      said = {'role': 'assistant', 'tool_calls': [call]}
      body = {**lib.ask(), 'messages': [user, said, user]}
      response = self.post(_CHAT, key, body)
      self.assertIn(response.status_code, (200, 400), response.text)

  def test_text_that_cannot_fit_is_refused_before_it_is_encoded(self):
    _, key = self.kit.open('serve')
    text = 'add def x y ' * (8_000_000 // 12)
    tool = {'type': 'function', 'function': {'name': 'f', 'description': text}}
    start = time.monotonic()
    for path, fields in (
        (_CHAT, lib.ask(text)),
        (_CHAT, lib.ask(tools=[tool])),
        (_PLAIN, {'model': lib.MODEL, 'prompt': text}),
        (_PLAIN, {'model': lib.MODEL, 'prompt': [1] * 1_000_000}),
        ('/tokenize', {'prompt': text}),
        ('/tokenize', lib.ask(text)),
    ):
      error = self.error(self.post(path, key, fields), 400)
      self.assertEqual(error['code'], 'context_length_exceeded')
      self.assertLess(len(error['message']), 200)
    error = self.error(self.post(_CHAT, key, lib.ask(stop=text)), 400)
    self.assertEqual(error['param'], 'stop')
    # Encoding one of them alone takes longer.
    with self.assertRaises(concurrent.futures.TimeoutError):
      with concurrent.futures.ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(self.kit.chat.encode, text)
        encoding.result(time.monotonic() - start)

  def test_others_are_answered_while_a_long_text_is_encoded(self):
    _, key = self.kit.open('serve')
    encoding, go_on = threading.Event(), threading.Event()
    self.addCleanup(go_on.set)
    encode = self.kit.chat.encode

    def slow(text):
      encoding.set()
      go_on.wait(600)
      return encode(text)

    self.kit.chat.encode = slow
    self.addCleanup(delattr, self.kit.chat, 'encode')
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      body = {'model': lib.MODEL, 'prompt': 'add', 'max_tokens': 2}
      held = pool.submit(self.post, _PLAIN, key, body)
      self.assertTrue(encoding.wait(600))
      self.assertEqual(self.http.get('/health').status_code, 200)
      self.assertFalse(held.done())
      go_on.set()
      self.assertEqual(held.result().status_code, 200)

  def test_oversized(self):
    _, key = self.kit.open()
    body = b'x' * (web.BODY_BYTES + 1)
    response = self.http.post(_CHAT, content=body, headers=lib.bearer(key))
    self.error(response, 413)

  def test_keys(self):
    name, key = self.kit.open()
    self.error(self.http.post(_CHAT, json=lib.ask()), 401)
    error = self.error(self.post(_CHAT, 'guess', lib.ask()), 401)
    self.assertEqual(error['code'], 'invalid_api_key')
    self.error(self.post(_CHAT, lib.ADMIN, lib.ask()), 403)
    self.error(self.post('/rollouts', key, {'id': 'x'}), 403)
    error = self.error(self.post(_CHAT, key, lib.ask(model='gpt')), 404)
    self.assertEqual(error['code'], 'model_not_found')
    self.kit.segments(name)
    self.error(self.post(_CHAT, key, lib.ask()), 410)
    self.assertEqual(self.kit.segments(name), ())

  def test_other_routes(self):
    self.error(self.http.get('/v1/embeddings'), 404)
    self.error(self.http.get(_CHAT), 405)

  def test_fleets_open_and_finish(self):
    opened = self.post('/rollouts', lib.ADMIN, {'id': 'a/b/c', 'seed': 3})
    self.assertEqual(opened.status_code, 201)
    key = opened.json()['api_key']
    self.error(self.post('/rollouts', lib.ADMIN, {'id': 'a/b/c'}), 409)
    for body in ({}, {'id': 'x', 'mode': 'y'}, {'id': 'x', 'seed': 'z'}):
      self.error(self.post('/rollouts', lib.ADMIN, body), 400)
    self.assertEqual(self.post(_CHAT, key, lib.ask()).status_code, 200)
    name, other = self.kit.open()
    last = {'submission': {'f.py': 'x'}, 'reward': 0.5, 'status': 'done'}
    path = f'/v1/rollouts/{urllib.parse.quote("a/b/c")}/finish'
    self.error(self.post(path, other, last), 403)
    for field, value in (
        ('submission', [1]),
        ('reward', 'x'),
        ('status', 1),
    ):
      error = self.error(self.post(path, key, {**last, field: value}), 400)
      self.assertEqual(error['param'], field)
    for _ in range(2):
      self.assertEqual(self.post(path, key, last).status_code, 200)
    self.error(self.post(path, key, {**last, 'status': 'no'}), 409)
    self.error(self.post(_CHAT, key, lib.ask()), 410)
    finish = asyncio.run(self.kit.gateway.finished('a/b/c'))
    self.assertEqual(finish.submission, {'f.py': 'x'})
    self.assertEqual((finish.status, finish.reward), ('done', 0.5))
    self.assertLen(self.kit.segments('a/b/c'), 1)
    self.assertEqual(self.kit.segments(name), ())


class LoadTest(_Case):

  SIZES = {'max_calls': 100}

  async def _many(self, key, bodies):
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(
        base_url=self.kit.url, timeout=120, limits=limits
    ) as http:
      posts = (
          http.post(_CHAT, json=b, headers=lib.bearer(key)) for b in bodies
      )
      return await asyncio.gather(*posts)

  @parameterized.parameters(33, 64, 100)
  def test_rows_are_tokens_for_each_of_many(self, count):
    name, key = self.kit.open()
    bodies = [
        lib.ask(f'{"a" * (i % 9)} {i}', max_tokens=1 + i % 30, **_EXACT)
        for i in range(count)
    ]
    seen = set()
    for response in asyncio.run(self._many(key, bodies)):
      self.assertEqual(response.status_code, 200, response.text)
      (choice,) = response.json()['choices']
      ids = [*choice['prompt_token_ids'], *choice['token_ids']]
      self.assertLen(_experts(choice), len(ids))
      seen.add(tuple(ids))
    segments = self.kit.segments(name)
    self.assertEqual({tuple(s.tokens.tolist()) for s in segments}, seen)
    for segment in segments:
      self.assertLen(segment.routing.experts, len(segment.tokens))
    lib.check_rescored(self, segments[::7])

  def test_a_full_queue_says_when_to_come_back(self):
    name, key = self.kit.open()
    self.kit.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      held = pool.submit(
          lambda: asyncio.run(
              self._many(key, [lib.ask(str(i)) for i in range(100)])
          )
      )
      lib.wait(lambda: self.metric('calls') == 100)
      refused = self.post(_CHAT, key, lib.ask())
      error = self.error(refused, 429)
      self.assertEqual(error['type'], 'rate_limit_error')
      self.assertEqual(refused.headers['retry-after'], '1')
      self.kit.gate.set()
      for response in held.result():
        self.assertEqual(response.status_code, 200)
    self.assertLen(self.kit.segments(name), 100)

  def test_new_weights_under_a_hundred_streams(self):
    name, key = self.kit.open()
    swaps = self.metric('weight_swaps_total')
    bodies = [lib.ask(str(i), max_tokens=60, stream=True) for i in range(100)]
    self.kit.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      held = pool.submit(lambda: asyncio.run(self._many(key, bodies)))
      lib.wait(lambda: self.metric('calls') == 100)
      decoded = self.metric('decoded_tokens_total')
      self.kit.gate.set()
      for step in (1, 2):
        due = decoded + 500 * step
        lib.wait(lambda: self.metric('decoded_tokens_total') > due)  # noqa: B023
        self.kit.fresh.append((lib.version(step), lib.params(step)))
      for response in held.result():
        self.events(response)
    self.assertEqual(self.metric('aborted_calls_total'), 0)
    self.assertEqual(self.metric('weight_swaps_total'), swaps + 2)
    self.assertGreater(self.metric('weight_swap_seconds_max'), 0)
    self.assertEqual(self.metric('weights_version'), 2)
    mixed = 0
    for segment in self.kit.segments(name):
      steps = segment.versions[segment.sampled]
      self.assertTrue(np.all(np.diff(steps) >= 0))
      mixed += len(set(steps.tolist())) > 1
    self.assertGreater(mixed, 20)


class LeaveTest(_Case):

  def _raw(self, key, body, **headers):
    """Sends a request and returns the socket, unread."""
    host, port = urllib.parse.urlsplit(self.kit.url).netloc.split(':')
    content = json.dumps(body)
    head = {
        **lib.bearer(key),
        'Host': host,
        'Content-Length': str(len(content)),
        **headers,
    }
    lines = [f'POST {_CHAT} HTTP/1.1', *(f'{k}: {v}' for k, v in head.items())]
    raw = socket.create_connection((host, int(port)))
    raw.sendall('\r\n'.join([*lines, '', content]).encode())
    self.addCleanup(raw.close)
    return raw

  @parameterized.parameters(True, False)
  def test_who_leaves_frees_the_slot_and_a_retry_draws_the_same(self, stream):
    name, key = self.kit.open()
    body = lib.ask(max_tokens=200, stream=stream)
    cancelled = self.kit.engine.stats().cancelled
    self.kit.gate.clear()
    raw = self._raw(key, body)
    lib.wait(lambda: self.metric('calls') == 1)
    raw.close()
    lib.wait(lambda: self.metric('calls') == 0)
    self.kit.gate.set()
    lib.wait(lambda: self.kit.engine.stats().cancelled == cancelled + 1)
    self.assertTrue(self.kit.settled())
    again = self.http.post(
        _CHAT,
        content=json.dumps(body),  # the same bytes
        headers={**lib.bearer(key), 'x-stainless-retry-count': '1'},
    )
    self.assertEqual(again.status_code, 200)
    (segment,) = self.kit.segments(name)
    lib.check_rescored(self, [segment])
    twin, key = self.kit.open()
    self.post(_CHAT, key, body)
    (same,) = self.kit.segments(twin)
    self.assertEqual(same.tokens.tolist(), segment.tokens.tolist())

  @parameterized.parameters(True, False)
  def test_who_leaves_during_the_commit_has_been_answered(self, stream):
    name, key = self.kit.open()
    body = lib.ask(stream=stream)
    capture, held = self.kit.capture, threading.Event()
    self.addCleanup(held.set)
    self.kit.gate.clear()
    raw = self._raw(key, body)
    lib.wait(lambda: self.metric('calls') == 1)
    session = self.kit.service._sessions[name]
    (work,) = session.works.values()
    lib.wait(work.started.is_set)  # its admission is on disk
    begun = threading.Event()
    blocked = capture._do(lambda _: (begun.set(), held.wait(600)))
    self.assertTrue(begun.wait(600))
    self.kit.gate.set()
    lib.wait(lambda: not capture._jobs.empty())
    raw.close()
    lib.wait(lambda: not session.works)
    self.assertEqual(self.metric('calls'), 1)
    held.set()
    blocked.result(600)
    lib.wait(lambda: self.metric('calls') == 0)
    replayed = self.metric('replayed_replies_total')
    again = self.http.post(
        _CHAT,
        content=json.dumps(body),
        headers={**lib.bearer(key), 'x-stainless-retry-count': '1'},
    )
    self.assertEqual(again.status_code, 200)
    self.assertEqual(self.metric('replayed_replies_total'), replayed + 1)
    (segment,) = self.kit.segments(name)  # it is trained, and once
    lib.check_rescored(self, [segment])

  def test_a_stream_that_is_left_in_the_middle(self):
    name, key = self.kit.open()
    cancelled = self.kit.engine.stats().cancelled
    for i in range(5):
      body = lib.ask(str(i), max_tokens=230, stream=True)
      raw = self._raw(key, body)
      raw.recv(1000)
      raw.close()
    # Some may have ended before; what was left is not trained on, nor lost.
    lib.wait(lambda: self.metric('calls') == 0)
    self.assertTrue(self.kit.settled())
    gone = self.kit.engine.stats().cancelled - cancelled
    self.assertGreater(gone, 0)
    self.assertLen(self.kit.segments(name), 5 - gone)

  def test_duplicates_are_sampled_once(self):
    self.assertTrue(self.kit.settled())  # nobody else is sampled for
    name, key = self.kit.open()
    decoded = self.kit.engine.stats().decoded_tokens
    self.kit.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      twice = {'Idempotency-Key': 'k'}
      same = [
          pool.submit(self.post, _CHAT, key, lib.ask(), **twice)
          for _ in range(8)
      ]
      lib.wait(lambda: self.metric('calls') == 1)
      self.error(self.post(_CHAT, key, lib.ask('other'), **twice), 409)
      self.kit.gate.set()
      texts = {f.result().text for f in same}
    self.assertLen(texts, 1)
    again = self.post(_CHAT, key, lib.ask(), **twice)
    self.assertEqual({again.json()['id']}, {json.loads(*texts)['id']})
    self.assertEqual(again.text, *texts)
    self.error(self.post(_CHAT, key, lib.ask('other'), **twice), 409)
    # Without a key: the same words, said twice, are two calls ...
    retry = {'x-stainless-retry-count': '1'}
    second = self.post(_CHAT, key, lib.ask()).json()
    self.assertNotEqual(second['id'], again.json()['id'])
    # ... of which a retry repeats the last, as a stream too.
    self.assertEqual(self.post(_CHAT, key, lib.ask(), **retry).json(), second)
    count = second['usage']['completion_tokens']
    count += again.json()['usage']['completion_tokens']
    done = self.kit.engine.stats().decoded_tokens - decoded
    self.assertEqual(done, count)
    self.assertLen(self.kit.segments(name), 2)

  def test_a_stream_is_given_again(self):
    _, key = self.kit.open()
    body = lib.ask(stream=True)
    retry = {'x-stainless-retry-count': '2'}
    first = self.events(self.post(_CHAT, key, body))
    again = self.events(self.post(_CHAT, key, body, **retry))

    def text(events):
      return ''.join(
          e['choices'][0]['delta'].get('content', '') for e in events
      )

    self.assertEqual(text(first), text(again))
    self.assertEqual(first[0]['id'], again[0]['id'])

  def test_closing_ends_what_runs(self):
    name, key = self.kit.open()
    self.kit.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      held = pool.submit(self.post, _CHAT, key, lib.ask())
      lib.wait(lambda: self.metric('calls') == 1)
      self.assertEqual(self.kit.segments(name), ())
      self.error(held.result(), 410)
    self.kit.gate.set()


class _Thinker(template.ChatFormat):
  """Reads the first letters of every reply as a thought."""

  def text(self, ids):
    text = super().text(ids)
    return f'<think>\n{text[:8]}{"</think>" * (len(text) > 8)}{text[8:]}'


class ThoughtTest(parameterized.TestCase):

  def test_a_stream_gives_the_thought_first(self):
    chat = _Thinker(lib.tokenizer(), template.COMPACT_TEMPLATE, ['<|end|>'])
    kit = lib.Kit(self.create_tempdir().full_path, chat_format=chat)
    self.addCleanup(kit.close)
    _, key = kit.open('serve')
    kit.delay = 0.05
    body = lib.ask(max_tokens=60, seed=1)
    with httpx.Client(base_url=kit.url, timeout=120) as http:
      header = lib.bearer(key)
      whole = http.post(_CHAT, json=body, headers=header).json()
      body['stream'] = True
      text = http.post(_CHAT, json=body, headers=header).text
    events = [
        json.loads(e.removeprefix('data: '))['choices'][0]['delta']
        for e in text.split('\n\n')[:-2]
    ]
    said = [(k, v) for e in events for k, v in e.items() if v and k != 'role']
    names = [name for name, _ in said]
    self.assertEqual(names, sorted(names, reverse=True))
    self.assertGreater(names.count('content'), 1)
    for name in ('reasoning_content', 'content'):
      pieces = ''.join(piece for n, piece in said if n == name)
      self.assertNotEmpty(pieces)
      self.assertEqual(pieces, whole['choices'][0]['message'][name])


class SlowTest(parameterized.TestCase):
  """Clients that do not go on, and do not leave."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.kit = lib.Kit(cls.enter_context(_folder()), patience=1.0)
    cls.addClassCleanup(cls.kit.close)

  def _connect(self, *sent, receive=None):
    host, port = urllib.parse.urlsplit(self.kit.url).netloc.split(':')
    raw = socket.socket()
    if receive:
      raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    raw.settimeout(600)
    raw.connect((host, int(port)))
    self.addCleanup(raw.close)
    raw.sendall(b''.join(sent))
    return raw

  def _head(self, size):
    _, key = self.kit.open('serve')
    return (
        f'POST {_CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n'
        f'Content-Length: {size}\r\n\r\n'
    ).encode()

  def _ended(self, raw, dribble=b''):
    """Whether the server ends the connection, however the client dribbles."""
    with contextlib.suppress(ConnectionError):
      raw.setblocking(False)
      end = time.monotonic() + 600
      while time.monotonic() < end:
        with contextlib.suppress(BlockingIOError):
          if not raw.recv(1 << 16):
            return True
        time.sleep(0.1)
        raw.sendall(dribble)
      return False
    return True

  def test_no_request(self):
    self.assertTrue(self._ended(self._connect()))

  def test_half_a_head(self):
    raw = self._connect(b'GET /health HTTP/1.1\r\nHost: x\r\nX-A: ')
    self.assertTrue(self._ended(raw, b'a'))

  def test_half_a_body(self):
    raw = self._connect(self._head(10**6), b'{')
    self.assertTrue(self._ended(raw, b' '))
    # Nor does an answer before the body is there let the rest take for ever.
    raw = self._connect(self._head(10**6).replace(b'Bearer', b'B'), b'{')
    self.assertTrue(self._ended(raw, b' '))

  def test_half_a_head_after_an_answer(self):
    raw = self._connect(b'GET /health HTTP/1.1\r\nHost: x\r\n\r\n')
    self.assertStartsWith(raw.recv(100), b'HTTP/1.1 200')
    raw.sendall(b'GET /health HTT')
    self.assertTrue(self._ended(raw))

  def test_half_closed(self):
    raw = self._connect(self._head(100), b'{')
    raw.shutdown(socket.SHUT_WR)
    self.assertTrue(self._ended(raw))
    lib.wait(lambda: not self.kit.server._server.server_state.connections)

  def test_who_takes_nothing_of_the_answer(self):
    connections = self.kit.server._server.server_state.connections
    lib.wait(lambda: not connections)
    ask = b'GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n'
    raw = self._connect(ask * 2000, receive=4096)
    lib.wait(lambda: connections)
    lib.wait(lambda: not connections, 120)
    del raw

  def test_a_call_may_take_longer_than_its_client_may(self):
    content = json.dumps(lib.ask(max_tokens=3)).encode()
    self.kit.gate.clear()
    raw = self._connect(self._head(len(content)), content)
    lib.wait(lambda: self.kit.service._calls == 1)
    time.sleep(3)
    self.kit.gate.set()
    self.assertStartsWith(raw.recv(100), b'HTTP/1.1 200')


class LossTest(parameterized.TestCase):

  def test_an_engine_that_fails_loses_its_calls_until_a_retry(self):
    folder = self.create_tempdir().full_path
    kit = lib.Kit(folder)
    name, key = kit.open()
    other, _ = kit.open()
    retry = {'x-stainless-retry-count': '1'}
    with httpx.Client(base_url=kit.url, timeout=600) as http:
      header = lib.bearer(key)
      kit.gate.clear()
      with concurrent.futures.ThreadPoolExecutor(1) as pool:
        held = pool.submit(http.post, _CHAT, json=lib.ask(), headers=header)
        lib.wait(kit.service.engine.stats)
        lib.wait(lambda: kit.service._calls == 1)
        kit.fresh.append((lib.version(0), lib.params(0)))  # not a newer one
        kit.gate.set()
        response = held.result()
      self.assertEqual(response.status_code, 503)
      self.assertIn('send it again', response.text)
      self.assertEqual(http.get('/health').status_code, 503)
      self.assertEqual(http.get('/ready').status_code, 503)
    kit.close()
    kit = lib.Kit(folder)
    self.addCleanup(lambda: kit.close())
    with self.assertRaisesRegex(ConnectionError, '1 of 1 calls were lost'):
      kit.segments(name)
    self.assertEqual(kit.segments(other), ())
    with httpx.Client(base_url=kit.url, timeout=600) as http:
      text = http.get('/metrics').text
      self.assertIn('composer_lost_calls_total 1.0', text)
      response = http.post(_CHAT, json=lib.ask(), headers={**header, **retry})
      self.assertEqual(response.status_code, 410)

  def test_draining(self):
    kit = lib.Kit(self.create_tempdir().full_path)
    self.addCleanup(kit.close)
    name, key = kit.open()
    with httpx.Client(base_url=kit.url, timeout=600) as http:
      header = lib.bearer(key)
      kit.gate.clear()
      with concurrent.futures.ThreadPoolExecutor(2) as pool:
        held = pool.submit(http.post, _CHAT, json=lib.ask(), headers=header)
        lib.wait(lambda: kit.service._calls == 1)
        draining = pool.submit(kit.server.call, kit.service.drain(60))
        lib.wait(lambda: not kit.service.ready)
        refused = http.post(_CHAT, json=lib.ask(), headers=header)
        self.assertEqual(refused.status_code, 503)
        self.assertIn('retry-after', refused.headers)
        # Nor does it say that a key is unknown: it may only be not known yet.
        unknown = http.get('/v1/models', headers=lib.bearer('unknown'))
        self.assertEqual(unknown.status_code, 503)
        self.assertEqual(http.get('/ready').status_code, 503)
        self.assertEqual(http.get('/health').status_code, 200)
        kit.gate.set()
        self.assertEqual(held.result().status_code, 200)
        draining.result(600)
    self.assertLen(kit.segments(name), 1)


if __name__ == '__main__':
  absltest.main()
