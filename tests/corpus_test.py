"""Corpus: the split, and honest byte counts."""

import pathlib
import sysconfig
import tempfile

from absl.testing import absltest
import numpy as np
import tokenizers
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

from composer_jax import config
from composer_jax.data import corpus

_START = 0


def _write(root: pathlib.Path, files: dict[str, str | bytes]) -> None:
  for name, text in files.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def _names(documents) -> set[str]:
  return {d.name for d in documents}


class LoadTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.root = pathlib.Path(folder.name)

  def _load(self, **kwargs):
    return corpus.load(config.CorpusConfig(path=str(self.root), **kwargs))

  def test_standard_library_without_tests(self):
    cfg = config.CorpusConfig(max_bytes=1_000_000)
    c = corpus.load(cfg)
    self.assertEqual(c, corpus.load(cfg))
    names = _names(c.train + c.heldout)
    root = pathlib.Path(sysconfig.get_path('stdlib'))
    for name in names:
      self.assertTrue((root / name).is_file())
      self.assertNoCommonElements(
          name.split('/')[:-1], ['test', 'tests', 'site-packages', 'idlelib']
      )
    size = sum(len(d.text.encode()) for d in c.train + c.heldout)
    self.assertBetween(size, 800_000, 1_000_000)

  def test_sides_are_disjoint_and_do_not_move_when_files_appear(self):
    _write(self.root, {f'm{i}.py': f'a={i}' for i in range(200)})
    before = self._load(heldout_fraction=0.2)
    _write(self.root, {f'sub/n{i}.py': f'b={i}' for i in range(200)})
    after = self._load(heldout_fraction=0.2)
    self.assertEmpty(_names(after.train) & _names(after.heldout))
    self.assertContainsSubset(_names(before.train), _names(after.train))
    self.assertContainsSubset(_names(before.heldout), _names(after.heldout))
    self.assertBetween(len(after.heldout), 50, 110)

  def test_cap_keeps_a_cross_section(self):
    _write(self.root, {f'm{i:03}.py': 'x' * 100 for i in range(100)})
    c = self._load(max_bytes=3_050)
    names = sorted(_names(c.train + c.heldout))
    self.assertLen(names, 30)
    self.assertLess(names[0], 'm020')
    self.assertGreater(names[-1], 'm080')

  def test_one_huge_file_does_not_crowd_out_the_rest(self):
    _write(self.root, {f'm{i}.py': 'x' * 10 for i in range(20)})
    _write(self.root, {'huge.py': 'x' * 10_000})
    c = self._load(max_bytes=1_000)
    self.assertLen(c.train + c.heldout, 20)

  def test_undecodable_is_counted_hidden_and_other_suffixes_are_not_read(self):
    _write(self.root, {f'm{i}.py': 'é\r\n' for i in range(4)})
    _write(self.root, {'bad.py': b'\xff\xfe', 'empty.py': '', 'x.txt': 'x'})
    _write(self.root, {'.venv/y.py': 'y'})
    c = self._load()
    self.assertEqual(c.skipped, 1)
    self.assertLen(c.train + c.heldout, 4)
    self.assertEqual(c.train[0].text, 'é\r\n')

  def test_both_sides_hold_something_at_any_fraction(self):
    _write(self.root, {'a.py': 'a', 'b.py': 'b'})
    for fraction in (0.0, 0.5, 0.999):
      c = self._load(heldout_fraction=fraction)
      self.assertLen(c.train, 1)
      self.assertLen(c.heldout, 1)

  def test_errors_name_the_field_and_the_cure(self):
    with self.assertRaisesRegex(ValueError, 'path=.*at least 2.*suffix'):
      self._load()
    with self.assertRaisesRegex(ValueError, 'path=.*no such directory; set'):
      corpus.load(config.CorpusConfig(path=str(self.root / 'gone')))
    with self.assertRaisesRegex(ValueError, 'heldout_fraction=1.5'):
      self._load(heldout_fraction=1.5)


class EncodeTest(absltest.TestCase):

  def test_bytes_and_tokens_add_up(self):
    documents = [
        corpus.Document('a.py', 'naïve = "日本"\r\n\tpass\n'),
        corpus.Document('b.py', 'x'),
    ]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        [d.text for d in documents],
        trainers.BpeTrainer(
            vocab_size=270,
            special_tokens=['<start>'],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    alphabet = {c: b for b, c in _byte_level().items()}
    documents.append(corpus.Document('c.py', "S = '<start>'"))
    tokens = corpus.encode(documents, tokenizer, start=_START)
    self.assertEqual(tokens.ids.dtype, np.int32)
    self.assertEqual(
        tokens.utf8_bytes, sum(len(d.text.encode()) for d in documents)
    )
    for i, d in enumerate(documents):
      ids = tokens.ids[tokens.starts[i] : tokens.starts[i + 1]]
      self.assertEqual(ids[0], _START)
      self.assertNotIn(_START, ids[1:])
      text = ''.join(tokenizer.id_to_token(int(t)) for t in ids[1:])
      self.assertEqual(bytes(alphabet[c] for c in text).decode(), d.text)


def _byte_level() -> dict[int, str]:
  """The printable stand-in of every byte in byte-level BPE (GPT-2)."""
  keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [b for b in range(256) if b not in keep]
  return {b: chr(b) for b in keep} | {
      b: chr(256 + i) for i, b in enumerate(others)
  }


if __name__ == '__main__':
  absltest.main()
