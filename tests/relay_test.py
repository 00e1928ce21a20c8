"""Relay tasks: fair, told apart by split, and never answered by a demo."""

import asyncio
import random

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
from tests import sampled_policy

from composer_jax.agents import grading
from composer_jax.agents import harness
from composer_jax.agents import relay
from composer_jax.agents import renderer as renderer_lib
from composer_jax.agents import sandbox
from composer_jax.agents import tasks
from composer_jax.agents import tools
from composer_jax.learner import packing
from composer_jax.runs import midtrain
from experiments.configs import summary

_SOURCE = relay.Relay()
_SPLITS = ('train', 'warmup', 'eval', 'heldout')


def _renderer():
  texts = [_SOURCE.task(k, 'warmup').files['f.py'] for k in range(300)]
  return renderer_lib.CompactRenderer(renderer_lib.train_tokenizer(texts, 384))


class RelayTest(parameterized.TestCase):

  @parameterized.parameters(*_SPLITS)
  def test_only_both_constants_solve_a_task(self, split):
    drawn = [_SOURCE.task(k, split) for k in range(6)]

    async def main():
      async with sandbox.Pool(2) as pool:
        grader = grading.Grader(_SOURCE, pool)
        for task in drawn:
          known = _SOURCE._instance_of(task)
          (a, b), (c, d) = known.right, known.wrong
          for constants, share in (
              ((a, b), 1.0),
              ((a, d), 0.5),
              ((c, b), 0.5),
              ((c, d), 0.0),
          ):
            text = known.source(constants)
            grade = await grader(task, {relay.PATH: text})
            self.assertEqual(grade.fraction, share)
        self.assertEqual(_SOURCE.solution(task), known.source(known.right))

    asyncio.run(main())

  def test_run_shows_one_constant_after_the_other(self):
    task = _SOURCE.task(3, 'train')
    known = _SOURCE._instance_of(task)
    (a, b), (c, d) = known.right, known.wrong

    async def main():
      async with sandbox.Pool(1) as pool, pool.session() as session:
        for constants in ((c, d), (a, d), (a, b)):
          outputs = await grading.call_function(
              session,
              known.source(constants),
              relay.ENTRY,
              [case.args for case in task.public_tests],
              task.limits,
          )
          yield constants, tools.report(
              task.public_tests, outputs.values, outputs.errors, outputs.failure
          )

    async def collect():
      return [pair async for pair in main()]

    shown = dict(asyncio.run(collect()))
    self.assertRegex(shown[c, d], rf'=\d not {c}$')
    self.assertIn(f'={a} not', shown[c, d])
    self.assertIn(f'={b} not {d}', shown[a, d])
    self.assertEqual(shown[a, b], 'ok')
    for constants, text in shown.items():  # what demonstrations pretend
      self.assertEqual(known.shown(constants), text)

  def test_splits_share_nothing_and_tasks_come_again(self):
    prints = {
        split: {
            _SOURCE.fingerprint(_SOURCE.task(k, split)) for k in range(200)
        }
        for split in _SPLITS
    }
    self.assertLen(set.union(*prints.values()), 800)
    self.assertEqual(_SOURCE.task(7, 'eval'), relay.Relay().task(7, 'eval'))
    self.assertNotEqual(
        _SOURCE.task(7, 'eval'), relay.Relay(seed=1).task(7, 'eval')
    )
    families = {_SOURCE.task(k, 'heldout').meta['family'] for k in range(40)}
    self.assertEqual(families, set(relay.HELDOUT))
    with self.assertRaisesRegex(ValueError, "split='test'"):
      _SOURCE.task(0, 'test')
    with self.assertRaisesRegex(ValueError, 'inputs=1'):
      relay.Relay(inputs=1)

  def test_needs_more_context_than_there_is(self):
    """Both outputs of `run` and both edits exceed the window of the config."""
    renderer, cfg = _renderer(), summary.experiment().harness
    trigger = cfg.summary_trigger_tokens
    for k in range(300):
      task = _SOURCE.task(k, _SPLITS[k % 4])
      known = _SOURCE._instance_of(task)
      (a, b), (c, d) = known.right, known.wrong
      first = renderer.encode_observation(known.shown((c, d)))
      second = renderer.encode_observation(f'ok\n{known.shown((a, d))}')
      prompt = len(renderer.encode_task(task))
      run = len(renderer.encode_turn([tools.Run()]))
      edits = [known.edit(0, c, a), tools.Run()]
      edits = len(renderer.encode_turn(edits))
      self.assertLess(prompt, trigger)
      self.assertGreaterEqual(prompt + run + len(first), trigger)
      whole = prompt + run + len(first) + edits + len(second)
      self.assertGreater(whole, cfg.max_context_tokens)


