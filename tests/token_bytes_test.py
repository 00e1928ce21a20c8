"""Bytes of tokens, joined, are those of the text, for both kinds of models."""

from absl.testing import absltest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from tests import serving_kit
import tokenizers
from tokenizers import decoders
from tokenizers import models

from composer_jax.chat import token_bytes


class TokenBytesTest(absltest.TestCase):

  @settings(deadline=None)
  @given(st.text())
  def test_byte_level(self, text):
    tokenizer = serving_kit.tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    read = token_bytes.reader(tokenizer)
    self.assertEqual(b''.join(map(read, ids)), text.encode())

  def test_sentence_piece(self):
    vocab = [('<unk>', 0.0), ('\u2581a', -1.0), ('<0xE2>', -2.0), ('é', -1.0)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocab, 0, True))
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_special_tokens(['<s>'])
    read = token_bytes.reader(tokenizer)
    pieces = [read(i) for i in range(1, 6)]
    self.assertEqual(pieces, [b' a', b'\xe2', 'é'.encode(), b'<s>', b''])


if __name__ == '__main__':
  absltest.main()
