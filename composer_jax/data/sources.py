"""The named sources of an experiment, opened: what its phases read.

'code' is encoded here and now, 'demos' are made on the way, and shards are read
where they lie. Only what a phase names is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import pathlib
import random
from typing import Any

import numpy as np
import tokenizers

from composer_jax import atomic
from composer_jax import config
from composer_jax import task as task_lib
from composer_jax import trace
from composer_jax.chat import compact_renderer
from composer_jax.chat import hub_files
from composer_jax.data import corpus
from composer_jax.data import mixture
from composer_jax.data import shards as shards_lib
from composer_jax.data import stream
from composer_jax.learner import items
from kernels_triton import contract

_TOKENIZER_TASKS = 4000  # rendered tasks the tokenizer is fitted on


@dataclasses.dataclass(frozen=True, eq=False)
class Demos:
  """Rendered tasks with format-only demonstrations.

  Only the demonstration is trained; the prompt is context. Demonstrations are
  random legal actions, never right answers (`MicroRepair.demo`), on the first
  turn of an episode unless the source has others (`task.DemoWindows`).
  """

  tasks: Any
  renderer: Any
  tokens_per_row: int
  seed: int

  def _document(self, index: int) -> trace.TokenTrace:
    task = self.tasks.task(index, 'warmup')
    rng = random.Random(f'{self.seed}/demo/{index}')
    if isinstance(self.tasks, task_lib.DemoWindows):
      pieces = self.tasks.demo_window(task, rng, self.renderer)
    else:
      turn = self.renderer.encode_turn(self.tasks.demo(task, rng))
      pieces = [(self.renderer.encode_task(task), False), (turn, True)]
    ids = np.concatenate([np.array(piece, np.int32) for piece, _ in pieces])
    masks = [np.full(len(piece), trained) for piece, trained in pieces]
    if len(ids) > self.tokens_per_row:
      raise ValueError(
          f'tokens_per_row={self.tokens_per_row}: a demonstration has'
          f' {len(ids)} tokens, and none is cut; raise it'
      )
    return items.document(ids, np.concatenate(masks))

  def next(
      self, cursor: stream.Cursor, rows: int
  ) -> tuple[list[trace.TokenTrace], stream.Cursor]:
    """Documents of one batch; the cursor's chunk is the index of the task."""
    documents = []
    free = [self.tokens_per_row] * rows
    block = contract.KEY_BLOCK
    while True:
      document = self._document(cursor.chunk + len(documents))
      size = len(document)
      row = next((r for r, f in enumerate(free) if f >= size), None)
      if row is None:
        break
      free[row] -= -(-size // block) * block
      documents.append(document)
    chunk, given = cursor.chunk + len(documents), cursor.rows + rows
    return documents, dataclasses.replace(cursor, chunk=chunk, rows=given)


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
  """A source of text.

  Attributes:
    train: documents to learn from.
    heldout: documents never trained on; none if there are none.
  """

  train: stream.Tokens
  heldout: stream.Tokens


def _used(cfg: config.Experiment) -> set[str]:
  return {name for phase in cfg.phases for name, _ in phase.mix}


def open_texts(
    cfg: config.Experiment, path: pathlib.Path, names: Mapping[str, str]
) -> dict[str, Text]:
  """Opens every source of text that a phase reads.

  The tokenizer is the one at `path`, or else that of the shards, or else one
  that is fitted to code and tasks; it is kept at `path`.

  Args:
    cfg: the experiment.
    path: file of the run's tokenizer.
    names: special tokens of a model that has a base.

  Returns:
    Texts by name.

  Raises:
    ValueError: a source is missing or damaged, or is of another tokenizer.
  """
  used = _used(cfg)
  folders = {s.name: shards_lib.Shards(s) for s in cfg.shards if s.name in used}
  code = None
  if 'code' in used or not (folders or path.exists()):
    code = corpus.load(cfg.corpus)
  if not path.exists():
    if folders:
      text = next(iter(folders.values())).tokenizer
    else:
      text = _fitted(cfg, code).to_str(pretty=True)
    atomic.write(path, text)
  tokenizer = tokenizers.Tokenizer.from_file(str(path))
  size = max(tokenizer.get_vocab().values()) + 1
  if size > cfg.model.vocab:
    raise ValueError(
        f'model.vocab={cfg.model.vocab}: the tokenizer has {size} ids; set'
        f' --set=model.vocab={size} or more'
    )
  for folder in folders.values():
    folder.check(path)
  texts = {name: Text(f.train(), f.heldout()) for name, f in folders.items()}
  if 'code' in used:
    start = hub_files.start_id(tokenizer, names)
    encode = lambda part: corpus.encode(part, tokenizer, start=start)
    texts['code'] = Text(encode(code.train), encode(code.heldout))
  return texts


def _fitted(
    cfg: config.Experiment, code: corpus.Corpus
) -> tokenizers.Tokenizer:
  """A tokenizer for code and tasks."""

  def texts() -> Iterator[str]:
    for document in code.train:
      yield document.text
    for i in range(_TOKENIZER_TASKS):
      task = cfg.tasks.task(i, 'warmup')
      yield '\n'.join((*task.files.values(), task.instruction))

  return compact_renderer.train_tokenizer(texts(), cfg.model.vocab)


def mixed(
    cfg: config.Experiment,
    phase: config.PhaseConfig,
    texts: Mapping[str, Text],
    renderer: Callable[[], Any],
) -> mixture.Mixture:
  """What a phase reads; the renderer is made if it plays tasks."""

  def source(name: str) -> mixture.Source:
    row = phase.tokens_per_row
    if name == 'demos':
      return Demos(cfg.tasks, renderer(), row, cfg.seed)
    return stream.Stream(texts[name].train, row, contract.KEY_BLOCK, cfg.seed)

  weights = dict(phase.mix)
  return mixture.Mixture({name: source(name) for name in weights}, weights)
