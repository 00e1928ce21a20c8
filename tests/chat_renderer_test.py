"""Tasks in chats: what is written is read, mistakes are answered."""

import asyncio
import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
from tests import template_test
from tests import sampled_policy

from composer_jax import config
from composer_jax import task
from composer_jax import trace
from composer_jax.agents import harness
from composer_jax.agents import tools
from composer_jax.agents import windows
from composer_jax.chat import chat_renderer
from composer_jax.chat import compact_renderer
from composer_jax.chat import template as template_lib
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool as pool_lib

_FILES = {
    'sol.py': 'import helper\n\ndef double(x):\n  return helper.add(x, x)\n',
    'helper.py': 'def add(a, b):\n  return a - b\n',
}
_SUITE = task.Suite(
    {
        'test_sol.py': (
            'import unittest, sol\nclass T(unittest.TestCase):\n'
            '  def test_d(self): self.assertEqual(sol.double(2), 4)\n'
        )
    },
    ('test_sol',),
    ('test_sol.T.test_d',),
)
_TASK = task.Task(
    'repo', 'Repair it: <|end|>', _FILES, _SUITE, task.Limits(2.0, 20.0)
)


@functools.cache
def _renderer():
  """For models that were trained here."""
  texts = [*_FILES.values(), str(chat_renderer.SCHEMAS)] * 20
  tokenizer = compact_renderer.train_tokenizer(texts, 600)
  return chat_renderer.ChatRenderer(template_lib.compact(tokenizer))


@functools.cache
def _published(template):
  return chat_renderer.ChatRenderer(template_test.chat_format(template))


class ToolsTest(parameterized.TestCase):

  @parameterized.parameters(
      (tools.Read('sol.py', 3, 3), '3 def double(x):', False),
      (tools.Read('sol.py', 99), 'sol.py has 5 lines', True),
      (tools.Read('sol.py', -5, -9), '1 import helper', False),
      (tools.Read('none.py'), 'no file none.py', True),
      (tools.Search('return a'), 'helper.py:2:   return a - b', False),
      (tools.Search('(a+)+$'), 'not found', False),
      (tools.Search(''), 'nothing to search for', True),
      (tools.Replace('helper.py', 'a', 'x'), 'found 3 times in', True),
      (tools.Replace('none.py', 'a', 'x'), 'no file none.py', True),
      (tools.Replace('sol.py', '', 'x'), 'sol.py exists', True),
      (tools.Replace('sol.py', 'helper\n', 'helper\n'), 'no change', True),
      (tools.Ask('?'), 'nobody is there', False),
  )
  def test_what_is_shown(self, call, want, failed):
    files = {**_FILES, 'helper.py': 'def add(a, b):\n  return a - b\n'}
    out = asyncio.run(tools.execute(call, _TASK, files, None))
    self.assertStartsWith(out.text, want)
    self.assertEqual(out.failed, failed)
    self.assertEqual(out.files, files)

  def test_replace_and_new_file(self):
    out = tools.replace(_FILES, tools.Replace('helper.py', '-', '+'))
    self.assertEqual(
        out.files['helper.py'], _FILES['helper.py'].replace('-', '+')
    )
    self.assertEqual(out.files['sol.py'], _FILES['sol.py'])
    out = tools.replace(_FILES, tools.Replace('new.py', '', 'x = 1\n'))
    self.assertEqual(out.files['new.py'], 'x = 1\n')

  def test_a_search_that_finds_much_is_cut(self):
    out = tools.search({'a': 'x\n' * 70}, tools.Search('x'))
    self.assertLen(out.text.split('\n'), 51)
    self.assertEndsWith(out.text, 'and 20 more')


