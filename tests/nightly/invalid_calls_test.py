"""Why a call that cannot be read counts: dropping it teaches to break calls.

A policy with two numbers plays real episodes. In half of its rollouts it has
found out what is wrong, in the others it has not, and then it may hand in a
guess, which is wrong three times in four, or break its call. Guesses lose
against the lucky members of their group. If broken calls lose as well, there
is no reason to break any; if they leave the group instead, breaking is the one
way not to lose.
"""

import asyncio
import dataclasses
import math
import random

from absl.testing import absltest
from tests import sampled_policy

from composer_jax import config
from composer_jax import trace
from composer_jax.agents import harness
from composer_jax.agents import tools
from composer_jax.chat import chat_renderer
from composer_jax.chat import compact_renderer
from composer_jax.chat import template
from composer_jax.environments import micro_repair
from composer_jax.learner import advantages
from composer_jax.rewards import hierarchy
from composer_jax.rewards import verify
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool

_SOURCE = micro_repair.MicroRepair()
_CFG = config.HarnessConfig(1, 4000, 30_000)
_STEPS, _GROUPS, _MEMBERS, _RATE = 40, 2, 16, 0.3
_START = -2.0  # log-odds of breaking a call: 12%
_TRIED_RIGHT = 0.25


def _chance(logit):
  return 1 / (1 + math.exp(-logit))


class _Toy:
  """The policy, and one run of RL.

  Attributes:
    logits: log-odds of breaking a call, by whether it knows what is wrong.
  """

  def __init__(self, dropped: bool, pools, seed: int):
    self.logits = {True: _START, False: _START}
    self._dropped = dropped
    self._pools = pools
    self._grader = grading.Grader(_SOURCE, pools[1])
    self._random = random.Random(seed)
    task = _SOURCE.task(0, 'train')
    texts = [str(chat_renderer.SCHEMAS), task.files['f.py']]
    tokenizer = compact_renderer.train_tokenizer(texts, 400)
    self._brace = tokenizer.token_to_id('{')
    self._renderer = chat_renderer.ChatRenderer(template.compact(tokenizer))

  async def _rollout(self, task, knows, breaks):
    old, gold = task.files['f.py'], _SOURCE.solution(task)
    right = knows or self._random.random() < _TRIED_RIGHT
    new = gold if right else old + '\n'
    turn = self._renderer.encode_turn(
        [tools.Replace('f.py', old, new), tools.Done()]
    )
    if breaks:  # no JSON any more
      turn = [t for t in turn if t != self._brace]
    policy = sampled_policy.ScriptedPolicy([turn])
    async with self._pools[0].session() as session:
      episode = await harness.run(
          task, session, policy, self._renderer, cfg=_CFG, seed=0
      )
    grade = await self._grader(task, episode.submission)
    episode = dataclasses.replace(episode, grade=grade)
    reward = hierarchy.combine([await verify.Verify()(task, episode)])
    broken = episode.stop is trace.StopReason.PARSE_ERROR
    assert broken == breaks
    lost = broken and self._dropped  # the historical mistake
    return trace.Trajectory(
        task.id,
        'g',
        episode.segments,
        None if lost else reward.score,
        reward.parts,
        trace.StopReason.INFRA_ERROR if lost else episode.stop,
    )

  async def step(self, number):
    gradient = {True: 0.0, False: 0.0}
    for group in range(_GROUPS):
      task = _SOURCE.task(number * _GROUPS + group, 'train')
      drawn = []
      for member in range(_MEMBERS):
        knows = member % 2 == 0
        breaks = self._random.random() < _chance(self.logits[knows])
        drawn.append((knows, breaks))
      rollouts = [await self._rollout(task, *d) for d in drawn]
      a = advantages.group_advantages(rollouts, advantages.GroupMean())
      if a is None:
        continue
      for (knows, breaks), value in zip(drawn, a.tolist(), strict=True):
        # d log p / d logit of a Bernoulli draw.
        gradient[knows] += value * (breaks - _chance(self.logits[knows]))
    for knows in gradient:
      self.logits[knows] += _RATE * gradient[knows]


async def _train(dropped, seed):
  async with pool.Pool(1) as played, pool.Pool(1) as graded:
    toy = _Toy(dropped, (played, graded), seed)
    for number in range(_STEPS):
      await toy.step(number)
  return {k: _chance(v) for k, v in toy.logits.items()}


class InvalidCallsTest(absltest.TestCase):

  def test_counted_they_are_not_learned_and_dropped_they_are(self):
    start = _chance(_START)
    for seed in range(3):
      counted = asyncio.run(_train(False, seed))
      dropped = asyncio.run(_train(True, seed))
      print(f'seed {seed}: counted {counted}, dropped {dropped}')
      with self.subTest(seed=seed):
        self.assertLess(counted[False], start)
        self.assertLess(counted[True], start)
        self.assertGreater(dropped[False], 0.8)  # whenever it does not know


if __name__ == '__main__':
  absltest.main()
