"""Whether a model's chats can be played: tried before any weight is read."""

from __future__ import annotations

import tokenizers

from composer_jax.chat import dialects
from composer_jax.chat import template as template_lib

_REPLY = {'role': 'assistant', 'content': 'Yes, it is.'}
_NEXT = {'role': 'user', 'content': ' Thanks:\n  a  b é'}


def check(form: template_lib.ChatFormat, source: str) -> None:
  """Refuses a format that would not be understood.

  Args:
    form: format of the model.
    source: JSON of its tokenizer.

  Raises:
    ValueError: tools are shown, but a call of one cannot be read back; a reply
      does not end in a stop token; or parts of a prompt have other ids than
      the whole.
  """
  messages = [dialects.HELLO, _REPLY, _NEXT]
  tools = [dialects.TOOL]
  end = form.first_special(form.tail(messages, (), 2, ended=False))
  if end not in form.stop_ids:
    found = 'no special token' if end is None else repr(form.spelled([end]))
    stop = form.spelled(sorted(form.stop_ids))
    raise ValueError(
        f'chat template: ends a reply with {found}, but stop tokens are'
        f' {stop!r}; correct eos_token_id in generation_config.json'
    )
  shown = form.prompt([dialects.HELLO], tools) != form.prompt([dialects.HELLO])
  if shown and not form.reads_calls:
    raise ValueError(
        'chat template: shows tools, but a call as it writes one cannot be'
        ' read; take a template in the format of Qwen, Qwen3-Coder, Llama 3,'
        ' Mistral, DeepSeek or Kimi'
    )
  text = form.rendered(messages, tools if shown else ())
  whole = tokenizers.Tokenizer.from_str(source).encode(
      text, add_special_tokens=False
  )
  if whole.ids != form.prompt(messages, tools if shown else ()):
    raise ValueError(
        'tokenizer: text between special tokens has other ids alone than in'
        ' the whole prompt (a prefix space, or special tokens that take'
        ' spaces away); such tokenizers are not supported'
    )
