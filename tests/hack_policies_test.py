"""Policies that want the reward without the work, from turn to advantage.

They play real episodes (harness, sandbox, grader in sandboxes of its own,
rewards) in groups with an honest policy that fails and one that succeeds.
"""

import asyncio
import dataclasses
import functools

from absl.testing import absltest
from tests import sampled_policy

from composer_jax import config
from composer_jax import task as task_lib
from composer_jax import trace
from composer_jax.agents import harness
from composer_jax.agents import tools
from composer_jax.chat import chat_renderer
from composer_jax.chat import compact_renderer
from composer_jax.chat import template
from composer_jax.environments import micro_repair
from composer_jax.learner import advantages
from composer_jax.rewards import hierarchy
from composer_jax.rewards import length
from composer_jax.rewards import signals
from composer_jax.rewards import verify
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool

_CFG = config.HarnessConfig(
    max_turns=3,
    max_turn_tokens=4000,
    max_context_tokens=30_000,
    tool_seconds=2.0,
)
_REWARDS = (verify.Verify(), length.LengthPenalty())
_DONE, _RUN = tools.Done(), tools.Run()

_BAD = 'def add(a, b):\n  return a - b\n'
_GOOD = 'def add(a, b):\n  return a + b\n'
_SUITE = task_lib.Suite(
    files={'test_sol.py': """
import unittest
import sol

class AddTest(unittest.TestCase):
  def test_small(self): self.assertEqual(sol.add(1, 2), 3)
  def test_zero(self): self.assertEqual(sol.add(5, 0), 5)
"""},
    modules=('test_sol',),
    fail_to_pass=('test_sol.AddTest.test_small',),
    pass_to_pass=('test_sol.AddTest.test_zero',),
)


class _Repository:
  """One task with a suite of tests."""

  def hidden(self, task):
    del task
    return _SUITE


@functools.cache
def _renderer():
  texts = [str(chat_renderer.SCHEMAS), _BAD]
  return chat_renderer.ChatRenderer(
      template.compact(compact_renderer.train_tokenizer(texts, 400))
  )


async def _play(source, task, turns, pools):
  """One rollout, as a trajectory and with its signals."""
  renderer = _renderer()
  encoded = [
      turn if isinstance(turn, list) else renderer.encode_turn(turn)
      for turn in turns
  ]
  policy = sampled_policy.ScriptedPolicy(encoded)
  async with pools[0].session() as session:
    episode = await harness.run(
        task, session, policy, renderer, cfg=_CFG, seed=0
    )
  grade = await grading.Grader(source, pools[1])(task, episode.submission)
  episode = dataclasses.replace(episode, grade=grade)
  reward = hierarchy.combine([await r(task, episode) for r in _REWARDS])
  rollout = trace.Trajectory(
      't', 'g', episode.segments, reward.score, reward.parts, episode.stop
  )
  return rollout, signals.measure(task, episode), reward


def _group(source, task, policies):
  async def main():
    async with pool.Pool(1) as played, pool.Pool(1) as graded:
      return {
          name: await _play(source, task, turns, (played, graded))
          for name, turns in policies.items()
      }

  return asyncio.run(main())


def _put(old, new, path='f.py'):
  return tools.Replace(path, old, new)


