"""OpenEnv's protocol over loopback, both sides, well and ill."""

import asyncio
import contextlib
import functools
import importlib.util
import json
import unittest

from absl.testing import absltest
from tests import sampled_policy
from tests import sandbox_attacks
import websockets
from websockets.asyncio import client as ws_client
from websockets.asyncio import server as ws_server

from composer_jax import config
from composer_jax import trace
from composer_jax.agents import openenv
from composer_jax.agents import openenv_server
from composer_jax.agents import tools
from composer_jax.chat import chat_renderer
from composer_jax.chat import compact_renderer
from composer_jax.chat import template
from composer_jax.environments import micro_repair
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool as pool_lib

_SOURCE = micro_repair.MicroRepair()
_TASK = _SOURCE.task(3, 'eval')
_CFG = config.HarnessConfig(
    max_turns=4, max_turn_tokens=2000, max_context_tokens=20_000
)
_OLD, _NEW = _TASK.files['f.py'], _SOURCE.solution(_TASK)
_REPAIR = tools.Replace('f.py', _OLD, _NEW)


@functools.cache
def _renderer():
  texts = [str(chat_renderer.SCHEMAS), _OLD]
  return chat_renderer.ChatRenderer(
      template.compact(compact_renderer.train_tokenizer(texts, 400))
  )


@contextlib.asynccontextmanager
async def _server(cfg=_CFG, **kwargs):
  async with pool_lib.Pool(1) as pool, pool_lib.Pool(1) as fresh:
    grader = grading.Grader(_SOURCE, fresh)
    server = openenv_server.Server(_SOURCE, 'eval', pool, grader, cfg, **kwargs)
    async with server.listen() as url:
      yield url


async def _play(url, *turns, cfg=_CFG, seconds=60.0):
  renderer = _renderer()
  policy = sampled_policy.ScriptedPolicy(
      [renderer.encode_turn(turn) for turn in turns]
  )
  return await openenv.play(
      url, policy, renderer, cfg=cfg, seed=0, index=3, seconds=seconds
  )


@contextlib.asynccontextmanager
async def _other(handler, **kwargs):
  """Somebody else's environment."""
  async with ws_server.serve(handler, '127.0.0.1', 0, **kwargs) as server:
    port = next(iter(server.sockets)).getsockname()[1]
    yield f'ws://127.0.0.1:{port}/ws'


class TogetherTest(unittest.IsolatedAsyncioTestCase):

  async def test_a_repair_is_rewarded(self):
    async with _server() as url:
      episode = await _play(url, [tools.Run()], [_REPAIR], [tools.Done()])
    self.assertEqual(episode.stop, trace.StopReason.FINISHED)
    self.assertTrue(episode.grade.solved)
    self.assertEqual(episode.meta['reward'], '1.0')
    self.assertEqual(episode.meta['turns'], '3')
    self.assertRegex(episode.log[0], r'=.* not ')
    (window,) = episode.segments
    self.assertTrue(window.sampled.any())

  async def test_doing_nothing_and_running_out_of_turns_are_not(self):
    async with _server() as url:
      nothing = await _play(url, [tools.Done()])
      endless = await _play(url, [tools.Run()])
      ours = await _play(
          url, [_REPAIR], cfg=config.HarnessConfig(1, 2000, 20_000)
      )
    self.assertEqual(nothing.stop, trace.StopReason.FINISHED)
    self.assertFalse(nothing.grade.solved)
    self.assertEqual(
        endless.stop, trace.StopReason.FINISHED
    )  # of the other side
    self.assertEqual(endless.meta['turns'], '4')
    self.assertFalse(endless.grade.solved)
    # Our budget ended it: what was done until then is graded.
    self.assertEqual(ours.stop, trace.StopReason.MAX_TURNS)
    self.assertTrue(ours.grade.solved)

  async def test_a_call_that_cannot_be_read_is_the_policys_mistake(self):
    async with _server() as url:
      episode = await _play(url, [tools.Read('nope.py')], [tools.Done()])
    self.assertIn('no file nope.py', episode.log[0])
    self.assertEqual(episode.stop, trace.StopReason.FINISHED)


class NoVerdictTest(unittest.IsolatedAsyncioTestCase):

  async def test_a_grader_that_dies_gives_no_reward(self):
    async with pool_lib.Pool(1) as pool, pool_lib.Pool(1) as fresh:
      sandbox_attacks.dies_when_used(fresh._idle[0])
      grader = grading.Grader(_SOURCE, fresh)
      server = openenv_server.Server(_SOURCE, 'eval', pool, grader, _CFG)
      async with server.listen() as url:
        episode = await _play(url, [_REPAIR, tools.Done()])
    self.assertEqual(episode.stop, trace.StopReason.INFRA_ERROR)
    self.assertIn('EXECUTION_ERROR', episode.meta['failure'])
    self.assertIsNone(episode.grade)


