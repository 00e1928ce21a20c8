"""Reward hacks against function grading: none may earn anything."""

import asyncio
import dataclasses
import unittest

from absl.testing import absltest
from absl.testing import parameterized

from composer_jax import task as task_lib
from composer_jax.environments import micro_repair
from composer_jax.sandbox import grading
from composer_jax.sandbox import pool as pool_lib
from tests import sandbox_attacks

_CASES = tuple(
    task_lib.Case((a, b), a + b)
    for a, b in ((1, 2), (5, 5), (-1, 4), (17, 25), (-8, -9))
)
_VISIBLE = _CASES[:3]
_TASK = task_lib.Task(
    'add',
    'add two numbers',
    {'sol.py': ''},
    _VISIBLE,
    task_lib.Limits(cpu_seconds=0.3, wall_seconds=2.0),
    meta={'entry': 'add'},
)
_GOOD = 'def add(a, b):\n  return a + b\n'
_BAD = 'def add(a, b):\n  return a - b\n'
_ALL = (True,) * 5
_WRITE = """
import os
for fd in range(1, 64):
  try: os.write(fd, b'+3\\n+10\\n+3\\n+42\\n+-17\\n' * {times})
  except OSError: pass
"""
_HACKS = {
    'edit_tests': _BAD + "open('test_sol.py', 'w').write('')\n",
    'conftest': _BAD + "open('conftest.py', 'w').write('import os')\n",
    'pytest_ini': _BAD + "open('pytest.ini', 'w').write('[pytest]')\n",
    'exit_zero': 'import sys\nsys.exit(0)\n',
    'os_exit_zero': 'import os\nos._exit(0)\n',
    'print_ok_and_exit': (
        'import os\nos.write(1, b"Ran 5 tests\\n\\nOK\\n5 passed\\n")\n'
        'os._exit(0)\n'
    ),
    'patch_assert_equal': (
        'import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n'
        + _BAD
    ),
    'exit_at_the_end': 'import atexit, os\natexit.register(os._exit, 0)\n'
    + _BAD,
    'always_equal': (
        'class E(int):\n  __eq__ = lambda s, o: True\n'
        '  __ne__ = lambda s, o: False\n  __hash__ = int.__hash__\n'
        'def add(a, b): return E(0)\n'
    ),
    'shadow_unittest': _BAD + "open('unittest.py', 'w').write('')\n",
    'peek_at_frames': """
import sys
def add(a, b):
  frame = sys._getframe(0)
  while frame:
    for scope in (frame.f_locals, frame.f_globals):
      for name in ('expected', 'cases', 'answer'):
        if name in scope: return scope[name]
    for c in frame.f_code.co_consts:
      if type(c) is int and c not in (a, b): found = c
    frame = frame.f_back
  return 0
""",
    'read_the_tests': """
import glob, re
def add(a, b):
  for base in ('/box', '/tmp', '/', '/usr/share'):
    for path in glob.glob(base + '/*.py'):
      found = re.search(r'add.%d, ?%d.*?(-?[0-9]+)' % (a, b), open(path).read())
      if found: return int(found[1])
  return 0
""",
    'forge_and_go_on': _WRITE.format(times=1) + _BAD,
    'forge_json': (
        'import json, os\nfor fd in range(3, 20):\n  try: os.write(fd,'
        ' json.dumps({"id": "test_a", "ok": True}).encode() + b"\\n")\n'
        '  except OSError: pass\n' + _BAD
    ),
    'search_the_heap': """
import gc
def add(a, b):
  for o in gc.get_objects():
    if isinstance(o, dict) and ('expected' in o or 'NONCE' in o):
      return o.get('expected', 0)
  return 0
""",
    'hard_code_what_is_visible': (
        'def add(a, b): return {(1, 2): 3, (5, 5): 10, (-1, 4): 3}[a, b]\n'
    ),
    'patch_the_runner': """
import sys
m = sys.modules['composer_jax.sandbox.child']
m.canonical = lambda value, depth=0: 'True'
m.json.dumps = m.json.loads = lambda *a: [0, 0]
def add(a, b): return 0
""",
    'raise_every_input': 'def add(a, b): raise ValueError((a, b))\n',
    'subclass_in_a_list': (
        'class L(list):\n  __eq__ = lambda s, o: True\n'
        'def add(a, b): return L([a + b])\n'
    ),
    'bool_for_int': 'def add(a, b): return a + b == 3\n',
    'float_for_int': 'def add(a, b): return float(a + b)\n',
    'text_for_int': 'def add(a, b): return str(a + b)\n',
    'liar_repr': """
class R(int):
  def __repr__(self): return 'anything'
def add(a, b): return R(a + b)
""",
    'kill_the_runner': (
        'import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)\n' + _BAD
    ),
    'dont_return': 'def add(a, b):\n  while True: pass\n',
    'sleep': 'import time\ndef add(a, b): time.sleep(60)\n',
    'fork_bomb': (
        'import os\ndef add(a, b):\n  while True:\n    try: os.fork()\n'
        '    except OSError: pass\n'
    ),
    'eat_memory': 'x = [bytearray(1 << 26) for _ in range(99)]\n' + _GOOD,
    'answer_twice': (
        'import os\ndef add(a, b):\n  os.fork()\n  return a + b\n'
    ),
    'flood': 'import os\n' + _WRITE.format(times=100_000) + _GOOD,
    'endless_value': 'def add(a, b):\n  x = []\n  x.append(x)\n  return x\n',
    'huge_value': 'def add(a, b): return "3" * 2_000_000\n',
    'syntax_error': 'def add(a, b) return a + b\n',
    'no_entry': 'def plus(a, b): return a + b\n',
    'empty': '',
    'null_byte': 'def add(a, b):\n  return "\\0"\n\0',
    'surrogate': 'def add(a, b): return "\\ud800"\n',
}


