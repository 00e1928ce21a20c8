"""Tasks of `SummaryRepair`: fair, told apart by split, and never answered by a demo."""

import asyncio
import random

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
from tests import sampled_policy

from composer_jax import config
from composer_jax import task as task_lib
from composer_jax.agents import harness
from composer_jax.agents import tools
from composer_jax.chat import compact_renderer
from composer_jax.data import sources
from composer_jax.data import stream
from composer_jax.environments import summary_repair
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool as pool_lib
from experiments.configs import summary

_SOURCE = summary_repair.SummaryRepair()
_TWO = summary_repair.SummaryRepair(facts=2)
_SPLITS = ('train', 'warmup', 'eval', 'heldout')


def _renderer():
  texts = [_SOURCE.task(k, 'warmup').files['f.py'] for k in range(300)]
  return compact_renderer.CompactRenderer(
      compact_renderer.train_tokenizer(texts, 384)
  )


class SummaryRepairTest(parameterized.TestCase):

  @parameterized.product(source=(_SOURCE, _TWO), split=_SPLITS)
  def test_only_both_constants_solve_a_task(self, source, split):
    async def main():
      async with pool_lib.Pool(2) as pool:
        grader = grading.Grader(source, pool)
        for k in range(4):
          task = source.task(k, split)
          known = source._instance_of(task)
          (a, b), (c, d) = known.right, known.wrong
          self.assertEqual(a == b, source.facts == 1)
          for constants, share in (
              ((a, b), 1.0),
              ((a, d), 0.5),
              ((c, b), 0.5),
              ((c, d), 0.0),
          ):
            text = known.source(constants)
            grade = await grader(task, {summary_repair.PATH: text})
            self.assertEqual(grade.fraction, share)
          self.assertEqual(source.solution(task), known.source(known.right))

    asyncio.run(main())

  def test_run_shows_one_constant_after_the_other(self):
    task = _TWO.task(3, 'train')
    known = _TWO._instance_of(task)
    (a, b), (c, d) = known.right, known.wrong

    async def main():
      shown = {}
      async with pool_lib.Pool(1) as pool, pool.session() as session:
        for constants in ((c, d), (a, d), (a, b)):
          outputs = await grading.call_function(
              session,
              known.source(constants),
              summary_repair.ENTRY,
              [case.args for case in task.public_tests],
              task.limits,
          )
          shown[constants] = tools.report(
              task.public_tests, outputs.values, outputs.errors, outputs.failure
          )
      return shown

    shown = asyncio.run(main())
    self.assertIn(f'={a} not {c}', shown[c, d])
    self.assertIn(f'={b} not {d}', shown[a, d])
    self.assertEqual(shown[a, b], 'ok')
    for constants, text in shown.items():  # what demonstrations pretend
      self.assertEqual(known.shown(constants), text)

  def test_splits_share_nothing_and_tasks_come_again(self):
    prints = {
        split: {_SOURCE.fingerprint(_SOURCE.task(k, split)) for k in range(200)}
        for split in _SPLITS
    }
    self.assertLen(set.union(*prints.values()), 800)
    self.assertEqual(
        _SOURCE.task(7, 'eval'), summary_repair.SummaryRepair().task(7, 'eval')
    )
    self.assertNotEqual(
        _SOURCE.task(7, 'eval'),
        summary_repair.SummaryRepair(seed=1).task(7, 'eval'),
    )
    families = {_SOURCE.task(k, 'heldout').meta['family'] for k in range(40)}
    self.assertEqual(families, set(summary_repair.HELDOUT))
    with self.assertRaisesRegex(ValueError, "split='test'"):
      _SOURCE.task(0, 'test')
    with self.assertRaisesRegex(ValueError, 'inputs=1'):
      summary_repair.SummaryRepair(inputs=1)

  def test_needs_more_context_than_there_is(self):
    """In the experiment, what `run` shows and the edits exceed the window."""
    renderer, cfg = _renderer(), summary.experiment().harness
    for k in range(300):
      task = _SOURCE.task(k, _SPLITS[k % 4])
      known = _SOURCE._instance_of(task)
      prompt = len(renderer.encode_task(task))
      run = len(renderer.encode_turn([tools.Run()]))
      seen = len(renderer.encode_observation(known.shown(known.wrong)))
      edits = [known.edit(i, known.wrong[i], known.right[i]) for i in range(2)]
      turn = len(renderer.encode_turn([*edits, tools.Done()]))
      self.assertLess(prompt, cfg.summary_trigger_tokens)
      self.assertGreaterEqual(prompt + run + seen, cfg.summary_trigger_tokens)
      self.assertGreater(prompt + run + seen + turn, cfg.max_context_tokens)
      self.assertLessEqual(turn, cfg.max_turn_tokens)
      query = len(renderer.encode_summary_query())
      asked = prompt + run + seen + query + cfg.summary_tokens
      self.assertLessEqual(asked, cfg.max_context_tokens)


