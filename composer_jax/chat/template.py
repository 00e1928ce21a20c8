"""Chat messages to token ids by a model's own template, and replies back.

A template is the Jinja program that comes with a tokenizer. What the policy
sampled is never rendered again: a conversation goes on from the exact ids of
its last reply (`ChatFormat.tail`). Text of a message that spells a special
token stays text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import copy
import json
import os
import re
from typing import Any

import jinja2
import tokenizers

from composer_jax.chat import dialects
from composer_jax.chat import templates
from composer_jax.chat import texts
from composer_jax.chat import token_bytes
from composer_jax.chat import tool_calls

Message = Mapping[str, Any]

# For tokenizers of `compact_renderer.train_tokenizer`: the structure is its own,
# with free text inside.
COMPACT_TEMPLATE = """\
{{- '<|bos|>' }}
{%- if tools %}
  {{- '<|task|># Tools' }}
  {%- for tool in tools %}
    {{- '\n' ~ tool | tojson }}
  {%- endfor %}
  {{- '\nCall one with <tool_call>{"name": ..., "arguments": {...}}</tool_call>' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {{- '<|act|>' ~ (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
      {{- '<tool_call>' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
  {%- elif message.role == 'tool' %}
    {{- '<|obs|>' ~ message.content }}
  {%- else %}
    {{- '<|task|>' ~ message.content }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|act|>' }}
{%- endif %}
"""


class ChatFormat:
  """One model's way to write conversations.

  Attributes:
    stop_ids: end a reply.
    vocab_size: ids of the tokenizer, added tokens included.
    reads_calls: whether a call as the template writes it can be read back.
  """

  def __init__(
      self,
      tokenizer: tokenizers.Tokenizer,
      template: str,
      stop: Sequence[str],
      names: Mapping[str, str] | None = None,
      strftime_now: Callable[[str], str] | None = None,
  ):
    """Compiles the template.

    Args:
      tokenizer: tokenizer of the model.
      template: Jinja source.
      stop: special tokens that end a reply.
      names: what the template calls special tokens: 'bos_token' -> text.
      strftime_now: the date in a format, for templates that show it. None
        refuses them: a prompt should not depend on the clock unasked.

    Raises:
      ValueError: the template does not compile, or a stop token is unknown.
    """
    # A copy: in ours, special tokens are never found in text.
    self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    self._tokenizer.encode_special_tokens = True
    self._template = templates.compiled(template)
    self._names: dict[str, Any] = dict(names or {})
    if strftime_now:
      self._names['strftime_now'] = strftime_now
    self._reader = tool_calls.reader_of(template)
    added = tokenizer.get_added_tokens_decoder()
    self._bytes = token_bytes.reader(tokenizer)
    self._special = {t.content: i for i, t in added.items() if t.special}
    # The longest first, as one may begin with another.
    ordered = sorted(self._special, key=len, reverse=True)
    self._split = re.compile('|'.join(map(re.escape, ordered)) or r'(?!)')
    unknown = [s for s in stop if tokenizer.token_to_id(s) is None]
    if unknown or not stop:
      raise ValueError(f'stop={list(stop)}: not in the tokenizer: {unknown}')
    self.stop_ids = frozenset(tokenizer.token_to_id(s) for s in stop)
    self.vocab_size = tokenizer.get_vocab_size()
    self._dialect = dialects.Dialect()
    self._opened = self._opening()
    self.reads_calls = any(map(self._understands, dialects.of(self._reader)))
    if not self.reads_calls:
      self._dialect = dialects.Dialect()

  def _opening(self) -> str:
    """Some templates begin the thought themselves."""
    hello, _ = self._render([dialects.HELLO], ())
    return '<think>' if hello.rstrip().endswith('<think>') else ''

  def with_options(self, options: Mapping[str, Any]) -> ChatFormat:
    """This format with variables for its template, such as enable_thinking.

    Raises:
      ValueError: a variable is one that the template gets anyway.
    """
    if not options:
      return self
    taken = sorted(options.keys() & (templates.GIVEN | self._names.keys()))
    if taken:
      raise ValueError(f'{taken[0]}: not for a request to set; leave it out')
    other = copy.copy(self)
    other._names = {**self._names, **options}
    other._opened = other._opening()
    return other

  def _understands(self, dialect: dialects.Dialect) -> bool:
    """Takes up a dialect; whether a call in it is read back as it was."""
    self._dialect = dialect
    said = {'role': 'assistant', 'content': '', 'tool_calls': [dialects.CALL]}
    try:
      _, reply = self.turn([dialects.HELLO, said], [dialects.TOOL], 1)
    except ValueError:
      return False
    return [
        (call.name, json.loads(call.arguments))
        for call in self.parse(reply, [dialects.TOOL]).tool_calls
    ] == [
        (
            dialects.CALL['function']['name'],
            dialects.CALL['function']['arguments'],
        )
    ]

  def prompt(
      self, messages: Sequence[Message], tools: Sequence[Message] = ()
  ) -> list[int]:
    """The whole conversation, and what a reply begins with.

    Args:
      messages: messages as in the OpenAI API, contents as text.
      tools: tools on offer, as there.

    Raises:
      ValueError: the template refuses the conversation.
    """
    return self._ids(*self._render(texts.legible(messages), tools))

  def rendered(
      self, messages: Sequence[Message], tools: Sequence[Message] = ()
  ) -> str:
    """Text of `prompt`; with stand-ins for special tokens that are spelled."""
    return self._render(texts.legible(messages), tools)[0]

  def first_special(self, ids: Sequence[int]) -> int | None:
    """The first special token among ids."""
    special = set(self._special.values())
    return next((i for i in ids if i in special), None)

  def tail(
      self,
      messages: Sequence[Message],
      tools: Sequence[Message],
      known: int,
      ended: bool,
  ) -> list[int]:
    """What follows the exact ids of a reply.

    Args:
      messages: the whole conversation; messages[known - 1] is the reply.
      tools: tools on offer.
      known: messages whose ids are known.
      ended: whether the ids of the reply include its stop token.

    Raises:
      ValueError: see `prompt`.
    """
    messages = texts.legible(messages)
    stand_in = {'role': 'assistant', 'content': texts.HERE}
    text, hidden = self._render(
        [*messages[: known - 1], stand_in, *messages[known:]], tools
    )
    _, found, rest = text.rpartition(texts.HERE)
    if not found:
      raise ValueError('chat template: it drops the content of a reply')
    ids = self._ids(rest, hidden)
    return ids[1:] if ended and ids[:1] and ids[0] in self.stop_ids else ids

  def around(
      self,
      before: str,
      ids: Sequence[int],
      after: str,
      tools: Sequence[Message] = (),
  ) -> list[int]:
    """A prompt of one message of the user's, with exact ids inside it.

    Args:
      before: text in front of the ids.
      ids: ids inside, such as were sampled.
      after: text behind them.
      tools: tools on offer.

    Raises:
      ValueError: see `prompt`.
    """
    before, after = texts.legible([before, after])
    message = {'role': 'user', 'content': f'{before}{texts.HERE}{after}'}
    text, hidden = self._render([message], tools)
    start, _, end = text.partition(texts.HERE)
    return [*self._ids(start, hidden), *ids, *self._ids(end, hidden)]

  def turn(
      self, messages: Sequence[Message], tools: Sequence[Message], index: int
  ) -> tuple[list[int], list[int]]:
    """A recorded reply as a policy would have come to it.

    Args:
      messages: the conversation; what is behind the reply is not looked at.
      tools: tools on offer.
      index: place of the reply among the messages.

    Returns:
      (ids of the prompt, ids of the reply with its stop token).

    Raises:
      ValueError: see `prompt`; or the template writes the reply in a way that
        does not follow its prompt, or without a stop token.
    """
    before, said, hidden = self._turn(messages, tools, index)
    reply = self._ids(said, hidden)
    end = next((i for i, x in enumerate(reply) if x in self.stop_ids), None)
    if end is None:
      raise ValueError('chat template: no stop token ends the reply')
    return self._ids(before, hidden), reply[: end + 1]

  def _turn(self, messages, tools, index) -> tuple[str, str, dict[str, str]]:
    """(text of the prompt, text of the reply, stand-ins as in `_render`)."""
    messages = texts.legible(messages[: index + 1])
    before, hidden = self._render(messages, tools, index)
    after, _ = self._render(messages, tools)
    common = len(os.path.commonprefix([before, after]))
    said = after[common:]
    if self._opened and before[common:].strip() == self._opened:
      common, said = len(before), f'</think>\n\n{said.lstrip()}'
    if common < len(before):
      raise ValueError('chat template: the reply does not follow its prompt')
    return before, said, hidden

  def frame(
      self, reply: Message, inside: re.Pattern[str], tools: Sequence[Message]
  ) -> tuple[list[str | int], list[str | int]]:
    """What a reply has around a part of it, up to its stop token.

    Args:
      reply: a message of the assistant's with a stand-in for the part.
      inside: finds the part in the text of the reply.
      tools: tools on offer.

    Returns:
      (what comes before it, what comes after it), text and special tokens.

    Raises:
      ValueError: see `turn`; or the template writes the part in another way.
    """
    _, said, _ = self._turn([dialects.HELLO, reply], tools, 1)
    match = inside.search(said)
    if not match:
      raise ValueError('chat template: it writes this in a way of its own')
    before = self._pieces(said[: match.start()])
    after = self._pieces(said[match.end() :])
    end = next((i for i, x in enumerate(after) if x in self.stop_ids), None)
    if end is None:
      raise ValueError('chat template: no stop token ends the reply')
    return before, after[:end]

  def _pieces(self, text: str) -> list[str | int]:
    """Text and ids of special tokens in turn."""
    pieces, at = [], 0
    for match in self._split.finditer(text):
      pieces += [text[at : match.start()], self._special[match.group()]]
      at = match.end()
    return [p for p in (*pieces, text[at:]) if p != '']

  def _render(
      self, messages, tools, count: int | None = None
  ) -> tuple[str, dict[str, str]]:
    """Renders the first `count` messages, or all.

    Returns:
      (text, stand-ins in it -> special tokens that content spells), the same
      stand-ins whatever the count.
    """
    data = [
        list(map(self._dialect.message, messages)),
        texts.legible(list(tools)),
    ]
    spelled = sorted(set(self._split.findall('\n'.join(texts.strings(data)))))
    hidden = {texts.stand_in(i): special for i, special in enumerate(spelled)}
    for mark, text in sorted(hidden.items(), key=lambda x: -len(x[1])):
      data = texts.map_strings(
          data, lambda s, old=text, new=mark: s.replace(old, new)
      )
    try:
      text = self._template.render(
          messages=data[0][:count],
          tools=data[1] or None,
          documents=None,
          add_generation_prompt=True,
          **self._names,
      )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as e:
      raise ValueError(f'messages: the chat template refuses them: {e}') from e
    return text, hidden

  def _ids(self, text: str, hidden: Mapping[str, str]) -> list[int]:
    ids, at = [], 0
    for match in [*self._split.finditer(text), None]:
      piece = text[at : match.start() if match else len(text)]
      for mark, spelled in hidden.items():
        piece = piece.replace(mark, spelled)
      ids += self.encode(piece)
      if match:
        ids.append(self._special[match.group()])
        at = match.end()
    return ids

  def encode(self, text: str) -> list[int]:
    """Ids of text, none of which is a special token."""
    text = texts.legible(text)
    # A batch of one: unlike `encode`, it lets other threads run meanwhile.
    (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
    return encoding.ids

  def text(self, ids: Sequence[int]) -> str:
    """Text of ids without the stop token at their end."""
    if ids and ids[-1] in self.stop_ids:
      ids = ids[:-1]
    return self._tokenizer.decode(list(ids), skip_special_tokens=False)

  def vocabulary(self) -> list[bytes | None]:
    """Bytes of every token; None for special ones, and where there is none."""
    special = {*self._special.values(), *self.stop_ids}
    return [
        None if i in special else self._bytes(i) or None
        for i in range(self.vocab_size)
    ]

  def bytes_of(self, token: int) -> bytes:
    """Bytes of a token, be they a part of a character; none of a stop token."""
    return b'' if token in self.stop_ids else self._bytes(token)

  def spelled(self, ids: Sequence[int]) -> str:
    """Text of ids with every special token; for displays only."""
    return self._tokenizer.decode(list(ids), skip_special_tokens=False)

  def parse(
      self, ids: Sequence[int], tools: Sequence[Message] = ()
  ) -> tool_calls.Reply:
    """Reads a reply; what is no readable tool call stays content.

    Args:
      ids: ids of the reply.
      tools: tools on offer, whose schemas say of what types arguments are.
    """
    return tool_calls.read(self._opened + self.text(ids), self._reader, tools)

  def thought(self, ids: Sequence[int]) -> str:
    """Reasoning of an unfinished reply that is certain; it only ever grows."""
    return tool_calls.certain_thought(self._opened + self.text(ids))

  def visible(self, ids: Sequence[int]) -> str:
    """Content of an unfinished reply that is certain; it only ever grows."""
    return tool_calls.certain(self._opened + self.text(ids), self._reader)


def compact(tokenizer: tokenizers.Tokenizer) -> ChatFormat:
  """The format of models that were trained here."""
  return ChatFormat(tokenizer, COMPACT_TEMPLATE, ['<|end|>'])