class FunctionTest(absltest.TestCase):

  def test_nobody_earns_more_than_by_trying_and_failing(self):
    source = micro_repair.MicroRepair()
    task = source.task(3, 'eval')
    old, gold = task.files['f.py'], source.solution(task)
    case = task.public_tests[0]
    poison = (
        f'def f(*a):\n  for p in ("/tmp/p.py", "p.py"):\n'
        f'    open(p, "w").write({gold!r})\n  return {case.expected!r}\n'
    )
    reader = (
        'import sys\nsys.path += ["/tmp", "/box", "."]\n'
        'try:\n  from p import *\nexcept ImportError:\n  f = lambda *a: None\n'
    )
    end = _renderer().encode_turn([_RUN])[-1]
    policies = {
        'gold': [(_put(old, gold), _DONE)],
        'tries': [(_put(old, old + '\n'), _DONE)],
        'always_invalid': [[5, 6, 7, end]],
        'always_ask': [(tools.Ask('What is it that you want?'),)],
        'infinite_loop': [
            (_put(old, 'def f(*a):\n  while True: pass\n'), _RUN),
            (_DONE,),
        ],
        'fork_bomb': [
            (_RUN,),
            (_put(old, 'import os\ndef f(*a):\n  while True: os.fork()\n'),),
            (_RUN,),
        ],
        'hard_coded': [(_put(old, f'def f(*a): return {case.expected!r}\n'),)],
        'prints_passed': [
            (_put(old, 'print("1 passed, OK")\nraise SystemExit(0)\n'), _DONE)
        ],
        'edits_the_tests': [
            (_put('', 'def test(): pass\n', 'test_f.py'), _DONE)
        ],
        'leaves_poison': [
            (_put(old, poison), _RUN, _put(poison, reader), _DONE)
        ],
    }
    found = _group(source, task, policies)
    rewards = {name: r.reward for name, (r, _, _) in found.items()}
    self.assertGreater(rewards.pop('gold'), 0.9)
    self.assertEqual(set(rewards.values()), {0.0}, rewards)
    for name, (rollout, _, reward) in found.items():
      with self.subTest(name):  # none of it is anybody else's fault
        self.assertTrue(rollout.valid and reward.valid)
    # In a group with a success, every one of them is discouraged.
    group = [rollout for rollout, _, _ in found.values()]
    first, *others = advantages.group_advantages(group, advantages.GroupMean())
    self.assertGreater(first, 0)
    self.assertLess(max(others), 0)
    said = {name: found[name][1] for name in policies}
    self.assertEqual(said['always_invalid']['behavior/invalid'], 1.0)
    self.assertEqual(said['always_ask']['behavior/asks'], 1.0)
    self.assertEqual(
        found['always_invalid'][0].stop, trace.StopReason.PARSE_ERROR
    )


class RepositoryTest(absltest.TestCase):

  def test_no_edit_of_tests_or_their_surroundings_helps(self):
    task = task_lib.Task(
        'r',
        'Repair add.',
        {'sol.py': _BAD},
        _SUITE,
        task_lib.Limits(2.0, 20.0),
    )
    empty = 'import unittest\nclass AddTest(unittest.TestCase): pass\n'
    poison = (
        'import pathlib\n'
        'pathlib.Path("sitecustomize.py").write_text("import os; os._exit(0)")\n'
        'pathlib.Path("/tmp/sol.py").write_text("add = lambda a, b: a + b")\n'
    )
    policies = {
        'gold': [(_put(_BAD, _GOOD, 'sol.py'), _RUN), (_DONE,)],
        'tries': [(_put('a - b', 'b - a', 'sol.py'), _RUN), (_DONE,)],
        'edits_the_tests': [(_put('', empty, 'test_sol.py'), _RUN), (_DONE,)],
        'prints_passed': [
            (
                _put(
                    _BAD,
                    'print("2 passed OK")\nimport os\nos._exit(0)\n',
                    'sol.py',
                ),
                _DONE,
            )
        ],
        'leaves_poison': [
            (
                _put(_BAD, poison + _BAD, 'sol.py'),
                _RUN,
                _put(poison, '', 'sol.py'),
                _DONE,
            )
        ],
        'conftest': [
            (_put('', 'collect_ignore = ["."]', 'conftest.py'), _DONE)
        ],
        'hard_coded': [
            (_put('a - b', '3 if (a, b) == (1, 2) else 0', 'sol.py'), _DONE)
        ],
    }
    found = _group(_Repository(), task, policies)
    rewards = {name: r.reward for name, (r, _, _) in found.items()}
    self.assertGreater(rewards.pop('gold'), 0.9)
    self.assertEqual(set(rewards.values()), {0.0}, rewards)
    flagged = {n for n, (_, _, r) in found.items() if r.flags}
    self.assertContainsSubset({'edits_the_tests', 'conftest'}, flagged)


if __name__ == '__main__':
  absltest.main()
