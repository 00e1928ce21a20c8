"""Turns that a policy might write, played as a run plays them.

Half are made of calls with odd names, arguments and text around them, half are
ids drawn at random. Harness, sandboxes, grader, queue and gate are real; only
the model is not.
"""

import collections
import dataclasses
import json
import random

import numpy as np
from tests import sampled_policy
from tests import small_config

from composer_jax import config
from composer_jax import trace
from composer_jax.agents import tools
from composer_jax.chat import chat_renderer
from composer_jax.chat import compact_renderer
from composer_jax.chat import template
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.runs import player
from composer_jax.runs import rollouts as rollouts_lib

_TEXTS = (
    *('', 'f.py', 'a', '\n', '\x00', '../../etc/passwd', '/', 'x' * 300),
    *('\ud800', 'a\udfff', '\ue000', '\U0010ffff', '\ufffd', '\u202e'),
    *('<|end|>', '<|obs|>', '<tool_call>', '</tool_call>', '<think>', '{{x}}'),
    *('def f(x):\n  return "\\ud800"\n', 'import os;os._exit(0)', '(' * 200),
    ''.join(map(chr, range(0xE000, 0xE100))),
)
_NUMBERS = (0, 1, -1, -100, 2**31, -(2**63), 10**4000, 1.5, True, None)
_FIELDS = ('line', 'old', 'new', 'path', 'first', 'last', 'text', '\udc00')


def _value(rng: random.Random):
  kind = rng.random()
  if kind < 0.45:
    return rng.choice(_TEXTS)
  if kind < 0.9:
    return rng.choice(_NUMBERS)
  return [{rng.choice(_TEXTS): rng.choice(_NUMBERS)}]


def _call(rng: random.Random) -> str:
  """JSON text of a call, mostly one with the right fields."""
  name = rng.choice([*tools.BY_NAME, *tools.BY_NAME, rng.choice(_TEXTS)])
  kind = tools.BY_NAME.get(name)
  fields = [f.name for f in dataclasses.fields(kind)] if kind else []
  fields += rng.sample(_FIELDS, 2) if rng.random() < 0.2 else []
  wants_int = ('line', 'first', 'last')
  arguments = {}
  for field in fields:
    fits = rng.random() < 0.8
    texts = _NUMBERS[:7] if field in wants_int else _TEXTS
    arguments[field] = rng.choice(texts) if fits else _value(rng)
  text = json.dumps({'name': name, 'arguments': arguments})
  if rng.random() < 0.1:
    text = text.replace(rng.choice('{}":,'), rng.choice(['', '[' * 3000]), 1)
  return f'<tool_call>{text}</tool_call>'


def turn(rng: random.Random, renderer, vocab: int) -> list[int]:
  """One hostile turn, at least a token long."""
  if rng.random() < 0.5:
    ids = [rng.randrange(vocab) for _ in range(rng.randrange(1, 40))]
    if isinstance(renderer, compact_renderer.CompactRenderer):
      special = sorted(renderer._special)
      ids = [rng.choice(special) if rng.random() < 0.6 else i for i in ids]
    return ids + rng.choice([[], sorted(renderer.stop_ids)])
  if isinstance(renderer, compact_renderer.CompactRenderer):
    calls = [
        tools.Edit(rng.randrange(16), rng.choice(_TEXTS), rng.choice(_TEXTS)),
        tools.Run(),
        tools.Done(),
    ]
    return renderer.encode_turn(rng.sample(calls, rng.randrange(1, 4)))
  pieces = [_call(rng) for _ in range(rng.randrange(1, 4))]
  pieces.insert(rng.randrange(len(pieces) + 1), rng.choice(_TEXTS))
  return renderer.encode_summary(''.join(pieces))


class _Policy(sampled_policy.ScriptedPolicy):
  """Goes on with hostile turns; what it says depends on the seed alone."""

  digests = collections.defaultdict(lambda: 'd')

  def __init__(self, renderer, vocab: int):
    super().__init__([])
    self._renderer, self._vocab = renderer, vocab
    self.turns, self.version = 0, 0

  async def complete(self, context, *, max_tokens, stop, seed, temperature):
    ids = turn(random.Random(seed), self._renderer, self._vocab)
    self.turns += 1
    one = sampled_policy.ScriptedPolicy([ids])
    window = await one.complete(
        context,
        max_tokens=max_tokens,
        stop=stop,
        seed=seed,
        temperature=temperature,
    )
    versions = np.full(len(window), self.version, np.int32)
    return dataclasses.replace(window, versions=versions)


class _Feed:
  """Weights that are always there."""

  async def wait_for(self, version: int) -> None:
    del version


class Host(player.Player):
  """A host with everything but an engine."""

  def __enter__(self):
    self.feed = _Feed()
    self._policy = _Policy(self.renderer, self._cfg.model.vocab)
    self._start()
    return self

  def __exit__(self, *_) -> None:
    self.call(self._close_pools())
    self._halt()


def play(turns: int, seed: int, chat: bool) -> tuple[int, int]:
  """Plays a run until so many turns were sampled.

  Returns:
    (turns, rollouts that are booked), of which each is valid.
  """
  cfg = small_config.experiment()
  room = 16_384
  cfg = dataclasses.replace(
      cfg,
      seed=seed,
      harness=config.HarnessConfig(3, 2000, 12_000),
      rollout=dataclasses.replace(cfg.rollout, context_tokens=room),
      rl=dataclasses.replace(cfg.rl, tokens_per_row=room, lease_seconds=600.0),
  )
  texts = [cfg.tasks.task(k, 'warmup').files['f.py'] for k in range(300)]
  tokenizer = compact_renderer.train_tokenizer(
      [*texts, str(chat_renderer.SCHEMAS)], cfg.model.vocab
  )
  renderer = compact_renderer.CompactRenderer(tokenizer)
  if chat:
    renderer = chat_renderer.ChatRenderer(template.compact(tokenizer))
  ledger, booked = ledger_lib.Ledger(), 0
  with Host(cfg, 'none:', renderer, device=None) as host:
    rollouts = rollouts_lib.Rollouts(
        cfg, host, ledger, trace.WeightVersion(0, 'd', None), 'run'
    )
    try:
      while host._policy.turns < turns:
        batch = rollouts.take().consumed
        for group in batch.groups + batch.untrained:
          outcomes = [m.outcome for m in group.members.values()]
          want = ['valid'] * cfg.rl.rollouts_per_group
          assert outcomes == want, outcomes
          booked += len(outcomes)
        ledger = ledger_lib.commit(ledger, batch, 'd')
        assert not ledger_lib.lost(ledger)
        version = trace.WeightVersion(batch.version + 1, 'd', None)
        host.call(rollouts.dispatcher.open(version))
        host._policy.version = version.step
    finally:
      rollouts.close()
  return host._policy.turns, booked
