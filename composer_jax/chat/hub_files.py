"""What a published model says of its chats: files beside its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import pathlib

import tokenizers

from composer_jax.chat import compact_renderer


def read(
    folder: pathlib.Path,
) -> tuple[str, str, tuple[str, ...], dict[str, str]]:
  """Reads what a published model says of its chats.

  Args:
    folder: folder of the model, with the files of its tokenizer.

  Returns:
    (JSON of the tokenizer, template, stop tokens, names), for `ChatFormat`.

  Raises:
    ValueError: a file is missing, or there is no template.
  """

  def text(name: str) -> str | None:
    path = folder / name
    return path.read_text(encoding='utf-8') if path.is_file() else None

  source = text('tokenizer.json')
  if source is None:
    raise ValueError(f'{folder}: has no tokenizer.json')
  settings = json.loads(text('tokenizer_config.json') or '{}')
  template = text('chat_template.jinja') or settings.get('chat_template')
  if not isinstance(template, str):
    raise ValueError(f'{folder}: has no chat template; add chat_template.jinja')
  names = names_of(folder)
  tokenizer = tokenizers.Tokenizer.from_str(source)
  ends = json.loads(text('generation_config.json') or '{}').get('eos_token_id')
  ends = [ends] if isinstance(ends, int) else ends or []
  stop = [tokenizer.id_to_token(i) or str(i) for i in ends]
  return source, template, tuple(stop or [names.get('eos_token', '')]), names


def names_of(folder: pathlib.Path) -> dict[str, str]:
  """What a tokenizer's settings call special tokens; empty without settings."""
  path = folder / 'tokenizer_config.json'
  if not path.is_file():
    return {}
  settings = json.loads(path.read_text(encoding='utf-8'))
  # Special tokens are text, or objects that hold it.
  return {
      key: value['content'] if isinstance(value, dict) else value
      for key, value in settings.items()
      if key.endswith('_token') and value
  }


def start_id(tokenizer: tokenizers.Tokenizer, names: Mapping[str, str]) -> int:
  """Id of the token before a document.

  Args:
    tokenizer: tokenizer of the model.
    names: special tokens, from `names_of`.

  Raises:
    ValueError: there is no token for it.
  """
  known = [compact_renderer.BOS, names.get('bos_token'), names.get('eos_token')]
  ids = [tokenizer.token_to_id(name) for name in known if name]
  found = next((i for i in ids if i is not None), None)
  if found is None:
    raise ValueError(
        'tokenizer: no bos_token or eos_token to stand before a document'
    )
  return found


def write(
    source: str, template: str, stop: Sequence[str], names: Mapping[str, str]
) -> dict[str, str]:
  """Files that `read`, and transformers, read the same from: name -> text."""
  tokenizer = tokenizers.Tokenizer.from_str(source)
  ends = [tokenizer.token_to_id(s) for s in stop]
  settings = {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      **names,
      'eos_token': stop[0],
  }
  return {
      'tokenizer.json': source,
      'tokenizer_config.json': json.dumps(settings, indent=2),
      'chat_template.jinja': template,
      'generation_config.json': json.dumps({'eos_token_id': ends}, indent=2),
  }
