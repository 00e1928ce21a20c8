"""The model that a run starts from: one that others published, or none.

`Experiment.base` names its folder. Sizes, tokenizer, chat format and weights
are then those of the folder; whatever the run makes can be exported as a folder
of the same kind.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers

from composer_jax import config
from composer_jax.chat import chat_renderer
from composer_jax.chat import compact_renderer
from composer_jax.model import families
from composer_jax.model import hf
from composer_jax.model import params as params_lib
from composer_jax.model import sharding
from composer_jax.runs import conversion
from composer_jax.runs import progress
from composer_jax.runs import stored_model

# Fields of the model that say how it is computed, not what it is.
HOW = ('dtype', 'kernels', 'remat', 'replay_threshold')


def adopt(cfg: config.Experiment) -> config.Experiment:
  """The experiment with the sizes of its base.

  Raises:
    ValueError: there is no such folder, or its family is unknown.
  """
  if cfg.base is None:
    return cfg
  sizes = families.to_config(hf.read_config(pathlib.Path(cfg.base)))
  how = {name: getattr(cfg.model, name) for name in HOW}
  return dataclasses.replace(cfg, model=dataclasses.replace(sizes, **how))


def published(cfg: config.Experiment) -> stored_model.StoredModel | None:
  """What the run's store says of a model that has a base.

  Raises:
    ValueError: files of the base are missing.
  """
  if cfg.base is None:
    return None
  found = conversion.model_of(pathlib.Path(cfg.base), cfg.name)
  return dataclasses.replace(found, model=cfg.model)


def renderer(cfg: config.Experiment, stored: stored_model.StoredModel) -> Any:
  """Translates between the experiment's tasks and tokens.

  Raises:
    ValueError: the tokenizer or the template does not serve.
  """
  if cfg.base is None:
    tokenizer = tokenizers.Tokenizer.from_str(stored.tokenizer)
    return compact_renderer.CompactRenderer(tokenizer)
  return chat_renderer.ChatRenderer(stored.chat_format())


def weights(
    cfg: config.Experiment, mesh: jax.sharding.Mesh
) -> params_lib.Params:
  """f32 masters of the base on the mesh; a process reads its own shards.

  Raises:
    ValueError: see `hf.Reader`.
  """
  specs = params_lib.pspecs(params_lib.abstract(cfg.model), sharding.RULES)
  places = jax.tree.map(lambda s: jax.sharding.NamedSharding(mesh, s), specs)
  folder = pathlib.Path(cfg.base or '')
  count, done = params_lib.count(cfg.model)[0], 0
  with progress.Progress(count, 'parameter', label='base') as bar:

    def read(more: int) -> None:
      nonlocal done
      done += more
      bar.update(done)

    return hf.load_sharded(folder, cfg.model, places, jnp.float32, read)
