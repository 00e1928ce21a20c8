"""Everything a run will need, looked at before anything is built.

What can be refused is refused here, in seconds: a value that does not go with
another one, a loss of a wrong shape, data that is not there, tasks of a split
that ends too early or that nothing grades, too little memory, no safe sandbox.
"""

from __future__ import annotations

from composer_jax import config
from composer_jax.agents import harness
from composer_jax.chat import compact_renderer
from composer_jax.data import corpus
from composer_jax.data import shards
from composer_jax.environments import curriculum
from composer_jax.learner import loss_inputs
from composer_jax.runs import evaluate
from composer_jax.runs import plan
from composer_jax.runs import player

_BEYOND = 1 << 40  # an index that only an endless source has
_LOOKED_AT = 64  # tasks of such a source


def check(
    cfg: config.Experiment, *, rl: bool, memory_bytes: int | None
) -> None:
  """Refuses a run that could not reach its end on this machine.

  Args:
    cfg: The experiment.
    rl: Whether the run plays tasks, or has next-token phases only.
    memory_bytes: Memory of the machine; None if it is not what holds the model.

  Raises:
    ValueError: Names the field, its value and the cure.
  """
  loss_inputs.check_loss(cfg.loss)
  plan.check(cfg)
  _memory(cfg, memory_bytes)
  _texts(cfg)
  _tasks(cfg, rl)
  if rl:
    player.isolation()


def prompts(cfg: config.Experiment, renderer: harness.Renderer) -> str:
  """Looks at the prompts of training tasks: all of them, if they ever end.

  Args:
    cfg: The experiment.
    renderer: Renderer of its tasks.

  Returns:
    How many cannot be played, for people; '' if all can be.

  Raises:
    ValueError: None can be played, or two tasks have one id.
  """
  finite = not curriculum.has(cfg.tasks, _BEYOND, 1)
  ids: set[str] = set()
  reasons = []
  for index in range(_BEYOND if finite else _LOOKED_AT):
    try:
      task = cfg.tasks.task(index, 'train')
    except IndexError:
      break
    if finite and task.id in ids:
      raise ValueError(f'tasks: two have the id {task.id!r}; rename one')
    ids.add(task.id)
    _, misfit = harness.prompt_of(task, renderer, cfg.harness)
    reasons += [misfit] if misfit else []
  if not reasons:
    return ''
  if len(reasons) == len(ids):
    raise ValueError(f'tasks: no prompt fits; the first: {reasons[0]}')
  return (
      f'{len(reasons)} of {len(ids)} training tasks are untrainable and will be'
      f' skipped; the first: {reasons[0]}'
  )


def _memory(cfg: config.Experiment, memory_bytes: int | None) -> None:
  sizes = plan.memory(cfg)
  need = sum(sizes.values())
  if memory_bytes is not None and need > memory_bytes:
    name, most = max(sizes.items(), key=lambda item: item[1])
    raise ValueError(
        f'this run takes about {need / 2**30:,.1f} GiB, most of it for {name}'
        f' ({most / 2**30:,.1f} GiB), and this machine has'
        f' {memory_bytes / 2**30:,.1f} GiB: lower what decides it (sizes of the'
        ' model, rows and tokens of a batch, decode slots)'
    )


def _texts(cfg: config.Experiment) -> None:
  used = {name for phase in cfg.phases for name, _ in phase.mix}
  folders = [shards.Shards(s) for s in cfg.shards if s.name in used]
  fits = not (cfg.base or folders)  # a tokenizer, to code and tasks
  if fits and cfg.model.vocab < compact_renderer.LEAST_VOCAB:
    raise ValueError(
        f'model.vocab={cfg.model.vocab}: must be at least'
        f' {compact_renderer.LEAST_VOCAB}, the entries that every tokenizer has'
    )
  if 'code' in used or fits:
    corpus.load(cfg.corpus)


def _tasks(cfg: config.Experiment, rl: bool) -> None:
  """Asks for tasks of every split that is used, and for what grades them.

  The first and the last; of those to train on all that the first prompt is
  chosen from.
  """
  wanted = []
  if any(name == 'demos' for phase in cfg.phases for name, _ in phase.mix):
    wanted.append(('warmup', 0))
  if rl:
    first = cfg.evaluation.seed
    wanted += [('train', 0), ('train', cfg.rl.candidates_per_prompt - 1)]
    for split in evaluate.SPLITS:
      wanted += [(split, first), (split, first + cfg.evaluation.tasks - 1)]
  for split, index in wanted:
    try:
      cfg.tasks.hidden(cfg.tasks.task(index, split))
    except IndexError as e:
      raise ValueError(f'tasks: split {split!r} ends too early: {e}') from e
