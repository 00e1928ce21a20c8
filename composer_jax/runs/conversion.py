"""Published models into weight stores, and back."""

from __future__ import annotations

from collections.abc import Callable
import pathlib

import tokenizers

from composer_jax import config
from composer_jax import trace
from composer_jax.chat import hub_files
from composer_jax.chat import probe
from composer_jax.model import families
from composer_jax.model import hf
from composer_jax.runs import feed
from composer_jax.runs import stored_model
from composer_jax.weights import publish
from composer_jax.weights import store as store_lib


def model_of(folder: pathlib.Path, name: str) -> stored_model.StoredModel:
  """Reads all but the weights of a published model.

  Args:
    folder: folder of the model.
    name: name for people and clients.

  Raises:
    ValueError: files are missing, or describe what is not supported.
  """
  fields = hf.read_config(folder)
  try:
    cfg = families.to_config(fields)
  except ValueError as e:
    raise ValueError(f'{folder}: {e}') from e
  source, template, stop, names = hub_files.read(folder)
  vocab = tokenizers.Tokenizer.from_str(source).get_vocab()
  size = max(vocab.values(), default=0) + 1  # ids may have gaps
  if size > cfg.vocab:
    raise ValueError(
        f'{folder}: the tokenizer has {size} entries, vocab_size is'
        f' {cfg.vocab}; they are not of the same model'
    )
  context = fields.get('max_position_embeddings')
  context = 4096 if context is None else context
  stored = stored_model.StoredModel(
      name, cfg, context, source, template, stop, names
  )
  try:
    probe.check(stored.chat_format(), source)
  except ValueError as e:
    raise ValueError(f'{folder}: {e}') from e
  return stored


def publish_folder(
    folder: pathlib.Path,
    url: str,
    stored: stored_model.StoredModel,
    incarnation: str,
    read: Callable[[int], None] = lambda count: None,
) -> trace.WeightVersion:
  """Makes a model the first version of a new store.

  Args:
    folder: folder of the model.
    url: URL of the store.
    stored: what `model_of` read.
    incarnation: unique name of this writer.
    read: told how many parameters have been read, after every tensor.

  Raises:
    ValueError: the store has versions already, or the folder is damaged.
  """
  link, _ = store_lib.Store(url).latest()
  if link is not None:
    raise ValueError(f'{url}: has versions already; name a new store')
  named = hf.load(folder, stored.model, read=read)
  stored_model.write(url, stored)
  publisher = publish.Publisher(url, config.WeightsConfig(), incarnation)
  return publisher.publish(0, named).version


def export_folder(
    url: str, step: int | None, folder: pathlib.Path
) -> trace.WeightVersion:
  """Writes a version of a store as a folder that other engines read.

  Args:
    url: URL of the store.
    step: `WeightVersion.step`; None for the newest.
    folder: folder to make.

  Raises:
    ValueError: there is no such version, or no family can express the model.
    StoreError, FollowError: the store is damaged.
  """
  stored = stored_model.read(url)
  families.family_of(stored.model)  # before anything is fetched
  version, named = feed.fetch(url, step)
  files = hub_files.write(
      stored.tokenizer, stored.template, stored.stop, stored.names
  )
  hf.save(folder, stored.model, named, files, stored.context_tokens)
  return version
