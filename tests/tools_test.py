"""Tools: every mistake is an answer, and answers are bounded."""

import asyncio

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
      (tools.Edit(-1, 'a', 'b'), 'a+=1\nb=a+a', 'no line -1', True),
      (tools.Edit(-100, 'a', 'b'), 'a+=1\nb=a+a', 'no line -100', True),
      (tools.Edit(0, '*', '/'), 'a+=1\nb=a+a', 'no * in line 0', True),
      (tools.Edit(0, 'a', 'a'), 'a+=1\nb=a+a', 'no change', True),
  )
  def test_edit(self, call, text, said, failed):
    outcome = tools.edit(_FILES, call)
    self.assertEqual(outcome, tools.Outcome({'f.py': text}, said, failed))
    self.assertEqual(_FILES['f.py'], 'a+=1\nb=a+a')

  def test_a_task_without_files_has_no_line(self):
    self.assertTrue(tools.edit({}, tools.Edit(0, 'a', 'b')).failed)

  @parameterized.parameters('name', 'argument', 'value')
  def test_text_that_is_no_text_is_refused(self, where):
    odd = 'a\ud800'
    name = odd if where == 'name' else 'replace'
    arguments = {'path': 'f.py', 'old': 'a', 'new': 'b'}
    if where == 'argument':
      arguments[odd] = 'x'
    elif where == 'value':
      arguments['new'] = odd
    with self.assertRaises(tools.ParseError) as caught:
      tools.call_of(name, arguments)
    str(caught.exception).encode()  # it is shown, so it has to be text

  def test_a_long_name_is_not_repeated_in_full(self):
    for name, arguments in (('x' * 9999, {}), ('run', {'x' * 9999: 1})):
      with self.assertRaises(tools.ParseError) as caught:
        tools.call_of(name, arguments)
      self.assertLess(len(str(caught.exception)), 200)

  _values = st.recursive(
      st.none()
      | st.booleans()
      | st.integers()
      | st.sampled_from([-100, -1, 10**4299, -(10**4299)])
      | st.floats()
      | st.text(st.characters(codec=None)),
      lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
      max_leaves=4,
  )
  _fields = st.sampled_from(
      ['path', 'line', 'old', 'new', 'first', 'last', 'text', '\udfff']
  )

  @hypothesis.given(
      st.sampled_from([*tools.BY_NAME, 'rm', '\ud800']),
      st.dictionaries(_fields, _values),
      st.dictionaries(st.sampled_from(['f.py', 'g', '']), st.text()),
  )
  @hypothesis.settings(deadline=None, max_examples=300)
  def test_any_call_is_refused_or_carried_out(self, name, arguments, files):
    problem = task.Task('t', '', files, ())

    async def run_tests(*unused):
      return 'ok'

    try:
      call = tools.call_of(name, arguments)
    except tools.ParseError as e:
      str(e).encode()
      return
    out = asyncio.run(tools.execute(call, problem, files, run_tests))
    for text in (out.text, str(call), *out.files, *out.files.values()):
      text.encode()

  @hypothesis.given(st.text(), st.integers(0, 40))
  @hypothesis.settings(deadline=None, max_examples=50)
  def test_truncate_bounds_the_bytes(self, text, limit):
    out = tools.truncate(text, limit)
    size = len(text.encode(errors='replace'))
    self.assertLessEqual(len(out.encode(errors='replace')), max(limit, 3))
    if size <= limit:
      self.assertEqual(out, text)

  @hypothesis.given(st.text(st.characters(codec=None)), st.integers(0, 40))
  @hypothesis.settings(deadline=None, max_examples=50)
  def test_what_is_shown_is_text(self, text, limit):
    tools.truncate(text, limit).encode()
    self.assertNotIn('\ud800', tools.truncate('\ud800', 40))

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
