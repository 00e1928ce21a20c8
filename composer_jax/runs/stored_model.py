"""What a store says of the model whose weights it holds.

With it, a host anywhere needs nothing but the store's URL: sizes, tokenizer and
chat template are beside the weights. Written once, with the first version.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import hashlib
import json
from typing import Any

import tokenizers

from composer_jax import config
from composer_jax import rope
from composer_jax.chat import compact_renderer
from composer_jax.chat import template as template_lib
from composer_jax.weights import records
from composer_jax.weights import store as store_lib

MODEL = 'model.json'
TOKENIZER = 'tokenizer.json'


@dataclasses.dataclass(frozen=True)
class StoredModel:
  """A model, apart from its weights.

  Attributes:
    name: name for people and clients.
    model: sizes.
    context_tokens: longest window that it was made for.
    tokenizer: JSON text of a tokenizer.
    template: template of its chats, in Jinja.
    stop: special tokens that end a reply.
    names: what the template calls special tokens.
  """

  name: str
  model: config.ModelConfig
  context_tokens: int
  tokenizer: str
  template: str
  stop: tuple[str, ...]
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def chat_format(self) -> template_lib.ChatFormat:
    """The chat format."""
    tokenizer = tokenizers.Tokenizer.from_str(self.tokenizer)
    return template_lib.ChatFormat(
        tokenizer, self.template, self.stop, self.names
    )


def trained_here(cfg: config.Experiment, tokenizer: str) -> StoredModel:
  """The model of an experiment, with the chat format of this project."""
  return StoredModel(
      cfg.name,
      cfg.model,
      cfg.rollout.context_tokens,
      tokenizer,
      template_lib.COMPACT_TEMPLATE,
      (compact_renderer.END,),
  )


def write(url: str, stored: StoredModel) -> None:
  """Puts a model into a store, or finds it there.

  One that an older version wrote, without a seal, gets it.

  Raises:
    ValueError: the store holds another one.
  """
  tokenizer = stored.tokenizer.encode()
  record = dataclasses.asdict(stored)
  if stored.model.rope_scaling is not None:
    kind = type(stored.model.rope_scaling).__name__
    record['model']['rope_scaling']['kind'] = kind
  record['tokenizer'] = hashlib.sha256(tokenizer).hexdigest()
  text = json.dumps(record, indent=2, sort_keys=True).encode()
  store = store_lib.Store(url)
  model = records.sealed(text)
  for key, data, old in ((TOKENIZER, tokenizer, b''), (MODEL, model, text)):
    _, found, generation = store.read(key)
    if found == data:
      continue
    if found not in (b'', old) or not store.swap(key, data, generation):
      raise ValueError(
          f'{store.url}{key}: describes another model; publish to a store of'
          ' its own'
      )


def read(url: str) -> StoredModel:
  """Reads the model of a store, verified.

  Raises:
    ValueError: the store does not describe its model, or is damaged.
  """
  store = store_lib.Store(url)
  data = _get(store, MODEL)
  if not data.endswith(b'}'):  # older versions wrote the bare object
    data = _opened(store, data)
  tokenizer = _get(store, TOKENIZER)
  try:
    record: dict[str, Any] = json.loads(data)
    digest = record['tokenizer']
    stored = StoredModel(
        **record
        | {
            'model': _model(record['model']),
            'tokenizer': tokenizer.decode(errors='replace'),
            'stop': tuple(record['stop']),
        }
    )
  except (AttributeError, KeyError, TypeError, ValueError) as e:
    raise ValueError(
        f'{store.url}{MODEL}: damaged, or written by another version of'
        f' composer_jax: {e}'
    ) from e
  if hashlib.sha256(tokenizer).hexdigest() != digest:
    raise ValueError(
        f'{store.url}{TOKENIZER}: does not match its sha256 in {MODEL};'
        ' damaged, restore it from a copy'
    )
  return stored


def _opened(store: store_lib.Store, data: bytes) -> bytes:
  try:
    return records.opened(data, store.url + MODEL, 'restore it from a copy')
  except records.StoreError as e:
    raise ValueError(str(e)) from e


def _model(fields: dict[str, Any]) -> config.ModelConfig:
  """A config from its fields; what a store says imports nothing."""
  scaling = fields['rope_scaling']
  if scaling is not None:
    kinds = {kind.__name__: kind for kind in (rope.Yarn, rope.Llama3)}
    scaling = kinds[scaling.pop('kind')](**scaling)
  return config.ModelConfig(**fields | {'rope_scaling': scaling})


def _get(store: store_lib.Store, key: str) -> bytes:
  state, data, _ = store.read(key)
  if state != 'value':
    raise ValueError(
        f'{store.url}{key}: missing; an older version of composer_jax made this'
        ' store, continue its run for one step to add it'
    )
  return data