class ServerTest(unittest.IsolatedAsyncioTestCase):

  async def _talk(self, *frames, **kwargs):
    async with _server(**kwargs) as url, ws_client.connect(url) as socket:
      answers = []
      for frame in frames:
        text = frame if isinstance(frame, str) else json.dumps(frame)
        await socket.send(text)
        answers.append(json.loads(await socket.recv()))
      return answers

  async def test_frames(self):
    reset = {'type': 'reset', 'data': {'index': 3}}
    done = {'type': 'step', 'data': {'tool': 'done'}}
    answers = await self._talk(
        {'type': 'state'}, reset, {'type': 'state', 'data': {}}, done, done
    )
    state, first, again, end, after = answers
    self.assertEqual(state['data'], {'episode_id': None, 'step_count': 0})
    self.assertEqual(first['type'], 'observation')
    self.assertIsNone(first['data']['reward'])
    self.assertIs(first['data']['done'], False)
    self.assertEqual(first['data']['observation']['files'], dict(_TASK.files))
    self.assertEqual(again['data']['episode_id'], _TASK.id)
    self.assertEqual(end['data']['reward'], 0.0)
    self.assertIs(end['data']['done'], True)
    self.assertEqual(after['data']['code'], 'SESSION_ERROR')

  async def test_hidden_tests_never_leave(self):
    calls = [
        {'tool': 'run'},
        {'tool': 'read', 'path': 'f.py'},
        {'tool': 'search', 'text': 'f'},
        {'tool': 'done'},
    ]
    frames = [{'type': 'step', 'data': call} for call in calls]
    said = json.dumps(
        await self._talk({'type': 'reset', 'data': {'index': 3}}, *frames)
    )
    shown = json.dumps([[list(c.args), c.expected] for c in _TASK.public_tests])
    hidden = [
        case
        for case in _SOURCE.hidden(_TASK)
        if json.dumps([list(case.args), case.expected]) not in shown
    ]
    self.assertTrue(hidden)
    for case in hidden:
      text = json.dumps(json.dumps(list(case.args)))[1:-1]
      if len(text) > 6:  # a short one may be anything
        self.assertNotIn(text, said)

  async def test_bad_frames_are_answered_and_the_session_goes_on(self):
    frames = {
        '{': 'INVALID_JSON',
        '[' * 100_000: 'INVALID_JSON',
        '[]': 'INVALID_JSON',
        '{"type": 1}': 'INVALID_JSON',
        '{"type": "jump"}': 'UNKNOWN_TYPE',
        '{"type": "reset", "data": [1]}': 'VALIDATION_ERROR',
        '{"type": "reset", "data": {"index": -1}}': 'VALIDATION_ERROR',
        '{"type": "step", "data": {"tool": "run"}}': 'SESSION_ERROR',
    }
    answers = await self._talk(*frames, {'type': 'reset'})
    *errors, last = answers
    self.assertEqual([e['type'] for e in errors], ['error'] * len(frames))
    self.assertEqual([e['data']['code'] for e in errors], [*frames.values()])
    self.assertEqual(last['type'], 'observation')

  async def test_a_bad_action_costs_a_step(self):
    bad = {'type': 'step', 'data': {'tool': 'jump'}}
    answers = await self._talk(
        {'type': 'reset', 'data': {'index': 3}}, *[bad] * 4
    )
    self.assertIn('no tool "jump"', answers[1]['data']['observation']['text'])
    self.assertEqual([a['data']['done'] for a in answers], [False] * 4 + [True])
    self.assertEqual(answers[-1]['data']['reward'], 0.0)

  async def test_oversized_frames_and_other_paths_end_the_connection(self):
    async with _server() as url:
      async with ws_client.connect(url) as socket:
        with self.assertRaises(websockets.ConnectionClosed):
          await socket.send('x' * (2 << 20))
          await socket.recv()
      with self.assertRaises(websockets.InvalidStatus):
        await ws_client.connect(url.removesuffix('/ws') + '/other')
      episode = await _play(url, [_REPAIR, tools.Done()])  # it lives on
    self.assertTrue(episode.grade.solved)

  async def test_silence_ends_a_session(self):
    async with _server(idle_seconds=0.1) as url:
      async with ws_client.connect(url) as socket:
        with self.assertRaises(websockets.ConnectionClosed):
          await socket.recv()


