"""Tools: every mistake is an answer, and answers are bounded."""

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st

from composer_jax import task
from composer_jax.agents import tools

_FILES = {'f.py': 'a+=1\nb=a+a'}


class ToolsTest(parameterized.TestCase):

  @parameterized.parameters(
      (tools.Edit(0, '+=', '-='), 'a-=1\nb=a+a', 'ok', False),
      (tools.Edit(1, 'a', ''), 'a+=1\nb=+a', 'ok', False),
      (tools.Edit(2, 'a', 'b'), 'a+=1\nb=a+a', 'no line 2', True),
      (tools.Edit(0, '*', '/'), 'a+=1\nb=a+a', 'no * in line 0', True),
      (tools.Edit(0, 'a', 'a'), 'a+=1\nb=a+a', 'no change', True),
  )
  def test_edit(self, call, text, said, failed):
    outcome = tools.edit(_FILES, call)
    self.assertEqual(outcome, tools.Outcome({'f.py': text}, said, failed))
    self.assertEqual(_FILES['f.py'], 'a+=1\nb=a+a')

  @hypothesis.given(st.text(), st.integers(0, 40))
  @hypothesis.settings(deadline=None, max_examples=50)
  def test_truncate_bounds_the_bytes(self, text, limit):
    out = tools.truncate(text, limit)
    size = len(text.encode(errors='replace'))
    self.assertLessEqual(len(out.encode(errors='replace')), max(limit, 3))
    if size <= limit:
      self.assertEqual(out, text)

  def test_truncate_cuts_the_middle(self):
    self.assertEqual(
        tools.truncate('start' + '-' * 99 + 'end', 11), 'star...-end'
    )

  def test_report(self):
    cases = (task.Case(([1, 2],), 3), task.Case(([],), 0))
    report = tools.report
    self.assertEqual(report(cases, ['3', '0'], ['', ''], ''), 'ok')
    self.assertEqual(report(cases, ['4', '0'], ['', ''], ''), '[1,2]=3 not 4')
    self.assertEqual(
        report(cases, ['3', None], ['', 'TypeError'], ''), '[]=0 not TypeError'
    )
    self.assertEqual(
        report(cases, [None, None], ['', ''], 'timeout'), '[1,2]=3 not timeout'
    )


if __name__ == '__main__':
  absltest.main()
