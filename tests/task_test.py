"""Micro-repair tasks: deterministic, disjoint, solvable, honest demos."""

import collections
import random
import time

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st

from composer_jax.agents import tools
from composer_jax.environments import micro_repair
from composer_jax.sandbox import child

_SPLITS = ('train', 'warmup', 'eval', 'heldout')
_SOURCES = (
    micro_repair.MicroRepair(),
    micro_repair.MicroRepair(distractors=2, seed=3),
    micro_repair.MicroRepair(n_bugs=2),
    micro_repair.MicroRepair(show_failure=False),
)
_sources = st.sampled_from(_SOURCES)
_tasks = st.tuples(_sources, st.integers(0, 10**9), st.sampled_from(_SPLITS))


def _passes(source, task, text):
  cases = task.public_tests + source.hidden(task)
  return _failing(text, cases) == 0


def _failing(text, cases):
  scope = {}
  exec(text, scope)
  wrong = 0
  for case in cases:
    try:
      out = child.canonical(scope['f'](*[list(a) for a in case.args]))
    except Exception:
      out = ''
    wrong += out != child.canonical(case.expected)
  return wrong


class MicroRepairTest(parameterized.TestCase):

  @hypothesis.given(_tasks)
  # Two of its inputs were equal once: the one shown and a hidden one.
  @hypothesis.example((micro_repair.MicroRepair(), 537525, 'eval'))
  @hypothesis.settings(deadline=None, max_examples=60)
  def test_is_a_fair_task(self, drawn):
    source, index, split = drawn
    task = source.task(index, split)
    hidden = source.hidden(task)
    buggy = task.files['f.py']
    self.assertTrue(_passes(source, task, source.solution(task)))
    self.assertGreater(_failing(buggy, hidden), 0)
    self.assertEqual(_failing(buggy, task.public_tests), 1)
    self.assertLen(task.public_tests, 1)
    self.assertGreaterEqual(len(hidden), 6)
    self.assertNotIn(task.public_tests[0], hidden)
    lines = buggy.count('\n') + 1
    self.assertBetween(lines, 3, 8 + source.distractors)
    held = task.meta['family'] in source.heldout_families
    self.assertEqual(held, split == 'heldout')
    self.assertEqual(bool(task.instruction), source.show_failure)

  @hypothesis.given(_tasks)
  @hypothesis.settings(deadline=None, max_examples=60)
  def test_legal_edits_repair_it(self, drawn):
    source, index, split = drawn
    task = source.task(index, split)
    texts = {task.files['f.py']}
    for _ in range(source.n_bugs):
      edits = [
          (t, e) for t in texts for e in micro_repair._edits(t.split('\n'))
      ]
      texts = {tools.edit({'f.py': t}, e).files['f.py'] for t, e in edits}
    self.assertIn(source.solution(task), texts)

  @hypothesis.given(_tasks, st.integers(0, 2**32))
  @hypothesis.settings(deadline=None, max_examples=100)
  def test_a_demo_is_legal_and_never_right(self, drawn, seed):
    source, index, split = drawn
    task = source.task(index, split)
    calls = source.demo(task, random.Random(seed))
    if calls == [tools.Run()]:
      self.assertFalse(source.show_failure)
      return
    *edits, done = calls
    self.assertEqual(done, tools.Done())
    self.assertNotEmpty(edits)
    files = task.files
    gold = source.solution(task).split('\n')
    for edit in edits:
      self.assertIn(edit, source.legal_edits(task))
      self.assertNotEqual(edit.old, edit.new)
      outcome = tools.edit(files, edit)
      self.assertFalse(outcome.failed)
      files = outcome.files
      after = files['f.py'].split('\n')[edit.line]
      self.assertNotEqual(after, gold[edit.line])
    self.assertFalse(_passes(source, task, files['f.py']))

  def test_same_arguments_same_task(self):
    fresh = micro_repair.MicroRepair(seed=1)
    before = [fresh.task(k, 'train') for k in range(20)]
    hidden = [fresh.hidden(t) for t in before]
    micro_repair._instance.cache_clear()
    again = micro_repair.MicroRepair(seed=1)
    self.assertEqual([again.task(k, 'train') for k in range(20)], before)
    self.assertEqual([again.hidden(t) for t in before], hidden)
    other = micro_repair.MicroRepair(seed=2)
    self.assertNotEqual([other.task(k, 'train') for k in range(20)], before)

  def test_splits_share_no_instance_whatever_the_seed(self):
    texts, prints = collections.defaultdict(set), collections.Counter()
    for seed in (0, 1):
      source = micro_repair.MicroRepair(seed=seed)
      for split in _SPLITS:
        for k in range(250):
          task = source.task(k, split)
          texts[task.files['f.py']].add(split)
          prints[source.fingerprint(task)] += 1
    self.assertLen(prints, 2 * 4 * 250)
    self.assertEqual(max(map(len, texts.values())), 1)

  def test_families(self):
    source = micro_repair.MicroRepair()
    train = {source.task(k, 'train').meta['family'] for k in range(600)}
    held = {source.task(k, 'heldout').meta['family'] for k in range(200)}
    evaluated = {source.task(k, 'eval').meta['family'] for k in range(600)}
    self.assertGreaterEqual(len(train), 16)
    self.assertGreaterEqual(len(held), 5)
    self.assertEqual(train, evaluated)
    self.assertEmpty(train & held)

  def test_chance_of_a_random_edit(self):
    source = micro_repair.MicroRepair()
    chances = [source.chance(source.task(k, 'eval')) for k in range(300)]
    self.assertBetween(sum(chances) / len(chances), 0.1, 0.22)

  def test_generation_is_quick(self):
    source = micro_repair.MicroRepair(seed=99)
    start = time.process_time()
    for k in range(300):
      source.task(k, 'train')
    # A millisecond alone.
    self.assertLess((time.process_time() - start) / 300, 0.1)

  @parameterized.parameters(
      (dict(n_bugs=3), 'n_bugs'),
      (dict(distractors=9), 'distractors'),
      (dict(heldout_families=('nothing',)), 'heldout_families'),
  )
  def test_refuses(self, fields, name):
    with self.assertRaisesRegex(ValueError, name):
      micro_repair.MicroRepair(**fields)

  def test_refuses_unknown_split(self):
    with self.assertRaisesRegex(ValueError, 'split'):
      micro_repair.MicroRepair().task(0, 'test')


if __name__ == '__main__':
  absltest.main()
