"""Episodes that outgrow their context: summaries, segments, what is trained."""

import asyncio
import dataclasses
import functools
import unittest

from absl.testing import absltest
import numpy as np
from tests import sampled_policy
from tests import summary_config

from composer_jax import config
from composer_jax import trace
from composer_jax.agents import harness
from composer_jax.agents import tools
from composer_jax.agents import windows
from composer_jax.chat import chat_renderer
from composer_jax.chat import compact_renderer
from composer_jax.chat import template
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool as pool_lib

_SOURCE = summary_config.experiment().tasks
_TASK = _SOURCE.task(0, 'train')
_KNOWN = _SOURCE._instance_of(_TASK)
_CFG = summary_config.HARNESS


@functools.cache
def _renderer():
  texts = [_SOURCE.task(k, 'warmup').files['f.py'] for k in range(300)]
  return compact_renderer.CompactRenderer(
      compact_renderer.train_tokenizer(texts, 384)
  )


def _turn(*calls):
  return _renderer().encode_turn(calls)


def _summary(text):
  return _renderer().encode_summary(text)


def _gold():
  """The turns and summaries of an episode that succeeds."""
  (a, b), (old_a, old_b) = _KNOWN.right, _KNOWN.wrong
  return [
      _turn(tools.Run()),
      _summary(str(a)),
      _turn(_KNOWN.edit(0, old_a, a), tools.Run()),
      _summary(str(b)),
      _turn(_KNOWN.edit(1, old_b, b), tools.Done()),
  ]


async def _play(policy, renderer=None, **fields):
  if not hasattr(policy, 'complete'):
    policy = sampled_policy.ScriptedPolicy(policy)
  async with pool_lib.Pool(1) as pool, pool.session() as session:
    return await harness.run(
        _TASK,
        session,
        policy,
        renderer or _renderer(),
        cfg=dataclasses.replace(_CFG, **fields),
        seed=5,
    )


def _drawn(segment):
  return segment.tokens[segment.sampled].tolist()


