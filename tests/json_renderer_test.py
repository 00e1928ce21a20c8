"""Repository tools in JSON: what is written is read, mistakes are answered."""

import asyncio
import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
from tests import sampled_policy

from composer_jax import config
from composer_jax import trace
from composer_jax.agents import grading
from composer_jax.agents import harness
from composer_jax.agents import json_renderer
from composer_jax.agents import renderer as renderer_lib
from composer_jax.agents import sandbox
from composer_jax.agents import tasks
from composer_jax.agents import tools

_FILES = {
    'sol.py': 'import helper\n\ndef double(x):\n  return helper.add(x, x)\n',
    'helper.py': 'def add(a, b):\n  return a - b\n',
}
_SUITE = tasks.Suite(
    {
        'test_sol.py': (
            'import unittest, sol\nclass T(unittest.TestCase):\n'
            '  def test_d(self): self.assertEqual(sol.double(2), 4)\n'
        )
    },
    ('test_sol',),
    ('test_sol.T.test_d',),
)
_TASK = tasks.Task(
    'repo', 'Repair it: <|end|>', _FILES, _SUITE, tasks.Limits(2.0, 20.0)
)


@functools.cache
def _renderer():
  texts = [*_FILES.values(), json_renderer._HELP] * 20
  return json_renderer.JsonRenderer(renderer_lib.train_tokenizer(texts, 600))


def _text(ids):
  return _renderer()._tokenizer.decode(list(ids), skip_special_tokens=True)


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

  @parameterized.parameters(
      tools.Read('a.py', 2, 9),
      tools.Search('é "quoted" \\ <|end|>'),
      tools.Replace('a.py', 'x\n  y', 'z\n'),
      tools.Ask('why'),
      tools.Run(),
      tools.Done(),
  )
  def test_round_trip(self, call):
    ids = _renderer().encode_turn([call])
    self.assertEqual(_renderer().parse(ids), [call])

  @parameterized.parameters(
      ('{"tool": "read"}', 'an argument is missing'),
      ('{"tool": "read", "path": 3}', '"path" must be str'),
      ('{"tool": "read", "path": "a", "first": true}', '"first" must be int'),
      ('{"tool": "run", "x": 1}', 'unknown argument "x"'),
      ('{"tool": "rm"}', '"tool" must be one of'),
      ('[]', '"tool" must be one of'),
      ('{"tool": ["read"]}', '"tool" must be one of'),
      ('run', 'no JSON'),
      ('[' * 5000, 'no JSON'),
      ('{"tool": "done"}\n{"tool": "run"}', 'call after done'),
      ('\n', 'no tool call'),
  )
  def test_mistakes_become_text(self, text, want):
    ids = [*_renderer()._encode(text), *_renderer().stop_ids]
    with self.assertRaisesRegex(tools.ParseError, want):
      _renderer().parse(ids)
    with self.assertRaisesRegex(tools.ParseError, 'turn has no end'):
      _renderer().parse(ids[:-1])

  def test_files_cannot_spell_structure(self):
    ids = _renderer().encode_task(_TASK)
    self.assertEqual(ids.count(_renderer()._ids['<|end|>']), 0)
    self.assertIn('- helper.py, 3 lines', _text(ids))


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
      async with sandbox.Pool(2) as pool:
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
    shown = _text(episode.segments[0].tokens)
    self.assertIn('1 of 1 tests fail\ntest_sol.T.test_d: AssertionError', shown)
    self.assertIn('sol.py:4:   return helper.add(x, x)', shown)
    self.assertIn('2   return a - b', shown)
    self.assertIn('ok\nok, 1 tests', shown)
    self.assertEqual(episode.meta['replaces'], '1')
    unsolved = dataclasses.replace(_TASK, files=dict(_FILES))
    self.assertEqual(unsolved.files, _FILES)  # the task itself is untouched


if __name__ == '__main__':
  absltest.main()
