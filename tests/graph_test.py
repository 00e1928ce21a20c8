"""Every sampled token is trained once, whatever the calls of a rollout are."""

import json

from absl.testing import absltest
import hypothesis
from hypothesis import strategies as st
import numpy as np
from tests import graph_cases

from composer_jax.serving import graph

_CALLS = st.lists(
    st.tuples(
        st.integers(-1, 20),
        st.lists(st.integers(0, 2), max_size=4),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=12,
)


class GraphTest(absltest.TestCase):

  @hypothesis.given(_CALLS)
  def test_windows_rebuild_exactly(self, spec):
    calls, windows, _ = graph_cases.rollout(spec)
    for call, window in zip(calls, windows, strict=True):
      graph_cases.same(graph.window(call), window)

  @hypothesis.given(_CALLS)
  def test_a_child_begins_with_its_parent_and_the_longest_one_is_found(
      self, spec
  ):
    calls, windows, _ = graph_cases.rollout(spec)
    for call, window in zip(calls, windows, strict=True):
      prompt = window.tokens[: call.prompt_tokens].tolist()
      fits = [
          c
          for c in calls[: call.number]
          if prompt[: len(c)] == graph.window(c).tokens.tolist()
      ]
      self.assertEqual(call.parent is not None, bool(fits))
      if fits:
        self.assertLen(call.parent, max(map(len, fits)))

  @hypothesis.given(_CALLS)
  def test_every_token_is_trained_once_on_exact_windows(self, spec):
    calls, windows, drawn = graph_cases.rollout(spec)
    segments = graph.segments(calls)
    trained = np.concatenate([s.logps[s.sampled] for s in segments])
    np.testing.assert_array_equal(np.sort(-1 - trained), np.arange(drawn))
    leaves = [c for c in calls if c not in {d.parent for d in calls}]
    self.assertLen(segments, len(leaves))
    for leaf, segment in zip(leaves, segments, strict=True):
      window = windows[leaf.number]
      np.testing.assert_array_equal(segment.tokens, window.tokens)
      np.testing.assert_array_equal(
          segment.routing.experts, window.routing.experts
      )
      np.testing.assert_array_equal(segment.logps[~segment.sampled], 0)
      self.assertTrue(window.sampled[segment.sampled].all())
      # Its own sample is always trained in its own segment.
      self.assertTrue(segment.sampled[leaf.prompt_tokens :].all())

  @hypothesis.given(_CALLS)
  def test_a_dropped_call_is_not_found(self, spec):
    calls, windows, _ = graph_cases.rollout(spec)
    ends = graph.Ends()
    for call in calls:
      ends.add(call)
    for call, window in zip(calls, windows, strict=True):
      self.assertIsNotNone(ends.find(window.tokens))
      ends.drop(call)
      found = ends.find(window.tokens)
      self.assertTrue(found is None or found is not call)
    self.assertIsNone(ends.find(windows[-1].tokens))

  def test_memory_is_linear_in_a_conversation(self):
    spec = [(i - 1, [1] * 4, 4) for i in range(30)]
    calls, _, _ = graph_cases.rollout(spec)
    rows = sum(len(c.rows) for c in calls)
    self.assertLen(graph.segments(calls), 1)
    self.assertLessEqual(rows, 30 * 9)

  def test_rewritten_history_is_a_root_of_its_own(self):
    calls, _, _ = graph_cases.rollout(
        [(-1, [0, 1], 2), (-1, [2, 2, 2], 2), (0, [1], 1)]
    )
    self.assertIsNone(calls[1].parent)
    self.assertIs(calls[2].parent, calls[0])
    self.assertLen(graph.segments(calls), 2)

  def test_a_cut_window_has_no_route_at_its_end(self):
    _, windows, _ = graph_cases.rollout([(-1, [0, 1], 4)])
    cut = graph.truncate(windows[0], 4)
    self.assertLen(cut, 4)
    self.assertTrue(np.all(cut.routing.experts[-1] == graph_cases.BLANK))
    np.testing.assert_array_equal(
        cut.routing.experts[:-1], windows[0].routing.experts[:3]
    )


_TEXT = st.text(st.sampled_from('ab{}"é'), max_size=4)
_MESSAGE = st.fixed_dictionaries(
    {
        'role': st.sampled_from(['user', 'assistant', 'tool']),
        'content': _TEXT,
    }
)


class MessageKeysTest(absltest.TestCase):

  @hypothesis.given(
      st.lists(_MESSAGE, max_size=4), st.lists(_MESSAGE, max_size=4)
  )
  def test_keys_are_equal_iff_messages_are(self, a, b):
    keys = graph.message_keys(a, []), graph.message_keys(b, [])
    for i in range(min(len(a), len(b))):
      self.assertEqual(keys[0][i] == keys[1][i], a[: i + 1] == b[: i + 1])

  def test_what_clients_change_in_a_reply_does_not_matter(self):
    def call(arguments, **more):
      function = {'name': 'run', 'arguments': arguments}
      return {
          'role': 'assistant',
          'tool_calls': [{'id': 'x', 'type': 'function', 'function': function}],
          **more,
      }

    ours = call(json.dumps({'a': 1, 'b': 'é'}), content=None)
    theirs = call('{"b":"\\u00e9",  "a":1}', content='', refusal=None)
    self.assertEqual(
        graph.message_keys([ours], []), graph.message_keys([theirs], [])
    )
    for other in (call('{"a":1}'), call('{"a":1,"b":"e"}'), call('no json')):
      self.assertNotEqual(
          graph.message_keys([ours], []), graph.message_keys([other], [])
      )
    tool = {'role': 'tool', 'content': 'x', 'tool_call_id': '1'}
    self.assertNotEqual(
        graph.message_keys([tool], []),
        graph.message_keys([{**tool, 'tool_call_id': '2'}], []),
    )

  def test_tools_are_the_root(self):
    messages = [{'role': 'user', 'content': 'x'}]
    self.assertNotEqual(
        graph.message_keys(messages, []),
        graph.message_keys(messages, [{'function': {'name': 'run'}}]),
    )


if __name__ == '__main__':
  absltest.main()