class RendererTest(parameterized.TestCase):

  @parameterized.product(
      call=(
          tools.Read('a.py', 2, 9),
          tools.Search('é "quoted" \\ <|im_end|>'),
          tools.Edit(3, '+=', '-='),
          tools.Replace('a.py', 'x\n  y', 'z\n'),
          tools.Ask('why'),
          tools.Run(),
          tools.Done(),
      ),
      template=(
          None,
          template_test.QWEN,
          template_test.KIMI,
          template_test.THINKING,
      ),
  )
  def test_round_trip(self, call, template):
    renderer = _published(template) if template else _renderer()
    ids = renderer.encode_turn([tools.Run(), call])
    self.assertEqual(renderer.parse(ids), [tools.Run(), call])
    self.assertIn(ids[-1], renderer.stop_ids)

  @parameterized.parameters(
      ('read', '{}', 'an argument is missing'),
      ('read', '{"path": 3}', '"path" must be str'),
      ('read', '{"path": "a", "first": true}', '"first" must be int'),
      ('run', '{"x": 1}', 'unknown argument "x"'),
      ('rm', '{}', 'no tool "rm"; have edit, read, '),
      ('run', '[]', 'no tool call'),
      ('run', '[' * 5000, 'no tool call'),
  )
  def test_mistakes_become_text(self, name, arguments, want):
    text = f'{{"name": "{name}", "arguments": {arguments}}}'
    ids = _renderer().encode_summary(f'<tool_call>{text}</tool_call>')
    with self.assertRaisesRegex(tools.ParseError, want):
      _renderer().parse(ids)
    with self.assertRaisesRegex(tools.ParseError, 'turn has no end'):
      _renderer().parse(ids[:-1])

  def test_nothing_follows_done(self):
    ids = _renderer().encode_turn([tools.Done(), tools.Run()])
    with self.assertRaisesRegex(tools.ParseError, 'call after done'):
      _renderer().parse(ids)
    with self.assertRaisesRegex(tools.ParseError, 'no tool call'):
      _renderer().parse(_renderer().encode_summary('run'))

  def test_files_cannot_spell_structure(self):
    ids = _renderer().encode_task(_TASK)
    self.assertNoCommonElements(ids, _renderer().stop_ids)
    self.assertIn('- helper.py, 3 lines', _renderer().text(ids))

  @parameterized.parameters(template_test.QWEN, template_test.KIMI)
  def test_an_episode_is_one_conversation(self, template):
    # Prompt, turn and observation, rendered apart, are the whole rendered at
    # once, except for what a template puts between earlier turns.
    renderer, form = _published(template), template_test.chat_format(template)
    turn = renderer.encode_turn([tools.Run()])
    ids = [
        *renderer.encode_task(_TASK),
        *turn,
        *renderer.encode_observation('1 of 1 tests fail'),
    ]
    call = {'name': 'run', 'arguments': '{}'}
    said = [
        {'role': 'user', 'content': chat_renderer._problem(_TASK, _FILES)},
        {
            'role': 'assistant',
            'content': '',
            'tool_calls': [
                {'id': 'functions.run:0', 'type': 'function', 'function': call}
            ],
        },
        {
            'role': 'tool',
            'content': '1 of 1 tests fail',
            'tool_call_id': 'functions.run:0',
        },
    ]
    self.assertEqual(ids, form.prompt(said, chat_renderer.SCHEMAS))

  def test_a_summary_goes_on_as_the_ids_that_were_sampled(self):
    for template in (template_test.QWEN, template_test.KIMI):
      renderer = _published(template)
      split = [renderer.encode_summary(c)[0] for c in 'tool']
      self.assertNotEqual(split, renderer.encode_summary('tool')[:-1])
      ids = renderer.encode_resumed(
          _TASK, [*split, *renderer.stop_ids], windows.State(_FILES, 2, 1)
      )
      self.assertIn(str(split)[1:-1], str(ids))
      self.assertIn(
          'Your summary:\ntool\nSummaries so far: 1', renderer.text(ids)
      )

  def test_a_template_without_tools_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'shows no tools'):
      chat_renderer.ChatRenderer(template_test.chat_format(template_test.LLAMA))


class EpisodeTest(absltest.TestCase):

  def test_a_repository_is_repaired_over_several_turns(self):
    turns = [
        [tools.Run(), tools.Search('helper.add')],
        [tools.Read('helper.py')],
        [tools.Replace('helper.py', 'a - b', 'a + b'), tools.Run()],
        [tools.Done()],
    ]
    policy = sampled_policy.ScriptedPolicy(
        [_renderer().encode_turn(calls) for calls in turns]
    )
    cfg = config.HarnessConfig(
        max_turns=6,
        max_turn_tokens=200,
        max_context_tokens=4000,
        tool_output_bytes=2000,
        tool_seconds=20.0,
    )

    async def main():
      async with pool_lib.Pool(2) as pool:
        async with pool.session() as session:
          episode = await harness.run(
              _TASK, session, policy, _renderer(), cfg=cfg, seed=0
          )
        async with pool.session() as session:
          grade = await grading.grade(
              session, _TASK, episode.submission, _SUITE
          )
      return episode, grade

    episode, grade = asyncio.run(main())
    self.assertEqual(episode.stop, trace.StopReason.FINISHED)
    self.assertTrue(grade.solved)
    shown = _renderer().text(episode.segments[0].tokens)
    self.assertIn('1 of 1 tests fail\ntest_sol.T.test_d: AssertionError', shown)
    self.assertIn('sol.py:4:   return helper.add(x, x)', shown)
    self.assertIn('2   return a - b', shown)
    self.assertIn('ok\nok, 1 tests', shown)
    self.assertEqual(episode.meta['replaces'], '1')
    unsolved = dataclasses.replace(_TASK, files=dict(_FILES))
    self.assertEqual(unsolved.files, _FILES)  # the task itself is untouched


if __name__ == '__main__':
  absltest.main()
