"""A model from a folder into a store and back: same bytes, or one clear line."""

import json
import pathlib

from absl.testing import absltest
from tests import served_store
from tests import serving_kit as lib
from tests import small_run

from composer_jax.model import families
from composer_jax.model import hf
from composer_jax.runs import stored_model


class ConversionTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.create_tempdir().full_path)
    self.url = served_store.Store(self.root).url
    self.folder = self.root / 'model'

  def _run(self, binary, *arguments):
    command = [*small_run.command(binary, 'unused')[:3], *arguments]
    return small_run.finished(command)

  def _export(self, *more):
    return self._run(
        'export_model',
        f'--store={self.root}/weights',
        f'--folder={self.folder}',
        *more,
    )

  def _import(self, store='new'):
    return self._run(
        'import_model',
        f'--folder={self.folder}',
        f'--store={self.root}/{store}',
    )

  def test_there_and_back(self):
    done = self._export()
    self.assertEqual(done.returncode, 0, done.stderr)
    named = hf.load(self.folder, lib.EXPERIMENT.model)
    for name, want in served_store.named(0).items():
      self.assertEqual(named[name].tobytes(), want.tobytes(), name)
    done = self._import()
    self.assertEqual(done.returncode, 0, done.stderr)
    new = f'file://{self.root}/new/'
    old, again = stored_model.read(self.url), stored_model.read(new)
    self.assertEqual(again.model, old.model)
    messages = lib.ask()['messages']
    self.assertEqual(
        again.chat_format().prompt(messages), old.chat_format().prompt(messages)
    )
    self.assertEqual(again.chat_format().stop_ids, old.chat_format().stop_ids)
    # The digests agree: the versions are the same weights.
    self.assertIn(done.stdout.split()[-3].strip(','), self._export_digest())
    done = self._import()
    self.assertEqual(done.returncode, 2)
    self.assertIn('has versions already', done.stderr)

  def _export_digest(self):
    self.folder = self.root / 'twice'
    return self._export('--version=0').stdout

  def test_what_is_wrong_is_one_line_and_leaves_nothing(self):
    done = self._export('--version=7')
    self.assertIn('version 7: never published', done.stderr)
    self.assertFalse(self.folder.exists())
    self._export()
    tokenizer = self.folder / 'tokenizer.json'
    fields = hf.read_config(self.folder)
    for change, text in (
        ({'vocab_size': 100}, 'not of the same model'),
        (
            {'rope_scaling': {'type': 'yarn'}, 'rope_parameters': None},
            'no factor',
        ),
        ({'num_hidden_layers': 3}, 'missing'),
        ({'num_hidden_layers': '2'}, 'model: config.json: num_hidden_layers'),
    ):
      (self.folder / hf.CONFIG).write_text(json.dumps({**fields, **change}))
      done = self._import()
      self.assertEqual(done.returncode, 2, done.stderr)
      self.assertIn(text, done.stderr)
      self.assertLen(done.stderr.strip().splitlines(), 1)
      self.assertFalse((self.root / 'new' / 'LATEST').exists())
    (self.folder / hf.CONFIG).write_text(json.dumps(fields))
    stop = self.folder / 'generation_config.json'
    stop.write_text('{"eos_token_id": 0}')
    self.assertIn('ends a reply with', self._import().stderr)
    tokenizer.unlink()
    self.assertIn('has no tokenizer.json', self._import().stderr)
    self.assertEqual(families.to_config(fields), lib.EXPERIMENT.model)


if __name__ == '__main__':
  absltest.main()
