"""The openai client, as people use it, against the endpoint."""

import asyncio
import json
import tempfile

from absl.testing import absltest
import openai
from tests import serving_kit as lib

from composer_jax.chat import template
from composer_jax.chat import tool_calls

_TOOL = {'type': 'function', 'function': {'name': 'run'}}


class _Caller(template.ChatFormat):
  """Reads every reply of an untrained model as a call of `run`, with its text.

  Nothing of it is certain to be content before the end.
  """

  def parse(self, ids, tools=()):
    arguments = json.dumps({'command': self.text(ids)})
    return tool_calls.Reply('run it', (tool_calls.ToolCall('run', arguments),))

  def visible(self, ids):
    return 'run it'[: len(ids)]


class OpenAiTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enter_context(tempfile.TemporaryDirectory())
    cls.kit = lib.Kit(folder)
    cls.addClassCleanup(cls.kit.close)

  def setUp(self):
    super().setUp()
    self.name, self.key = self.kit.open()
    self.client = openai.OpenAI(base_url=f'{self.kit.url}/v1', api_key=self.key)
    self.addCleanup(self.client.close)
    self.addCleanup(lambda: self.assertTrue(self.kit.settled()))

  def _rescored(self, count):
    segments = self.kit.segments(self.name)
    self.assertLen(segments, count)
    lib.check_rescored(self, segments)
    return segments

  def test_logprobs_are_the_captured_bits(self):
    reply = self.client.chat.completions.create(**lib.ask(), logprobs=True)
    (choice,) = reply.choices
    self.assertIn(choice.finish_reason, ('stop', 'length'))
    (segment,) = self._rescored(1)
    logps = [float(x) for x in segment.logps[segment.sampled]]
    self.assertEqual([t.logprob for t in choice.logprobs.content], logps)
    self.assertLen(logps, reply.usage.completion_tokens)

  def test_a_stream(self):
    stream = self.client.chat.completions.create(
        **lib.ask(max_tokens=40, stream=True)
    )
    text = ''.join(c.choices[0].delta.content or '' for c in stream)
    (segment,) = self._rescored(1)
    drawn = segment.tokens[segment.sampled].tolist()
    self.assertEqual(text, self.kit.chat.text(drawn))

  def test_cancelled_in_the_middle_of_a_stream(self):
    stream = self.client.chat.completions.create(
        **lib.ask(max_tokens=230, stream=True)
    )
    next(iter(stream))
    stream.close()
    lib.wait(lambda: not self.kit.service._calls)
    self.assertLessEqual(len(self.kit.segments(self.name)), 1)

  def test_async(self):

    async def many():
      async with openai.AsyncOpenAI(
          base_url=f'{self.kit.url}/v1', api_key=self.key
      ) as client:
        create = client.chat.completions.create
        replies = [create(**lib.ask(str(i))) for i in range(9)]
        stream = await create(**lib.ask('stream', stream=True))
        text = [c.choices[0].delta.content or '' async for c in stream]
        return await asyncio.gather(*replies), ''.join(text)

    replies, text = asyncio.run(many())
    self.assertLen({r.id for r in replies}, 9)
    segments = self._rescored(10)
    texts = [self.kit.chat.text(s.tokens[s.sampled].tolist()) for s in segments]
    self.assertIn(text, texts)

  def test_plain_completions(self):
    ids = self.kit.chat.encode('def add')
    reply = self.client.completions.create(
        model=lib.MODEL, prompt=ids, max_tokens=4, logprobs=1
    )
    (segment,) = self._rescored(1)
    logps = [float(x) for x in segment.logps[segment.sampled]]
    self.assertEqual(reply.choices[0].logprobs.token_logprobs, logps)

  def test_errors_have_their_class(self):
    create = self.client.chat.completions.create
    with self.assertRaisesRegex(openai.BadRequestError, 'context holds 256'):
      create(**lib.ask('x' * 5000))
    with self.assertRaises(openai.NotFoundError):
      create(**lib.ask(model='other'))
    with self.assertRaises(openai.AuthenticationError):
      self.client.with_options(api_key='guess').models.list()
    self.assertEqual(self.client.models.list().data[0].id, lib.MODEL)


class ToolTest(absltest.TestCase):

  def test_calls_go_out_and_results_come_in(self):
    caller = _Caller(lib.tokenizer(), template.COMPACT_TEMPLATE, ['<|end|>'])
    kit = lib.Kit(
        self.create_tempdir().full_path,
        chat_format=caller,
    )
    self.addCleanup(kit.close)
    name, key = kit.open()
    client = openai.OpenAI(base_url=f'{kit.url}/v1', api_key=key)
    self.addCleanup(client.close)
    messages = [{'role': 'user', 'content': 'ls'}]
    for turn in range(3):
      request = dict(
          model=lib.MODEL, messages=messages, tools=[_TOOL], max_tokens=6
      )
      if turn == 1:  # as a stream: no part of a call is content
        text, call = '', None
        stream = client.chat.completions.create(**request, stream=True)
        for event in stream:
          (choice,) = event.choices
          text += choice.delta.content or ''
          if choice.delta.tool_calls:
            (call,) = choice.delta.tool_calls
            self.assertEqual(text, 'run it')
      else:
        (choice,) = client.chat.completions.create(**request).choices
        text = choice.message.content
        (call,) = choice.message.tool_calls
      self.assertEqual(text, 'run it')
      self.assertIn(choice.finish_reason, ('tool_calls', 'length'))
      said = json.loads(call.function.arguments)['command']
      # As clients do: other spaces in the arguments, fields dropped.
      messages += [
          {
              'role': 'assistant',
              'content': 'run it',
              'tool_calls': [
                  {
                      'id': call.id,
                      'type': 'function',
                      'function': {
                          'name': 'run',
                          'arguments': json.dumps({'command': said}, indent=1),
                      },
                  }
              ],
          },
          {'role': 'tool', 'tool_call_id': call.id, 'content': f'{turn}'},
      ]
    (segment,) = kit.segments(name)  # every turn went on from exact ids
    self.assertGreater(segment.sampled.sum(), 6)
    text = caller.text(segment.tokens.tolist())
    self.assertIn('<|obs|>1<|act|>', text)


if __name__ == '__main__':
  absltest.main()