class DemoTest(parameterized.TestCase):

  @parameterized.parameters(_SOURCE, _TWO)
  def test_no_demo_writes_a_right_constant(self, source):
    renderer = _renderer()
    summaries = []
    for k in range(600):
      task = source.task(k, 'warmup')
      known = source._instance_of(task)
      lines = [known.edit(i, 0, 1).line for i in range(2)]
      pieces = source.demo_window(task, random.Random(k), renderer)
      for ids, trained in pieces:
        if not trained:
          continue
        try:
          calls = renderer.parse(ids)
        except tools.ParseError:  # a summary
          text = renderer.text(ids[:-1])
          summaries.append([int(text), *known.right, *known.wrong])
          continue
        for edit in calls:
          if isinstance(edit, tools.Edit):
            right = known.right[lines.index(edit.line)]
            self.assertNotEqual(edit.new, str(right))
    said, *others = np.transpose(summaries)
    self.assertEqual(set(said.tolist()), set(range(10)))
    for digits in others:  # it has nothing to do with what was seen
      self.assertBetween(np.mean(said == digits), 0.04, 0.16)

  def test_warm_up_trains_turns_and_summaries_only(self):
    renderer = _renderer()
    self.assertIsInstance(_SOURCE, task_lib.DemoWindows)
    demos = sources.Demos(_SOURCE, renderer, tokens_per_row=96, seed=0)
    documents, cursor = demos.next(stream.Cursor(), rows=4)
    self.assertLen(documents, cursor.chunk)
    edit = r'<\|edit\|><\|\d\|>\d<\|to\|>\d'
    for document in documents:
      self.assertRegex(
          renderer.text(document.tokens[document.sampled].tolist()),
          r'^(<\|run\|><\|end\|>\d<\|end\|>'
          rf'|{edit}{edit}<\|done\|><\|end\|>)$',
      )

  @parameterized.parameters(_SOURCE, _TWO)
  def test_demos_are_windows_that_the_harness_makes(self, source):
    renderer = _renderer()
    cfg = config.HarnessConfig(
        max_turns=source.facts + 1,
        max_context_tokens=80,
        summary_trigger_tokens=44,
        summary_tokens=4,
    )
    parts = set()

    async def main():
      async with pool_lib.Pool(1) as pool, pool.session() as session:
        for k in range(12):
          task = source.task(k, 'warmup')
          pieces = source.demo_window(task, random.Random(k), renderer)
          demo = [i for ids, _ in pieces for i in ids]
          turns = [ids for ids, trained in pieces if trained]
          _, *resumed = renderer.text(demo).split('<|obs|>')
          at = int(pieces[0][0] != renderer.encode_task(task))
          if at and '<|task|>2 1<' in resumed[0]:
            continue  # another window would have to come before it
          if at:
            turns.insert(0, renderer.encode_summary(resumed[0][0]))
            turns.insert(0, renderer.encode_turn([tools.Run()]))
          policy = sampled_policy.ScriptedPolicy(
              [*turns, renderer.encode_turn([tools.Done()])]
          )
          episode = await harness.run(
              task, session, policy, renderer, cfg=cfg, seed=0
          )
          parts.add(at)
          self.assertEqual(episode.segments[at].tokens.tolist(), demo)

    asyncio.run(main())
    self.assertEqual(parts, {0, 1})


if __name__ == '__main__':
  absltest.main()