class SummaryTest(unittest.IsolatedAsyncioTestCase):

  async def test_fires_once_per_crossing_and_again(self):
    policy = sampled_policy.ScriptedPolicy(_gold())
    episode = await _play(policy)
    self.assertEqual(episode.stop, trace.StopReason.FINISHED)
    self.assertEqual(
        (episode.meta['turns'], episode.meta['summaries']), ('3', '2')
    )
    self.assertEqual(len(policy.contexts), 5)
    self.assertEqual(len(set(policy.seeds)), 5)
    async with pool_lib.Pool(1) as pool:
      grade = await grading.Grader(_SOURCE, pool)(_TASK, episode.submission)
    self.assertTrue(grade.solved)
    # More context than there is, in windows that all fit.
    lengths = [len(s) for s in episode.segments]
    self.assertGreater(sum(lengths), _CFG.max_context_tokens)
    self.assertLessEqual(max(lengths), _CFG.max_context_tokens)

  async def test_every_sampled_token_is_trained_once_where_it_was_drawn(self):
    first, a, second, b, third = _gold()
    episode = await _play([first, a, second, b, third])
    self.assertEqual(
        [_drawn(s) for s in episode.segments], [first + a, second + b, third]
    )
    query = _renderer().encode_summary_query()
    for segment, text in zip(episode.segments, (a, b), strict=False):
      end = len(segment) - len(text)
      asked = slice(end - len(query), end)
      self.assertEqual(segment.tokens[asked].tolist(), query)
      self.assertFalse(segment.sampled[asked].any())
      self.assertTrue(segment.sampled[end:].all())
      self.assertTrue((segment.logps[segment.sampled] == -0.5).all())

  async def test_next_window_is_task_summary_and_state(self):
    policy = sampled_policy.ScriptedPolicy(_gold())
    await _play(policy)
    (a, b), wrong = _KNOWN.right, _KNOWN.wrong
    for at, digit, constants, counts in (
        (2, a, wrong, '1 2'),
        (4, b, (a, wrong[1]), '2 1'),
    ):
      context = policy.contexts[at]
      self.assertFalse(context.sampled.any())
      self.assertIsNone(context.routing)  # of other windows, of no use here
      said = _renderer().text(context.tokens.tolist())
      lines = _KNOWN.source(constants).split('\n')
      code = ''.join(f'<|{n}|>{line}' for n, line in enumerate(lines))
      rest = f'<|obs|>{digit}<|task|>{counts}<|act|>'
      self.assertEqual(said, f'<|bos|><|task|>{code}{rest}')

  async def test_a_summary_goes_on_as_the_ids_that_were_sampled(self):
    # Two ids that decode to one token's text: re-encoding would merge them.
    tokenizer = _renderer()._tokenizer
    split = [tokenizer.token_to_id('+'), tokenizer.token_to_id('=')]
    self.assertEqual(len(tokenizer.encode('+=').ids), 1)
    for renderer in (
        _renderer(),
        chat_renderer.ChatRenderer(template.compact(tokenizer)),
    ):
      start = renderer.encode_resumed(
          _TASK, split, windows.State(_TASK.files, 2, 1)
      )
      pairs = zip(start, start[1:], strict=False)
      self.assertIn(tuple(split), list(pairs))
    policy = sampled_policy.ScriptedPolicy(
        [_turn(tools.Run()), split + _turn(), _turn(tools.Done())]
    )
    await _play(policy)
    tokens = policy.contexts[2].tokens.tolist()
    self.assertIn(tuple(split), list(zip(tokens, tokens[1:], strict=False)))

  async def test_in_text_and_json(self):
    tokenizer = _renderer()._tokenizer
    renderer = chat_renderer.ChatRenderer(template.compact(tokenizer))
    change = tools.Replace('f.py', 'def f', 'def  f')
    said = tokenizer.encode('f.py has a wrong constant').ids
    policy = sampled_policy.ScriptedPolicy(
        [
            renderer.encode_turn([change]),
            [*said, *renderer.stop_ids],
            renderer.encode_turn([tools.Done()]),
        ]
    )
    episode = await _play(
        policy,
        renderer,
        max_turn_tokens=300,
        max_context_tokens=6000,
        summary_trigger_tokens=len(renderer.encode_task(_TASK)) + 9,
        summary_tokens=40,
    )
    self.assertEqual(episode.stop, trace.StopReason.FINISHED)
    self.assertIn('def  f', episode.submission['f.py'])
    asked, resumed = (
        tokenizer.decode(c.tokens.tolist(), skip_special_tokens=False)
        for c in policy.contexts[1:]
    )
    self.assertIn('not with tool calls', asked)
    self.assertIn('- f.py, 4 lines, changed\n', resumed)
    self.assertIn('Your summary:\nf.py has a wrong constant\n', resumed)
    self.assertIn('Summaries so far: 1. Turns left: 2.', resumed)

  async def test_tools_are_off_in_a_summary(self):
    run, edit, _, _, done = _gold()
    call = _turn(tools.Done())
    self.assertLessEqual(len(call), _CFG.summary_tokens)
    policy = sampled_policy.ScriptedPolicy([run, call, _turn(tools.Done())])
    episode = await _play(policy)
    self.assertEqual(len(policy.contexts), 3)
    self.assertEqual(episode.meta['dones'], '1')
    self.assertEqual(episode.meta['turns'], '2')
    self.assertEqual(episode.submission, _TASK.files)
    del edit, done

  async def test_budget_of_a_summary_and_an_empty_one(self):
    run, *_ = _gold()
    (seven,) = _summary('7')[:-1]
    for script, passed_on in (([seven] * 9, [seven] * 4), (_turn(), [])):
      policy = sampled_policy.ScriptedPolicy([run, script, _turn(tools.Done())])
      episode = await _play(policy)
      self.assertEqual(episode.stop, trace.StopReason.FINISHED)
      state = windows.State(_TASK.files, 2, 1)
      self.assertEqual(
          policy.contexts[2].tokens.tolist(),
          _renderer().encode_resumed(_TASK, passed_on, state),
      )
      self.assertEqual(episode.meta['summary_tokens'], str(len(passed_on)))

  async def test_a_summary_is_no_turn_and_none_follows_the_last(self):
    run, a, *_ = _gold()
    episode = await _play([run, a], max_turns=1)
    self.assertEqual(episode.stop, trace.StopReason.MAX_TURNS)
    self.assertEqual([_drawn(s) for s in episode.segments], [run])
    self.assertNotIn('summaries', episode.meta)
    episode = await _play([run, a, run, a, run], max_turns=2)
    self.assertEqual(episode.stop, trace.StopReason.MAX_TURNS)
    self.assertEqual([_drawn(s) for s in episode.segments], [run + a, run])

  async def test_a_window_that_begins_above_the_trigger_never_crosses(self):
    run, a, *_ = _gold()
    resumed = len(_renderer().encode_task(_TASK)) + 3
    policy = sampled_policy.ScriptedPolicy([run, a, run, run])
    # The resumed window is longer than the trigger, the first one is not.
    episode = await _play(policy, summary_trigger_tokens=resumed, max_turns=9)
    self.assertEqual(episode.meta['summaries'], '1')
    self.assertEqual(episode.stop, trace.StopReason.MAX_TOKENS)
    self.assertEqual(
        [_drawn(s) for s in episode.segments], [run + a, run + run]
    )

  async def test_a_start_that_does_not_fit_ends_the_episode(self):

    class Verbose(compact_renderer.CompactRenderer):

      def encode_resumed(self, task, summary, state):
        start = super().encode_resumed(task, summary, state)
        return start * 4

    run, a, *_ = _gold()
    renderer = Verbose(_renderer()._tokenizer)
    episode = await _play([run, a], renderer)
    self.assertEqual(episode.stop, trace.StopReason.MAX_TOKENS)
    self.assertEqual(episode.submission, _TASK.files)  # graded all the same
    self.assertEqual([_drawn(s) for s in episode.segments], [run + a])

  async def test_an_output_leaves_room_for_the_summary(self):
    run, a, *_ = _gold()
    episode = await _play([run, a, run, a, run], max_context_tokens=62)
    query = _renderer().encode_summary_query()
    self.assertEqual(episode.meta['summaries'], '2')
    for segment in episode.segments[:2]:
      self.assertLessEqual(len(segment), 62)
      end = len(segment) - len(a)
      asked = segment.tokens[end - len(query) : end]
      self.assertEqual(asked.tolist(), query)

  async def test_without_a_trigger_the_context_is_the_end(self):
    run, _, second, *_ = _gold()
    episode = await _play([run, second], summary_trigger_tokens=None)
    self.assertEqual(episode.stop, trace.StopReason.MAX_TOKENS)
    self.assertEqual([_drawn(s) for s in episode.segments], [run + second])

  async def test_summaries_can_be_left_out_of_the_loss(self):
    script = _gold()
    trained = await _play(script)
    masked = await _play(script, train_summaries=False)
    first, _, second, _, third = script
    self.assertEqual(
        [_drawn(s) for s in masked.segments], [first, second, third]
    )
    for a, b in zip(trained.segments, masked.segments, strict=True):
      np.testing.assert_array_equal(a.tokens, b.tokens)
      np.testing.assert_array_equal(a.routing.experts, b.routing.experts)
      self.assertFalse(b.logps[~b.sampled].any())

  async def test_a_server_lost_during_a_summary_is_infrastructure(self):

    class Lost(sampled_policy.ScriptedPolicy):

      async def complete(self, context, **kwargs):
        if len(self.seeds) == 1:
          raise ConnectionError('gone')
        return await super().complete(context, **kwargs)

    episode = await _play(Lost(_gold()))
    self.assertEqual(episode.stop, trace.StopReason.INFRA_ERROR)
    self.assertIsNone(episode.submission)

  async def test_the_same_episode_twice_is_the_same(self):
    a, b = await asyncio.gather(_play(_gold()), _play(_gold()))
    self.assertEqual(
        [s.tokens.tolist() for s in a.segments],
        [s.tokens.tolist() for s in b.segments],
    )


class ConfigTest(absltest.TestCase):

  def test_a_trigger_leaves_room_for_turn_and_summary(self):
    for trigger in (0, 64, 80):
      with self.assertRaisesRegex(ValueError, 'summary_trigger_tokens'):
        dataclasses.replace(_CFG, summary_trigger_tokens=trigger)

  def test_off_by_default(self):
    self.assertIsNone(config.HarnessConfig().summary_trigger_tokens)


if __name__ == '__main__':
  absltest.main()