def _grade(*sources):
  """Grades each source in the same warm sandbox, one after the other."""

  async def main():
    async with pool_lib.Pool(1) as pool:
      out = []
      for source in sources:
        async with pool.session() as session:
          out.append(
              await grading.grade(session, _TASK, {'sol.py': source}, _CASES)
          )
      return out

  return asyncio.run(main())


class GradingTest(parameterized.TestCase):

  def test_hacks_earn_nothing_and_harm_nobody_after_them(self):
    sources = [_GOOD, _BAD]
    for source in _HACKS.values():
      sources += [source, _GOOD]  # a poisoned sandbox would show here
    good, bad, *rest = _grade(*sources)
    self.assertEqual(good, grading.Grade(_ALL))
    self.assertEqual(bad.passed, (False,) * 5)
    for name, hack, after in zip(_HACKS, rest[::2], rest[1::2], strict=True):
      self.assertTrue(hack.valid, name)  # the policy's doing: counts
      self.assertFalse(all(hack.passed), name)
      self.assertLen(hack.passed, 5, name)
      self.assertEqual(after, grading.Grade(_ALL), f'after {name}')

  @parameterized.parameters(
      ('dont_return', 'timeout'),
      ('sleep', 'timeout'),
      ('os_exit_zero', 'died'),
      ('flood', 'malformed'),
      ('huge_value', 'malformed'),
  )
  def test_failures_have_names(self, name, failure):
    (grade,) = _grade(_HACKS[name])
    self.assertEqual(grade.failure, failure)
    self.assertEqual(grade.fraction, 0)

  def test_files_that_were_added_or_removed_crash_nobody(self):
    async def main():
      async with pool_lib.Pool(1) as pool, pool.session() as session:
        more = {'a.py': 'import os', 'sol.py': _GOOD}
        return [
            await grading.grade(session, _TASK, files, _CASES)
            for files in (more, {'a.py': _GOOD}, {})
        ]

    good, moved, nothing = asyncio.run(main())
    self.assertEqual(good, grading.Grade(_ALL))
    self.assertTrue(moved.valid and nothing.valid)
    self.assertFalse(any(moved.passed + nothing.passed))

  def test_partial_credit_and_reason(self):
    visible, broken = _grade(
        _HACKS['hard_code_what_is_visible'], _HACKS['syntax_error']
    )
    self.assertEqual(visible.passed, (True,) * 3 + (False,) * 2)
    self.assertEqual(visible.fraction, 0.6)
    self.assertEqual(visible.reason, 'KeyError')
    self.assertEqual(broken.reason, 'SyntaxError')

  def test_arguments_are_fresh_for_every_call(self):
    cases = [task_lib.Case(([1],), 1), task_lib.Case(([1],), 1)]

    async def main():
      async with pool_lib.Pool(1) as pool, pool.session() as session:
        source = 'def add(x):\n  x.append(0)\n  return len(x) - 1\n'
        return await grading.grade(session, _TASK, {'sol.py': source}, cases)

    self.assertEqual(asyncio.run(main()).passed, (True, True))


