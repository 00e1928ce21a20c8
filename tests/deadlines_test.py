"""Nothing holds a rollout for longer than it may, and each end has its class."""

import asyncio
import dataclasses
import sys
import time
import unittest
from unittest import mock

from absl.testing import absltest
import numpy as np
from tests import sampled_policy
from tests import sandbox_attacks

from composer_jax import config
from composer_jax import trace
from composer_jax.agents import external
from composer_jax.agents import harness
from composer_jax.agents import tool_loop
from composer_jax.agents import tools
from composer_jax.chat import chat_renderer
from composer_jax.chat import compact_renderer
from composer_jax.chat import template
from composer_jax.environments import micro_repair
from composer_jax.rewards import hierarchy
from composer_jax.rewards import verify
from composer_jax.sandbox import box
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool as pool_lib

_SOURCE = micro_repair.MicroRepair()
_TASK = _SOURCE.task(3, 'eval')
_OLD, _NEW = _TASK.files['f.py'], _SOURCE.solution(_TASK)
_REPAIR = tools.Replace('f.py', _OLD, _NEW)
_SLEEPER = 'def f(*args):\n  import time\n  time.sleep(60)\n'
_CFG = config.HarnessConfig(
    max_turns=2,
    max_turn_tokens=4000,
    max_context_tokens=20_000,
    tool_seconds=0.4,
)


def _renderer():
  texts = [str(chat_renderer.SCHEMAS), _OLD]
  return chat_renderer.ChatRenderer(
      template.compact(compact_renderer.train_tokenizer(texts, 400))
  )


async def _play(session, *turns, policy=None):
  renderer = _renderer()
  policy = policy or sampled_policy.ScriptedPolicy(
      [renderer.encode_turn(turn) for turn in turns]
  )
  return await harness.run(_TASK, session, policy, renderer, cfg=_CFG, seed=0)


async def _reward(episode, pool):
  if episode.submission is not None:
    grade = await grading.Grader(_SOURCE, pool)(_TASK, episode.submission)
    episode = dataclasses.replace(episode, grade=grade)
  return hierarchy.combine([await verify.Verify()(_TASK, episode)])


