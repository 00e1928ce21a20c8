"""A folder is tried when it is loaded: chats are understood, or refused."""

import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import tokenizers
from tests import family_templates
from tests import template_test

from composer_jax.chat import chat_renderer
from composer_jax.chat import hub_files
from composer_jax.chat import probe
from composer_jax.chat import template as template_lib


class ProbeTest(parameterized.TestCase):

  def _check(self, template, stop, made=None):
    made = made or family_templates.tokenizer()
    names = {'bos_token': '<s>', 'eos_token': '</s>'}
    form = template_lib.ChatFormat(made, template, [stop], names)
    probe.check(form, made.to_str())
    return form

  @parameterized.parameters(*family_templates.FAMILIES)
  def test_every_family_can_be_played(self, family):
    form = self._check(*family_templates.FAMILIES[family])
    renderer = chat_renderer.ChatRenderer(form)
    self.assertTrue(renderer.encode_observation('ok'))

  def test_a_template_without_tools_is_accepted(self):
    template = template_test.LLAMA
    form = self._check(template, '<|eot_id|>')
    self.assertFalse(form.reads_calls)

  def test_calls_that_cannot_be_read_are_refused(self):
    template, stop = family_templates.FAMILIES['qwen']
    odd = template.replace('</tool_call>', '</call>')
    with self.assertRaisesRegex(ValueError, 'shows tools, but a call'):
      self._check(odd, stop)

  def test_a_reply_must_end_in_a_stop_token(self):
    with self.assertRaisesRegex(ValueError, "with '<|eot_id|>', but.*</s>"):
      self._check(template_test.LLAMA, '</s>')

  def test_the_whole_has_the_ids_of_its_parts(self):
    made = family_templates.tokenizer()
    end = tokenizers.AddedToken('<|eot_id|>', special=True, lstrip=True)
    made.add_special_tokens([end])
    template = template_test.LLAMA.replace("'<|eot_id|>'", "' <|eot_id|>'")
    with self.assertRaisesRegex(ValueError, 'other ids alone than in the who'):
      self._check(template, '<|eot_id|>', made)


class FilesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    source = family_templates.tokenizer().to_str()
    self.template, stop = family_templates.FAMILIES['qwen']
    for name, text in hub_files.write(
        source, self.template, [stop], {}
    ).items():
      (self.folder / name).write_text(text)

  @parameterized.parameters(
      ('generation_config.json', '{', 'no JSON'),
      ('generation_config.json', '[]', 'no JSON object'),
      ('generation_config.json', '{"eos_token_id": "x"}', 'want ids'),
      ('tokenizer_config.json', '// x\n{}', 'no JSON'),
      ('tokenizer_config.json', '{"eos_token": [1]}', 'eos_token=.*want text'),
      ('tokenizer.json', '{}', 'not a tokenizer'),
      ('chat_template.jinja', None, 'no readable text'),
  )
  def test_a_bad_file_is_named_in_one_line(self, name, text, part):
    path = self.folder / name
    path.write_bytes(b'\xff\xfe') if text is None else path.write_text(text)
    with self.assertRaisesRegex(
        ValueError, f'^[^\n]*{name}: [^\n]*{part}[^\n]*$'
    ):
      hub_files.read(self.folder)

  def test_a_byte_order_mark_is_no_text(self):
    want = hub_files.read(self.folder)
    for path in self.folder.iterdir():
      path.write_bytes(b'\xef\xbb\xbf' + path.read_bytes())
    self.assertEqual(hub_files.read(self.folder), want)

  def _named(self, value):
    (self.folder / 'chat_template.jinja').write_text('')
    path = self.folder / 'tokenizer_config.json'
    settings = json.loads(path.read_text()) | {'chat_template': value}
    path.write_text(json.dumps(settings))

  def test_named_templates_are_chosen_as_transformers_do(self):
    plain = (
        '\n {% for m in messages %}{{ m.content }}{% endfor %}<|im_end|> \n '
    )
    self._named([
        {'name': 'default', 'template': plain},
        {'name': 'tool_use', 'template': self.template},
    ])  # fmt: skip
    source, template, stop, names = hub_files.read(self.folder)
    made = tokenizers.Tokenizer.from_str(source)
    form = lambda t: template_lib.ChatFormat(made, t, stop, names)
    messages = [{'role': 'user', 'content': 'a'}]
    for tools, own in (((), plain), (template_test.TOOLS, self.template)):
      self.assertEqual(
          form(template).rendered(messages, tools),
          form(own).rendered(messages, tools),
      )

  @parameterized.parameters(
      ([{'name': 'rag', 'template': 'x'}], "has .'rag'., want 'default'"),
      ([{'name': 'default'}], "objects with 'name' and 'template'"),
      ([{'name': 'default', 'template': 3}], 'want text'),
      ({'default': 'x'}, 'want text'),
  )
  def test_odd_named_templates_are_refused(self, value, part):
    self._named(value)
    with self.assertRaisesRegex(ValueError, f'tokenizer_config.json: .*{part}'):
      hub_files.read(self.folder)


if __name__ == '__main__':
  absltest.main()