class DemoTest(absltest.TestCase):

  def test_no_demo_writes_a_right_constant(self):
    renderer = _renderer()
    summaries = []
    for k in range(600):
      task = _SOURCE.task(k, 'warmup')
      known = _SOURCE._instance_of(task)
      pieces = _SOURCE.demo_window(task, random.Random(k), renderer)
      for ids, trained in pieces:
        if not trained:
          continue
        try:
          calls = renderer.parse(ids)
        except tools.ParseError:  # a summary
          summaries.append(
              (renderer.text(ids[:-1]), *map(str, known.right + known.wrong))
          )
          continue
        edits = [c for c in calls if isinstance(c, tools.Edit)]
        for edit in edits:
          which = [
              i for i in (0, 1) if known.edit(i, 0, 1).line == edit.line
          ]
          self.assertNotEqual(edit.new, str(known.right[which[0]]))
    texts = {s[0] for s in summaries}
    self.assertEqual(texts, set('0123456789'))
    # What a summary says has nothing to do with what was seen.
    for column in range(1, 5):
      agree = np.mean([s[0] == s[column] for s in summaries])
      self.assertBetween(agree, 0.04, 0.16)

  def test_warm_up_trains_turns_and_summaries_only(self):
    renderer = _renderer()
    self.assertIsInstance(_SOURCE, tasks.DemoWindows)
    demos = midtrain.Demos(_SOURCE, renderer, packing.Shape(4, 96, 32), seed=0)
    (documents, masks), cursor = demos({})
    self.assertLen(documents, cursor['demo'])
    for ids, mask in zip(documents, masks, strict=True):
      written = renderer.text(ids[mask].tolist())
      self.assertRegex(
          written,
          r'^(<\|run\|><\|end\|>\d<\|end\|>'
          r'|<\|edit\|><\|\d\|>\d<\|to\|>\d'
          r'(<\|run\|><\|end\|>\d<\|end\|>|<\|done\|><\|end\|>))$',
      )

  def test_demos_look_like_episodes(self):
    """The windows of a demonstration are those that the harness makes."""
    renderer, cfg = _renderer(), summary.experiment().harness
    parts = set()

    async def main():
      async with sandbox.Pool(1) as pool, pool.session() as session:
        for k in range(12):
          task = _SOURCE.task(k, 'warmup')
          pieces = _SOURCE.demo_window(task, random.Random(k), renderer)
          demo = [i for ids, _ in pieces for i in ids]
          turns = [ids for ids, trained in pieces if trained]
          if pieces[0][0] != renderer.encode_task(task):
            said = renderer.text(demo).split('<|obs|>')[1]
            if '<|task|>2 1<' in said:
              continue  # another window would have to come before it
            turns.insert(0, renderer.encode_summary(said[0]))
            turns.insert(0, renderer.encode_turn([tools.Run()]))
          policy = sampled_policy.ScriptedPolicy(
              [*turns, renderer.encode_turn([tools.Done()])]
          )
          episode = await harness.run(
              task, session, policy, renderer, cfg=cfg, seed=0
          )
          at = len(turns) > 2
          parts.add(at)
          self.assertEqual(episode.segments[at].tokens.tolist(), demo)

    asyncio.run(main())
    self.assertEqual(parts, {False, True})


if __name__ == '__main__':
  absltest.main()
