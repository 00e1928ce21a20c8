"""The agent loop, with scripted policies, the real renderer and sandboxes."""

import asyncio
import functools
import unittest

from absl.testing import absltest
import numpy as np
from tests import sampled_policy

from composer_jax import config
from composer_jax import trace
from composer_jax.agents import harness
from composer_jax.agents import tools
from composer_jax.chat import compact_renderer
from composer_jax.environments import micro_repair
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool as pool_lib

_SOURCE = micro_repair.MicroRepair()
_TASK = _SOURCE.task(0, 'train')
_CFG = config.HarnessConfig(max_context_tokens=256, max_turn_tokens=64)
_EDIT = tools.Edit(1, '=', '+=')
_ENDLESS = 'while True: pass'


@functools.cache
def _renderer():
  texts = [_SOURCE.task(k, 'warmup').files['f.py'] for k in range(300)]
  return compact_renderer.CompactRenderer(
      compact_renderer.train_tokenizer(texts, 512)
  )


def _turn(*calls):
  return _renderer().encode_turn(calls)


async def _play(*turns, task=_TASK, cfg=_CFG, policy=None, seed=5):
  policy = policy or sampled_policy.ScriptedPolicy(turns)
  async with pool_lib.Pool(1) as pool, pool.session() as session:
    return await harness.run(
        task, session, policy, _renderer(), cfg=cfg, seed=seed
    )


