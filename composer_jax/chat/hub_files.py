"""What a published model says of its chats: files beside its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any

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

  source = _text(folder / 'tokenizer.json')
  if source is None:
    raise ValueError(f'{folder}: has no tokenizer.json')
  template = _template(folder)
  if template is None:
    raise ValueError(f'{folder}: has no chat template; add chat_template.jinja')
  names = names_of(folder)
  try:
    tokenizer = tokenizers.Tokenizer.from_str(source)
  except Exception as e:  # pylint: disable=broad-exception-caught
    path = folder / 'tokenizer.json'
    raise ValueError(f'{path}: not a tokenizer: {_line(e)}') from e
  path = folder / 'generation_config.json'
  ends = _object(path).get('eos_token_id')
  ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
  if not all(type(i) is int and i >= 0 for i in ends):
    raise ValueError(f'{path}: eos_token_id={ends}: want ids of tokens')
  stop = [tokenizer.id_to_token(i) or str(i) for i in ends]
  return source, template, tuple(stop or [names.get('eos_token', '')]), names


def _text(path: pathlib.Path) -> str | None:
  """Text of a file, if it is there; some begin with a byte order mark."""
  try:
    return path.read_text(encoding='utf-8-sig') if path.is_file() else None
  except (OSError, UnicodeDecodeError) as e:
    raise ValueError(f'{path}: no readable text: {_line(e)}') from e


def _object(path: pathlib.Path) -> dict[str, Any]:
  """Fields of a JSON file, none if it is not there."""
  try:
    fields = json.loads(_text(path) or '{}')
  except (json.JSONDecodeError, RecursionError) as e:
    raise ValueError(f'{path}: no JSON: {_line(e)}') from e
  if not isinstance(fields, dict):
    raise ValueError(f'{path}: holds no JSON object')
  return fields


def _line(error: Exception) -> str:
  return str(error).partition('\n')[0]


def _template(folder: pathlib.Path) -> str | None:
  """The template, or one made of those that have names."""
  path = folder / 'tokenizer_config.json'
  found = _text(folder / 'chat_template.jinja')
  found = found or _object(path).get('chat_template')
  named = {
      p.stem: _text(p)
      for p in sorted(folder.glob('additional_chat_templates/*.jinja'))
  }
  if isinstance(found, list):
    try:
      named |= {each['name']: each['template'] for each in found}
    except (TypeError, KeyError) as e:
      raise ValueError(
          f'{path}: chat_template: want a text, or a list of objects with'
          " 'name' and 'template'"
      ) from e
    found = named.get('default', named.get('tool_use'))
    if found is None:
      raise ValueError(
          f"{path}: chat_template: has {sorted(named)}, want 'default'"
      )
  tools = named.get('tool_use')
  for text in (found, tools):
    if text is not None and not isinstance(text, str):
      raise ValueError(f'{path}: chat_template: want text')
  if not found or not tools or tools == found:
    return found or None
  # As transformers choose; the signs keep what spaces the templates have.
  return f'{{% if tools +%}}{tools}{{%+ else +%}}{found}{{%+ endif %}}'


def names_of(folder: pathlib.Path) -> dict[str, str]:
  """What a tokenizer's settings call special tokens; empty without settings."""
  path = folder / 'tokenizer_config.json'
  # Special tokens are text, or objects that hold it.
  names = {
      key: value.get('content') if isinstance(value, dict) else value
      for key, value in _object(path).items()
      if key.endswith('_token') and value and not isinstance(value, bool)
  }
  for key, value in names.items():
    if not isinstance(value, str):
      raise ValueError(f'{path}: {key}={value!r}: want text')
  return names


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
