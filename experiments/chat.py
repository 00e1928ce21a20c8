"""Talks with the current weights of a run in a terminal.

  python3 -m experiments.chat --store=URL

Replies are streamed; below each stand the weight version that drew it and its
speed. New versions are followed while you talk. Commands:

  /system TEXT     begins anew with instructions
  /task [N]        shows an unseen task of the run, and what the model does
  /temperature X   0 is greedy
  /reset           begins anew
  /quit            ends, as Ctrl-D does; Ctrl-C stops a reply
"""

import contextlib
import dataclasses
import importlib
import pathlib
import sys
import time

from absl import flags as absl_flags
from experiments import flags

absl_flags.DEFINE_string(
    'store', None, 'URL or directory of the weight store of a run.'
)
absl_flags.DEFINE_string(
    'workdir', None, 'Directory of the run, for /task. Default: by the store.'
)
absl_flags.DEFINE_float('temperature', 0.7, 'Of the sampler.', lower_bound=0)
absl_flags.DEFINE_integer('max_tokens', 512, 'Of one reply.', lower_bound=1)
absl_flags.DEFINE_integer('seed', 0, 'Of the first reply.', lower_bound=0)
absl_flags.DEFINE_bool('follow', True, 'Takes new versions as they come.')
absl_flags.register_validator('store', bool, message='this flag is required')
flags.define_compilation_cache()


class _Terminal:
  """Reads commands, prints replies."""

  def __init__(self, engine, stored, sampling, tasks):
    from composer_jax.serving import conversation

    self._lib, self._engine, self._stored = conversation, engine, stored
    self._chat = conversation.Conversation(engine, stored.chat_format())
    self._sampling, self._tasks, self._next = sampling, tasks, 0

  def line(self, text: str) -> bool:
    """Carries out one line of input; False once it was /quit."""
    command, _, rest = text.strip().partition(' ')
    match command:
      case '':
        pass
      case '/quit' | '/exit':
        return False
      case '/help':
        print(sys.modules['__main__'].__doc__.partition('Commands:\n\n')[2])
      case '/reset' | '/system':
        self._chat.system(rest if command == '/system' else '')
      case '/temperature':
        value = _number(command, rest, float)
        if not 0 <= value < float('inf'):
          raise ValueError(f'/temperature {rest}: must be finite and >= 0')
        self._sampling = dataclasses.replace(self._sampling, temperature=value)
      case '/task':
        self._task(_number(command, rest, int) if rest else self._next)
      case _ if command.startswith('/'):
        raise ValueError(f'{command}: no such command; /help lists them')
      case _:
        self._reply(text)
    return True

  def _timed(self, run):
    """Prints what a reply was made of; every one has a seed of its own."""
    start = time.perf_counter()
    window, count = run()
    rate = count / (time.perf_counter() - start)
    versions = sorted({int(v) for v in window.versions[-count:]})
    print(
        f'\n[version {"-".join(map(str, versions))}; {count} tokens,'
        f' {rate:.0f} tokens/s; {len(window)} of'
        f' {self._stored.context_tokens} in the window]\n'
    )
    seed = (self._sampling.seed + 1) % 2**32
    self._sampling = dataclasses.replace(self._sampling, seed=seed)

  def _reply(self, text):

    def run():
      reply, count = self._chat.say(text, self._sampling, _print)
      for call in reply.tool_calls:
        _print(f'\n{call.name}({call.arguments})')
      return self._chat.window, count

    self._timed(run)

  def _task(self, number):
    if self._tasks is None:
      raise ValueError('/task: needs --workdir, the directory of the run')
    cfg, renderer = self._tasks
    task = cfg.tasks.task(cfg.evaluation.seed + number, 'eval')
    self._next = number + 1
    for path, source in task.files.items():
      print(f'--- {path}, task {number}\n{source}')
    print(f'--- {task.instruction}')
    prompt = renderer.encode_task(task)
    printed = 0

    def more(ids):
      nonlocal printed
      _print(renderer.text(ids)[printed:])
      printed = len(renderer.text(ids))

    def run():
      from composer_jax.serving import graph

      window = self._lib.sample(
          self._engine,
          graph.extend(None, prompt),
          renderer.stop_ids,
          self._sampling,
          more,
      )
      return window, len(window) - len(prompt)

    self._timed(run)


def _number(command, text, kind):
  try:
    return kind(text)
  except ValueError as e:
    raise ValueError(f'{command} {text}: want a number') from e


def _print(text: str) -> None:
  print(text, end='', flush=True)


def _tasks(stored):
  """(experiment, renderer) of the run, or None if it is not on this disk."""
  from composer_jax.runs import base_model
  from composer_jax.runs import manifest

  chosen = absl_flags.FLAGS.workdir
  workdir = pathlib.Path(chosen or pathlib.Path(absl_flags.FLAGS.store).parent)
  if not manifest.is_run(workdir):
    if chosen:
      raise ValueError(f'--workdir={chosen}: there is no run of composer_jax')
    return None
  cfg = flags.stored_experiment(workdir)
  return cfg, base_model.renderer(cfg, stored)


def main() -> int:
  with contextlib.suppress(ImportError):
    importlib.import_module('readline')  # lines can be edited, and come back
  import jax

  from composer_jax import config
  from composer_jax.rollout import engine as engine_lib
  from composer_jax.runs import feed as feed_lib
  from composer_jax.runs import stored_model
  from composer_jax.serving import conversation
  from experiments import machine

  values = absl_flags.FLAGS
  url = flags.store()
  machine.setup_cache(values.compilation_cache)
  stored = stored_model.read(url)
  tasks = _tasks(stored)
  make = feed_lib.WeightFeed if values.follow else feed_lib.FixedFeed
  with contextlib.closing(make(url)) as feed:
    version, params = feed.first
    sizes = config.RolloutConfig(
        slots=1, context_tokens=stored.context_tokens, prefill_tokens=256
    )
    with engine_lib.Engine(
        stored.model,
        sizes,
        version,
        params,
        devices=jax.devices()[:1],
        refresh=feed.refresh,
    ) as engine:
      print('compiling what is new to this machine...', flush=True)
      engine.warmup()
      sampling = conversation.Sampling(
          values.temperature, values.seed, values.max_tokens
      )
      print(
          f'{stored.name}, weights version {version.step}'
          f' ({version.digest[:12]}), windows of {stored.context_tokens}'
          ' tokens; /help lists commands'
      )
      return _talk(_Terminal(engine, stored, sampling, tasks))


def _talk(terminal: _Terminal) -> int:
  while True:
    try:
      text = input('> ' if sys.stdin.isatty() else '')
    except (EOFError, KeyboardInterrupt):
      print()
      return 0
    try:
      if not terminal.line(text):
        return 0
    except KeyboardInterrupt:
      print('\n[stopped]\n')
    except ValueError as e:
      print(f'{e}\n', file=sys.stderr, flush=True)


if __name__ == '__main__':
  flags.run(main)