class HarnessTest(unittest.IsolatedAsyncioTestCase):

  async def test_edit_and_done_in_one_turn(self):
    (right,) = [
        e for e in _SOURCE.legal_edits(_TASK) if _SOURCE._repairs(_TASK, e)
    ][:1]
    turn = _turn(right, tools.Done())
    episode = await _play(turn)
    self.assertEqual(episode.stop, trace.StopReason.FINISHED)
    async with pool_lib.Pool(1) as pool:
      grade = await grading.Grader(_SOURCE, pool)(_TASK, episode.submission)
    self.assertTrue(all(grade.passed))
    (window,) = episode.segments
    prompt = _renderer().encode_task(_TASK)
    self.assertEqual(window.tokens.tolist(), prompt + turn)
    self.assertEqual(
        window.sampled.tolist(), [False] * len(prompt) + [True] * len(turn)
    )
    self.assertEqual(episode.meta, {'dones': '1', 'edits': '1', 'turns': '1'})

  async def test_what_was_sampled_comes_back_unchanged(self):
    # Two ids that decode to one token's text: re-encoding would merge them.
    ids = _renderer()._ids
    tokenizer = _renderer()._tokenizer
    split = [tokenizer.token_to_id('+'), tokenizer.token_to_id('=')]
    self.assertEqual(len(tokenizer.encode('+=').ids), 1)
    odd = [ids['<|edit|>'], ids['<|1|>'], *split, ids['<|to|>'], *split]
    odd.append(ids['<|end|>'])
    policy = sampled_policy.ScriptedPolicy([odd, _turn(tools.Done())])
    episode = await _play(policy=policy)
    tokens = episode.segments[0].tokens.tolist()
    start = len(_renderer().encode_task(_TASK))
    self.assertEqual(tokens[start : start + len(odd)], odd)
    self.assertEqual(
        policy.contexts[1].tokens.tolist()[start : start + len(odd)], odd
    )

  async def test_windows_grow_by_observations_with_blank_routes(self):
    policy = sampled_policy.ScriptedPolicy(
        [_turn(tools.Run()), _turn(_EDIT), _turn(tools.Done())]
    )
    episode = await _play(policy=policy)
    first, second, _ = policy.contexts
    self.assertIsNone(first.routing)
    turn = len(first) + len(_turn(tools.Run()))
    rows = second.routing.experts
    self.assertTrue((rows[: turn - 1] == 1).all())
    self.assertTrue((rows[turn - 1 :] == 255).all())
    self.assertTrue((second.versions[turn:] == -1).all())
    self.assertFalse(second.sampled[turn:].any())
    said = _renderer().text(second.tokens[turn:].tolist())
    self.assertRegex(said, r'^<\|obs\|>\[.*\]=.* not .*<\|act\|>$')
    self.assertEqual(
        policy.seeds, [trace.draw_seed(5, turn) for turn in range(3)]
    )
    self.assertEqual(len(set(policy.seeds)), 3)
    self.assertEqual(len(episode.segments), 1)
    self.assertEqual(
        episode.segments[0].versions.min(), 1, 'every token has a version'
    )

  async def test_always_invalid_call_is_answered_kept_and_ends(self):
    broken = _turn(_EDIT)[:-1]  # no end
    policy = sampled_policy.ScriptedPolicy([broken])
    episode = await _play(policy=policy)
    self.assertEqual(episode.stop, trace.StopReason.PARSE_ERROR)
    self.assertEqual(episode.meta['bad_turns'], '3')
    window = episode.segments[0]
    self.assertEqual(window.sampled.sum(), 3 * len(broken))
    self.assertIn('turn has no end', _renderer().text(window.tokens.tolist()))
    self.assertEqual(episode.submission, _TASK.files)  # graded like any other
    async with pool_lib.Pool(1) as pool:
      grade = await grading.Grader(_SOURCE, pool)(_TASK, episode.submission)
    self.assertTrue(grade.valid)
    self.assertFalse(all(grade.passed))

  async def test_a_bad_turn_executes_nothing(self):
    turn = _turn(_EDIT, tools.Done(), tools.Run())
    episode = await _play(turn, _turn(tools.Done()))
    self.assertEqual(episode.submission, _TASK.files)
    self.assertEqual(episode.stop, trace.StopReason.FINISHED)

  async def test_failed_call_is_an_observation(self):
    episode = await _play(_turn(tools.Edit(9, 'a', 'b')), _turn(tools.Done()))
    said = _renderer().text(episode.segments[0].tokens.tolist())
    self.assertIn('<|obs|>no line 9<|act|>', said)
    self.assertEqual(episode.meta['failed_calls'], '1')

  async def test_endless_loop_is_the_policys_failure(self):
    (source,) = _TASK.files.values()
    head = source.split('\n')[1]
    turn = _turn(tools.Edit(1, head, f' {_ENDLESS}'), tools.Run())
    episode = await _play(turn, _turn(tools.Done()))
    self.assertEqual(episode.stop, trace.StopReason.FINISHED)
    said = _renderer().text(episode.segments[0].tokens.tolist())
    self.assertIn('not timeout<|act|>', said)
    async with pool_lib.Pool(1) as pool:
      grade = await grading.Grader(_SOURCE, pool)(_TASK, episode.submission)
    self.assertEqual((grade.valid, grade.failure), (True, 'timeout'))
    self.assertFalse(any(grade.passed))

  async def test_fork_bomb_is_the_policys_failure(self):
    (source,) = _TASK.files.values()
    head = source.split('\n')[1]
    bomb = ' import os;[os.fork() for _ in range(99)]'
    cfg = config.HarnessConfig(max_context_tokens=300, max_turn_tokens=120)
    turn = _turn(tools.Edit(1, head, bomb), tools.Run())
    episode = await _play(turn, _turn(tools.Done()), cfg=cfg)
    self.assertEqual(episode.stop, trace.StopReason.FINISHED)
    async with pool_lib.Pool(1) as pool:
      grade = await grading.Grader(_SOURCE, pool)(_TASK, episode.submission)
    self.assertTrue(grade.valid)
    self.assertFalse(any(grade.passed))

  async def test_budgets(self):
    room = len(_renderer().encode_task(_TASK))
    turns = await _play(_turn(_EDIT), cfg=config.HarnessConfig(max_turns=2))
    self.assertEqual(turns.stop, trace.StopReason.MAX_TURNS)
    self.assertEqual(turns.meta['turns'], '2')
    cfg = config.HarnessConfig(max_context_tokens=room + 8)
    tokens = await _play(_turn(_EDIT), cfg=cfg)
    self.assertEqual(tokens.stop, trace.StopReason.MAX_TOKENS)
    self.assertLessEqual(len(tokens.segments[0]), room + 8)
    self.assertIsNotNone(tokens.submission)
    cfg = config.HarnessConfig(max_context_tokens=room)
    misfit = await _play(_turn(_EDIT), cfg=cfg)
    self.assertIn(f'max_context_tokens={room}', misfit.meta['failure'])
    self.assertEqual(misfit.segments, ())
    self.assertIsNone(misfit.submission)
    self.assertIs(misfit.stop, trace.StopReason.MAX_TOKENS)

  async def test_turn_is_cut_to_its_budget(self):
    cfg = config.HarnessConfig(max_turn_tokens=3, max_turns=1)
    episode = await _play(_turn(_EDIT), cfg=cfg)
    self.assertEqual(episode.segments[0].sampled.sum(), 3)
    self.assertEqual(episode.stop, trace.StopReason.PARSE_ERROR)

  async def test_tool_output_is_bounded(self):
    cfg = config.HarnessConfig(max_context_tokens=400, tool_output_bytes=12)
    episode = await _play(
        _turn(*[tools.Run()] * 9), _turn(tools.Done()), cfg=cfg
    )
    said = _renderer().text(episode.segments[0].tokens.tolist())
    shown = said.split('<|obs|>')[1].split('<|act|>')[0]
    self.assertEqual(len(shown), 12)
    self.assertIn('...', shown)

  async def test_lost_policy_and_dead_sandbox_are_infrastructure(self):

    class Lost:

      async def complete(self, context, **unused):
        raise ConnectionError('gone')

    episode = await _play(policy=Lost())
    self.assertEqual(episode.stop, trace.StopReason.INFRA_ERROR)
    self.assertIsNone(episode.submission)
    self.assertIn('gone', episode.meta['failure'])
    policy = sampled_policy.ScriptedPolicy([_turn(tools.Run())])
    async with pool_lib.Pool(1) as pool, pool.session() as session:
      await session.exec('true')
      session._box._process.kill()
      session._box._process.wait()
      episode = await harness.run(
          _TASK, session, policy, _renderer(), cfg=_CFG, seed=0
      )
    self.assertEqual(episode.stop, trace.StopReason.INFRA_ERROR)

  async def test_whatever_a_turn_does_to_us_is_the_policys_failure(self):

    class Fragile(compact_renderer.CompactRenderer):
      """Breaks where a turn is read, or where its result is shown."""

      broken = 'parse'

      def parse(self, ids):
        if self.broken == 'parse':
          raise RuntimeError('odd turn')
        return super().parse(ids)

      def encode_observation(self, text):
        raise RecursionError('odd text')

    renderer = Fragile(_renderer()._tokenizer)
    for broken in ('parse', 'show'):
      renderer.broken = broken
      policy = sampled_policy.ScriptedPolicy([_turn(_EDIT)])
      async with pool_lib.Pool(1) as pool, pool.session() as session:
        with self.assertLogs(level='ERROR') as log:
          episode = await harness.run(
              _TASK, session, policy, renderer, cfg=_CFG, seed=0
          )
      self.assertIn('Traceback', log.output[0])
      self.assertIn(f'{_TASK.id}', log.output[0])
      self.assertEqual(episode.stop, trace.StopReason.POLICY_FAILURE)
      self.assertIn('odd', episode.meta['failure'])
      self.assertEqual(episode.segments[0].sampled.sum(), len(_turn(_EDIT)))
      self.assertIsNotNone(episode.submission)  # graded like any other

  async def test_a_policy_that_rewrites_history_is_refused(self):
    for field, change in (
        ('tokens', lambda a: a + 1),
        ('logps', lambda a: a - 1),
        ('sampled', lambda a: ~a),
    ):

      class Forger(sampled_policy.ScriptedPolicy):

        async def complete(self, context, **kwargs):
          window = await super().complete(context, **kwargs)
          getattr(window, field)[:3] = change(getattr(window, field)[:3])  # noqa: B023
          return window

      with self.assertRaisesRegex(ValueError, 'continue its context'):
        await _play(policy=Forger([_turn(tools.Done())]))

  async def test_recorded_routes_are_immutable(self):

    class Rerouter(sampled_policy.ScriptedPolicy):

      async def complete(self, context, **kwargs):
        window = await super().complete(context, **kwargs)
        window.routing.experts[0] = len(self.seeds) + 40
        return window

    with self.assertRaisesRegex(ValueError, 'routing was changed'):
      await _play(policy=Rerouter([_turn(tools.Run())]))

  async def test_the_same_episode_twice_is_the_same(self):
    turns = [_turn(tools.Run()), _turn(_EDIT, tools.Done())]
    a, b = await asyncio.gather(_play(*turns), _play(*turns))
    np.testing.assert_array_equal(a.segments[0].tokens, b.segments[0].tokens)
    self.assertEqual(
        (a.stop, a.submission, a.meta), (b.stop, b.submission, b.meta)
    )


class TurnSeedTest(absltest.TestCase):

  def test_seeds_are_32_bits_stable_and_distinct(self):
    seeds = {trace.draw_seed(s, t) for s in range(50) for t in range(20)}
    self.assertLen(seeds, 1000)
    self.assertBetween(max(seeds), 0, 2**32 - 1)
    self.assertEqual(trace.draw_seed(3, 1), trace.draw_seed(3, 1))


if __name__ == '__main__':
  absltest.main()
