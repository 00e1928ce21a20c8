"""Documents to token shards, from where another process stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import pathlib
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from composer_jax.chat import compact_renderer
from composer_jax.chat import hub_files
from composer_jax.chat import messages as messages_lib
from composer_jax.chat import template as template_lib
from composer_jax.data import corpus
from composer_jax.data import inputs
from composer_jax.data import shards

CHATS = 'messages'  # the field that holds a conversation
_BATCH_RECORDS, _BATCH_BYTES = 1024, 1 << 22  # encoded together


class Document(NamedTuple):
  """An encoded document; see `stream.Tokens`."""

  ids: np.ndarray
  trained: np.ndarray | None
  utf8_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Encoder:
  """Records to documents.

  Attributes:
    source: JSON text of the tokenizer.
    tokenizer: the same, which finds no special token in a text.
    field: field of a record that holds its text, or `CHATS`.
    start: token before every text; None for chats.
    chats: the format of conversations; None for texts.
  """

  source: str
  tokenizer: tokenizers.Tokenizer
  field: str
  start: int | None
  chats: template_lib.ChatFormat | None

  @property
  def ids(self) -> int:
    """Number of ids that a token may have."""
    return max(self.tokenizer.get_vocab().values()) + 1

  def __call__(
      self, records: Sequence[inputs.Record]
  ) -> list[tuple[str, list[Document]]]:
    """Returns (name, documents) of each record that holds something."""
    if self.chats:
      return [(r.name, self._chat(r)) for r in records if r.fields]
    texts = [(r.name, self._text(r)) for r in records if r.fields]
    texts = [(name, text) for name, text in texts if text]
    encoded = self.tokenizer.encode_batch_fast(
        [text for _, text in texts], add_special_tokens=False
    )
    return [
        (
            name,
            [
                Document(
                    np.array([self.start, *e.ids], np.uint32),
                    None,
                    len(text.encode()),
                )
            ],
        )
        for (name, text), e in zip(texts, encoded, strict=True)
    ]

  def _text(self, record: inputs.Record) -> str:
    text = record.fields[self.field]
    if not isinstance(text, str):
      raise ValueError(
          f'{record.name}: {self.field} is {type(text).__name__}, want text'
      )
    try:
      text.encode()
    except UnicodeEncodeError as e:
      raise ValueError(f'{record.name}: {self.field} is no Unicode: {e}') from e
    return text

  def _chat(self, record: inputs.Record) -> list[Document]:
    """Every reply is trained once, behind the ids that it would follow.

    A conversation is one document as long as each prompt begins with the one
    before and its reply; templates that drop earlier thoughts begin anew.
    """
    messages, tools = self._conversation(record)
    windows: list[list[tuple[list[int], bool]]] = []
    known: list[int] = []
    for i, message in enumerate(messages):
      if message['role'] != 'assistant':
        continue
      try:
        prompt, reply = self.chats.turn(messages, tools, i)
      except ValueError as e:
        raise ValueError(f'{record.name}: message {i}: {e}') from e
      if not known or prompt[: len(known)] != known:
        windows.append([])
        known = []
      windows[-1] += [(prompt[len(known) :], False), (reply, True)]
      known = prompt + reply
    return [self._window(pieces) for pieces in windows]

  def _conversation(self, record: inputs.Record):
    """Its (messages, tools) in their normal form."""
    where, fields = record.name, record.fields
    listed = fields[self.field]
    if not isinstance(listed, list):
      raise ValueError(f'{where}: {self.field} must be a list of messages')
    messages = []
    try:
      tools = messages_lib.tools(fields.get('tools'))
      for i, message in enumerate(listed):
        where = f'{record.name}: message {i}'
        messages.append(messages_lib.message(message))
    except messages_lib.FieldError as e:
      raise ValueError(f'{where}: {e}') from e
    return messages, tools

  def _window(self, pieces: list[tuple[list[int], bool]]) -> Document:
    ids = np.concatenate([np.array(ids, np.uint32) for ids, _ in pieces])
    masks = [np.full(len(ids), trained) for ids, trained in pieces]
    said = [self.chats.text(ids) for ids, trained in pieces if trained]
    size = len(''.join(said).encode())
    return Document(ids, np.concatenate(masks), size)


def open_encoder(path: str, field: str, start: str | None) -> Encoder:
  """Reads a tokenizer.

  Args:
    path: a tokenizer.json, or the folder of a model.
    field: field of a record that holds its text.
    start: token before every text; None for the tokenizer's own choice.

  Raises:
    ValueError: there is none, or it lacks what is needed.
  """
  folder = pathlib.Path(path)
  file = folder / shards.TOKENIZER if folder.is_dir() else folder
  try:
    source = file.read_text(encoding='utf-8')
    tokenizer = tokenizers.Tokenizer.from_str(source)
  except Exception as e:  # pylint: disable=broad-exception-caught
    raise ValueError(f'--tokenizer={path}: not a tokenizer: {e}') from e
  tokenizer.encode_special_tokens = True
  if field == CHATS:
    if folder.is_dir():
      _, template, stop, names = hub_files.read(folder)
      made = template_lib.ChatFormat(tokenizer, template, stop, names)
    elif tokenizer.token_to_id(compact_renderer.END) is not None:
      made = template_lib.compact(tokenizer)
    else:
      raise ValueError(
          f'--tokenizer={path}: chats need a template; give the folder of the'
          ' model'
      )
    return Encoder(source, tokenizer, field, None, made)
  return Encoder(source, tokenizer, field, _start(file, tokenizer, start), None)


def _start(
    file: pathlib.Path, tokenizer: tokenizers.Tokenizer, start: str | None
) -> int:
  """Id of the token before every text."""
  if start is None:
    return hub_files.start_id(tokenizer, hub_files.names_of(file.parent))
  found = tokenizer.token_to_id(start)
  if found is None:
    raise ValueError(f'--start={start}: not in the tokenizer')
  return found


def header(
    encoder: Encoder,
    files: Sequence[inputs.File],
    dtype: str | None,
    heldout_fraction: float,
    shard_tokens: int,
) -> dict[str, Any]:
  """All that decides what is written, for `shards.ShardWriter`.

  Args:
    encoder: encoder of documents.
    files: files to read.
    dtype: 'uint16', 'uint32', or None for the smaller that suffices.
    heldout_fraction: share of the documents that is held out.
    shard_tokens: tokens after which a shard ends.

  Raises:
    ValueError: a value is out of range.
  """
  dtype = dtype or ('uint16' if encoder.ids <= 1 << 16 else 'uint32')
  if encoder.ids > np.iinfo(dtype).max + 1:
    raise ValueError(f'--dtype={dtype}: the tokenizer has {encoder.ids} ids')
  if not 0 <= heldout_fraction < 1:
    raise ValueError(f'--heldout_fraction={heldout_fraction}: want [0, 1)')
  if shard_tokens < 1:
    raise ValueError(f'--shard_tokens={shard_tokens}: must be positive')
  return {
      'tokenizer': hashlib.sha256(encoder.source.encode()).hexdigest(),
      'ids': encoder.ids,
      'dtype': dtype,
      'start': encoder.start,
      'field': encoder.field,
      'masked': encoder.chats is not None,
      'heldout_fraction': heldout_fraction,
      'shard_tokens': shard_tokens,
      'inputs': [[file.name, file.size] for file in files],
  }


def run(
    files: Sequence[inputs.File],
    encoder: Encoder,
    writer: shards.ShardWriter,
    moved: Callable[..., None],
) -> None:
  """Encodes what is not yet in the shards.

  Args:
    files: files to read, in order.
    encoder: encoder of documents.
    writer: writer of shards; goes on from its position.
    moved: called with the bytes read so far and figures.

  Raises:
    ValueError: an input cannot be read, or nothing holds a document.
  """
  index = writer.index
  at, skip = writer.position or (0, 0)
  before = sum(file.size for file in files[:at])
  pending: list[inputs.Record] = []
  size = 0

  def encode():
    for name, documents in encoder(pending):
      heldout = corpus.is_heldout(name, index['heldout_fraction'])
      for document in documents:
        writer.add(shards.HELDOUT if heldout else shards.TRAIN, *document)
    pending.clear()

  for number, file in enumerate(files[at:], at):
    count = skip if number == at else 0
    for record in inputs.records(file, encoder.field, count):
      count += 1
      pending.append(record)
      size += len(str(record.fields))
      if len(pending) < _BATCH_RECORDS and size < _BATCH_BYTES:
        continue
      encode()
      size = 0
      moved(before + record.done, tokens=_tokens(index) + writer.tokens)
      if writer.tokens >= index['shard_tokens']:
        writer.flush([number, count])
    before += file.size
  encode()
  if not writer.tokens and not index['shards']:
    raise ValueError('--input: holds no document')
  writer.flush([len(files), 0], complete=True)
  moved(before, tokens=_tokens(index))


def _tokens(index: Mapping[str, Any]) -> int:
  sides = (shards.TRAIN, shards.HELDOUT)
  return sum(s[side]['tokens'] for s in index['shards'] for side in sides)