class ClientTest(unittest.IsolatedAsyncioTestCase):

  async def _play_against(self, handler, seconds=0.5, **kwargs):
    async with _other(handler, **kwargs) as url:
      return await _play(url, [tools.Run()], [tools.Done()], seconds=seconds)

  async def test_whatever_the_environment_does_is_infrastructure(self):
    reset = json.dumps(
        openenv_server.observation('do it', None, False, files={})
    )

    def after_reset(*frames):
      async def handler(socket):
        await socket.recv()
        await socket.send(reset)
        await socket.recv()
        for frame in frames:
          await socket.send(frame)
        if frames:
          await socket.wait_closed()

      return handler

    async def silent(socket):
      await socket.wait_closed()

    async def gone(socket):
      await socket.close()

    cases = {
        'silent at reset': silent,
        'gone': gone,
        'gone after reset': after_reset(),
        'no json': after_reset('{'),
        'no type': after_reset('[]'),
        'wrong type': after_reset('{"type": "state", "data": {}}'),
        'oversized': after_reset('"' + 'x' * (2 << 20) + '"'),
        'failed': after_reset(
            '{"type": "error", "data": {"code": "EXECUTION_ERROR"}}'
        ),
    }
    for name, handler in cases.items():
      with self.subTest(name):
        episode = await self._play_against(handler)
        self.assertEqual(episode.stop, trace.StopReason.INFRA_ERROR)
        self.assertIsNone(episode.submission)
        self.assertIsNone(episode.grade)
        self.assertTrue(episode.meta['failure'])
    nobody = await _play('ws://127.0.0.1:9/ws', [tools.Done()])
    self.assertEqual(nobody.stop, trace.StopReason.INFRA_ERROR)

  async def test_a_foreign_environment_is_played(self):
    seen = []

    async def handler(socket):
      async for frame in socket:
        found = json.loads(frame)
        seen.append(found)
        if found['type'] == 'close':
          return
        data = {'observation': {'output': len(seen)}, 'reward': 0.5}
        data['done'] = len(seen) == 3
        if len(seen) == 2:
          await socket.send(
              '{"type": "error", "data": {"code": "VALIDATION_ERROR",'
              ' "message": "what?"}}'
          )
          continue
        await socket.send(json.dumps({'type': 'observation', 'data': data}))

    episode = await self._play_against(handler)
    self.assertEqual(episode.stop, trace.StopReason.FINISHED)
    self.assertEqual(episode.meta['reward'], '0.5')
    self.assertFalse(episode.grade.solved)
    self.assertIn('what?', episode.log[0])
    self.assertIn('{"output": 3}', episode.log[1])
    self.assertEqual(
        [f['type'] for f in seen], ['reset', 'step', 'step', 'close']
    )
    self.assertEqual(seen[1]['data'], {'tool': 'run'})


@unittest.skipUnless(
    importlib.util.find_spec('openenv'), "needs 'openenv-core'"
)
class PeerTest(unittest.IsolatedAsyncioTestCase):
  """The protocol's own client and server, where they are installed."""

  async def test_its_client_plays_our_server(self):
    from openenv.core import generic_client

    async with _server() as url:
      async with generic_client.GenericEnvClient(
          base_url=url.removesuffix('/ws')
      ) as env:
        first = await env.reset(index=3)
        self.assertEqual(first.observation['files'], dict(_TASK.files))
        call = {'tool': tools.name_of(_REPAIR), **vars(_REPAIR)}
        self.assertFalse((await env.step(call)).done)
        self.assertEqual((await env.state())['step_count'], 1)
        last = await env.step({'tool': 'done'})
        self.assertEqual((last.reward, last.done), (1.0, True))

  async def test_our_client_plays_its_server(self):
    from openenv.core import env_server
    from openenv.core.env_server import types
    import uvicorn

    class Action(types.Action):
      tool: str

    class Observation(types.Observation):
      text: str

    class Environment(env_server.Environment):

      def __init__(self):
        super().__init__()
        self._steps = 0

      def reset(self, seed=None, episode_id=None, **unused):
        return Observation(text='do it', done=False, reward=None)

      def step(self, action, timeout_s=None, **unused):
        done = action.tool == 'done'
        return Observation(text=action.tool, done=done, reward=float(done))

      @property
      def state(self):
        return types.State(episode_id='e', step_count=self._steps)

    app = env_server.create_fastapi_app(Environment, Action, Observation)
    config_ = uvicorn.Config(app, port=0, log_level='error')
    server = uvicorn.Server(config_)
    serving = asyncio.create_task(server.serve())
    while not server.started:
      await asyncio.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f'ws://127.0.0.1:{port}/ws'
    policy_turns = ([tools.Run()], [tools.Done()])
    renderer = _renderer()
    policy = sampled_policy.ScriptedPolicy(
        [renderer.encode_turn(turn) for turn in policy_turns]
    )
    episode = await openenv.play(url, policy, renderer, cfg=_CFG, seed=0)
    server.should_exit = True
    await serving
    self.assertEqual(episode.stop, trace.StopReason.FINISHED, episode.meta)
    self.assertTrue(episode.grade.solved)
    self.assertIn('run', episode.log[0])


if __name__ == '__main__':
  absltest.main()