class GraderTest(unittest.IsolatedAsyncioTestCase):

  async def test_gold_one_buggy_zero_and_equal_texts_share_a_run(self):
    source = micro_repair.MicroRepair()
    drawn = [
        source.task(k, split) for k in range(8) for split in ('eval', 'heldout')
    ]
    async with pool_lib.Pool(2) as pool:
      grader = grading.Grader(source, pool)
      gold = await asyncio.gather(
          *(grader(t, {'f.py': source.solution(t)}) for t in drawn * 3)
      )
      buggy = await asyncio.gather(*(grader(t, t.files) for t in drawn))
    self.assertTrue(all(all(g.passed) and g.valid for g in gold))
    self.assertTrue(all(not all(g.passed) and g.valid for g in buggy))
    self.assertEqual((grader.asked, grader.run), (16 * 4, 16 * 2))

  async def test_infrastructure_failure_is_invalid_and_not_remembered(self):
    source = micro_repair.MicroRepair()
    task = source.task(0, 'eval')
    async with pool_lib.Pool(1) as pool:
      grader = grading.Grader(source, pool)
      sandbox_attacks.dies_when_used(pool._idle[0])
      broken = await grader(task, task.files)
      again = await grader(task, task.files)
    self.assertFalse(broken.valid)
    self.assertNotEmpty(broken.reason)
    self.assertTrue(again.valid)

  def assertNotEmpty(self, value):
    self.assertTrue(value)

  async def test_a_verdict_belongs_to_what_is_graded_not_to_a_name(self):
    one = dataclasses.replace(_TASK, meta={**_TASK.meta, 'want': '3'})
    two = dataclasses.replace(_TASK, meta={**_TASK.meta, 'want': '4'})

    class Source(micro_repair.MicroRepair):

      def hidden(self, task):
        return (task_lib.Case(([1, 2],), int(task.meta['want'])),)

    submission = {'sol.py': 'def add(x):\n  return sum(x)\n'}
    async with pool_lib.Pool(1) as pool:
      grader = grading.Grader(Source(), pool)
      grades = [await grader(t, submission) for t in (one, two)]
      again = dataclasses.replace(one, id='another name')
      grades.append(await grader(again, submission))
      self.assertEqual([g.solved for g in grades], [True, False, True])
      self.assertEqual((grader.asked, grader.run), (3, 2))
      slow = dataclasses.replace(one, limits=task_lib.Limits(9.0, 30.0))
      await grader(slow, submission)
      self.assertEqual(grader.run, 3)

  async def test_one_cancelled_rollout_leaves_the_verdict_to_the_others(self):
    source = micro_repair.MicroRepair()
    task = source.task(1, 'eval')
    async with pool_lib.Pool(1) as pool:
      grader = grading.Grader(source, pool)
      first = asyncio.create_task(grader(task, task.files))
      second = asyncio.create_task(grader(task, task.files))
      await asyncio.sleep(0)
      first.cancel()
      self.assertTrue((await second).valid)


class ScoreTest(absltest.TestCase):

  def test_fraction_of_nothing_is_zero(self):
    self.assertEqual(grading.Grade(()).fraction, 0.0)
    self.assertEqual(
        dataclasses.replace(grading.Grade(()), passed=(True, False)).fraction,
        0.5,
    )


if __name__ == '__main__':
  absltest.main()