class ToolsTest(unittest.IsolatedAsyncioTestCase):

  async def test_hung_tools_spend_the_policys_time_and_no_more(self):
    hang = [tools.Replace('f.py', _OLD, _SLEEPER), *[tools.Run()] * 40]
    async with pool_lib.Pool(1) as pool, pool_lib.Pool(1) as fresh:
      async with pool.session() as session:
        episode = await _play(session, hang)
      self.assertEqual(episode.stop, trace.StopReason.TOOL_BUDGET)
      self.assertLess(int(episode.meta['runs']), 6)
      self.assertEqual(episode.submission, {'f.py': _SLEEPER})
      reward = await _reward(episode, fresh)
    self.assertEqual((reward.valid, reward.score), (True, 0.0))

  async def test_whoever_used_all_the_time_is_graded(self):
    # The repair comes before the time is up: it is as good as any other.
    back = [tools.Replace('f.py', _SLEEPER, _NEW)]
    turn = [tools.Replace('f.py', _OLD, _SLEEPER), *[tools.Run()] * 2, *back]
    turn += [tools.Replace('g.py', '', _SLEEPER)]
    async with pool_lib.Pool(1) as pool, pool_lib.Pool(1) as fresh:
      async with pool.session() as session:
        loop = tool_loop.ToolLoop(session, _CFG)
        loop._seconds = 0.5  # so that the second run is the last call
        files, _, done = await loop.execute(_TASK, _TASK.files, turn)
        self.assertFalse(done)
        self.assertTrue(loop.exhausted)
        self.assertEqual(files, {'f.py': _SLEEPER})
        loop = tool_loop.ToolLoop(session, _CFG)
        loop._seconds = 0.5
        turn = [tools.Replace('f.py', _OLD, _NEW), tools.Run()]
        files, _, _ = await loop.execute(_TASK, _TASK.files, turn)
      episode = harness.Episode((), trace.StopReason.TOOL_BUDGET, files)
      reward = await _reward(episode, fresh)
    self.assertEqual((reward.valid, reward.score), (True, 1.0))

  async def test_waiting_for_a_sandbox_is_not_the_policys_doing(self):
    async with pool_lib.Pool(1) as pool, pool.session() as other:
      await other.exec('true')  # holds the only one

      async def leave():
        await asyncio.sleep(1.5)  # longer than all tools together may take
        await other.release()

      async with pool.session() as session:
        episode, _ = await asyncio.gather(
            _play(session, [tools.Run()], [tools.Done()]), leave()
        )
    self.assertEqual(episode.stop, trace.StopReason.FINISHED)

  async def test_a_sandbox_that_dies_while_grading_is_no_verdict(self):
    async with pool_lib.Pool(1) as pool, pool_lib.Pool(1) as fresh:
      async with pool.session() as session:
        episode = await _play(session, [_REPAIR, tools.Done()])
      sandbox_attacks.dies_when_used(fresh._idle[0])
      reward = await _reward(episode, fresh)
      self.assertFalse(reward.valid)
      again = await _reward(episode, fresh)  # with a new one
    self.assertEqual((again.valid, again.score), (True, 1.0))

  async def test_a_silent_sandbox_ends_by_its_deadline(self):
    class Deaf(pool_lib.Session):

      async def open(self):
        mine = await super().open()
        mine._exchange = lambda *_: asyncio.sleep(3600)
        return mine

    async with pool_lib.Pool(1) as pool:
      with mock.patch.object(box, '_GRACE_SECONDS', 0.2):
        session = Deaf(pool)
        began = time.monotonic()
        episode = await _play(session, [tools.Run()])
        self.assertLess(time.monotonic() - began, 600.0)
        await session.release()
    self.assertEqual(episode.stop, trace.StopReason.INFRA_ERROR)
    self.assertIsNone(episode.submission)

  async def test_a_policy_server_that_times_out_is_infrastructure(self):
    class Slow:

      async def complete(self, context, **unused):
        async with asyncio.timeout(0.05):
          await asyncio.sleep(60)

    async with pool_lib.Pool(1) as pool, pool.session() as session:
      episode = await _play(session, policy=Slow())
    self.assertEqual(episode.stop, trace.StopReason.INFRA_ERROR)


class _Gateway:
  """An endpoint of which only the bookkeeping is there."""

  def __init__(self, close_seconds=0.0):
    self._close_seconds = close_seconds

  async def open(self, rollout_id, seed):
    return external.Access('http://127.0.0.1:9', 'key', 'm')

  async def close(self, rollout_id):
    await asyncio.sleep(self._close_seconds)
    ones = np.ones(4, np.int32)
    logps = np.zeros(4, np.float32)
    return (trace.TokenTrace(ones, ones > 0, logps, ones),)


class ProgramTest(unittest.IsolatedAsyncioTestCase):

  async def test_a_program_that_used_all_its_time_is_graded(self):
    # Its deadline is the deadline of the episode; grading has its own time.
    source = (
        f'import pathlib, time\npathlib.Path("f.py").write_text({_NEW!r})\n'
        'time.sleep(3600)'
    )
    program = external.SubprocessHarness((sys.executable, '-c', source), 10.0)
    episode = await program.run(_TASK, 'r', _Gateway(), 0)
    self.assertEqual(episode.stop, trace.StopReason.TIMEOUT)
    async with pool_lib.Pool(1) as fresh:
      reward = await _reward(episode, fresh)
    self.assertEqual((reward.valid, reward.score), (True, 1.0))

  async def test_an_endpoint_that_does_not_close_is_infrastructure(self):
    program = external.SubprocessHarness((sys.executable, '-c', ''), 30.0)
    with mock.patch.object(external, '_CLOSE_SECONDS', 0.2):
      began = time.monotonic()
      episode = await program.run(_TASK, 'r', _Gateway(3600.0), 0)
    self.assertLess(time.monotonic() - began, 600.0)
    self.assertEqual(episode.stop, trace.StopReason.INFRA_ERROR)
    self.assertIsNone(episode.submission)


if __name__ == '__main__':
  absltest.main()
