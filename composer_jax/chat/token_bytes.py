"""The bytes that a token stands for, be they a part of a character."""

from __future__ import annotations

from collections.abc import Callable
import json
import re

import tokenizers


def _byte_alphabet() -> dict[str, int]:
  """Which byte a character of a byte-level token stands for, as in GPT-2."""
  shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
  hidden = [b for b in range(256) if b not in shown]
  ordinals = [*shown, *range(256, 256 + len(hidden))]
  return dict(zip(map(chr, ordinals), [*shown, *hidden], strict=True))


_BYTES = _byte_alphabet()
_BYTE = re.compile('<0x([0-9A-F]{2})>')  # of a SentencePiece model
_SPACE = '\u2581'  # likewise


def reader(tokenizer: tokenizers.Tokenizer) -> Callable[[int], bytes]:
  """Gives the bytes of a token; none where a padded vocabulary has no token."""
  added = tokenizer.get_added_tokens_decoder()
  decoder = json.dumps(json.loads(tokenizer.to_str())['decoder'])
  byte_level = '"ByteLevel"' in decoder

  def read(token: int) -> bytes:
    spelled = tokenizer.id_to_token(token)
    if spelled is None:
      return b''
    if token in added:
      return spelled.encode()
    if byte_level:
      return bytes(_BYTES[c] for c in spelled)
    if match := _BYTE.fullmatch(spelled):
      return bytes.fromhex(match[1])
    return spelled.replace(_SPACE, ' ').encode()

  return read
