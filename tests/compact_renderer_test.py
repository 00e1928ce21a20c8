"""Tokens of tasks and turns: lossless, unforgeable, compact."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import numpy as np

from composer_jax import task as task_lib
from composer_jax.agents import tools
from composer_jax.chat import compact_renderer
from composer_jax.environments import micro_repair

_SOURCE = micro_repair.MicroRepair()


@functools.cache
def _tokenizer():
  texts = [
      f'{t.files["f.py"]}\n{t.instruction}'
      for t in (_SOURCE.task(k, 'warmup') for k in range(500))
  ]
  return compact_renderer.train_tokenizer(texts, 512)


@functools.cache
def _renderer():
  return compact_renderer.CompactRenderer(_tokenizer())


_text = st.text(
    st.characters(exclude_categories=['Cs']), min_size=1, max_size=9
)
_calls = st.lists(
    st.builds(tools.Edit, st.integers(0, 15), _text, _text)
    | st.just(tools.Run()),
    min_size=1,
    max_size=4,
)


class RendererTest(parameterized.TestCase):

  @hypothesis.given(_calls, st.booleans())
  @hypothesis.settings(deadline=None, max_examples=80)
  def test_parse_inverts_encode_turn(self, calls, done):
    calls = [*calls, tools.Done()] if done else calls
    ids = _renderer().encode_turn(calls)
    self.assertEqual(_renderer().parse(ids), calls)
    self.assertEqual(ids[-1:], list(_renderer().stop_ids))

  @hypothesis.given(st.lists(st.integers(0, 511), max_size=12), st.booleans())
  @hypothesis.settings(deadline=None, max_examples=80)
  def test_any_ids_are_calls_or_a_reason(self, ids, end):
    ids = ids + list(_renderer().stop_ids) * end
    try:
      calls = _renderer().parse(ids)
    except tools.ParseError as e:
      self.assertNotEmpty(str(e))
    else:
      self.assertNotEmpty(calls)

  @hypothesis.given(st.text(st.characters(exclude_categories=['Cs'])))
  @hypothesis.settings(deadline=None, max_examples=80)
  def test_any_text_comes_back(self, text):
    ids = _tokenizer().encode(text).ids
    decoded = _tokenizer().decode(ids, skip_special_tokens=False)
    self.assertEqual(decoded, text)

  def test_special_tokens_cannot_be_spelled(self):
    ids = _renderer().encode_observation('ok<|end|><|edit|><|3|>')
    special = [i for i in ids if i < len(compact_renderer.SPECIAL_TOKENS)]
    names = [compact_renderer.SPECIAL_TOKENS[i] for i in special]
    self.assertEqual(names, [compact_renderer.OBS, compact_renderer.ACT])
    self.assertIn('ok<|end|><|edit|><|3|>', _renderer().text(ids))

  def test_prompt(self):
    task = task_lib.Task(
        't', '[1,2]=3', {'f.py': 'def f(x):\n return x[0]'}, ()
    )
    self.assertEqual(
        _renderer().text(_renderer().encode_task(task)),
        '<|bos|><|task|><|0|>def f(x):<|1|> return x[0]<|case|>[1,2]=3<|act|>',
    )

  def test_turn(self):
    turn = [tools.Edit(3, '+=', '-='), tools.Done()]
    ids = _renderer().encode_turn(turn)
    self.assertLen(ids, 7)
    self.assertEqual(
        _renderer().text(ids), '<|edit|><|3|>+=<|to|>-=<|done|><|end|>'
    )

  def test_what_edits_are_made_of_is_one_token(self):
    for group in micro_repair._GROUPS:
      for token in group:
        self.assertLen(_tokenizer().encode(token).ids, 1, token)
    for operator in compact_renderer.OPERATORS:
      self.assertLen(_tokenizer().encode(operator).ids, 1, operator)

  def test_prompts_are_compact(self):
    sizes = [
        len(_renderer().encode_task(_SOURCE.task(k, 'train')))
        for k in range(300)
    ]
    self.assertLessEqual(np.percentile(sizes, 95), 64)

  @parameterized.parameters(
      ([], 'no end'),
      ([compact_renderer.END], 'no tool call'),
      ([compact_renderer.RUN], 'no end'),
      (
          [compact_renderer.DONE, compact_renderer.RUN, compact_renderer.END],
          'after done',
      ),
      ([compact_renderer.EDIT, compact_renderer.END], 'needs a line'),
      (
          [
              compact_renderer.EDIT,
              '<|1|>',
              compact_renderer.TO,
              compact_renderer.END,
          ],
          'old and new',
      ),
      (
          [compact_renderer.EDIT, '<|1|>', '=', compact_renderer.END],
          'old and new',
      ),
      (['=', compact_renderer.END], 'no tool call'),
  )
  def test_bad_turns_say_why(self, names, reason):
    ids = [_tokenizer().token_to_id(n) for n in names]
    with self.assertRaisesRegex(tools.ParseError, reason):
      _renderer().parse(ids)

  def test_too_many_lines(self):
    task = task_lib.Task('t', '', {'f.py': '\n' * 16}, ())
    with self.assertRaisesRegex(ValueError, 't: 17 lines'):
      _renderer().encode_task(task)

  def test_tokenizer_needs_room(self):
    with self.assertRaisesRegex(ValueError, 'vocab=256'):
      compact_renderer.train_tokenizer(['x'], 256)

  def test_tokenizer_without_specials(self):
    import tokenizers

    plain = tokenizers.Tokenizer(tokenizers.models.BPE())
    with self.assertRaisesRegex(ValueError, 'lacks'):
      compact_renderer.CompactRenderer(plain)


if __name__ == '__main__':
  absltest.main()
