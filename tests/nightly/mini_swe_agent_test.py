"""mini-swe-agent, with the config it ships, repairs a repository.

A tiny model learns one session by heart: first an untrained one plays it while
its replies are read as a fixed script, then the conversation is what to learn.
"""

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import pathlib
import sqlite3
import sys
import unittest

from absl.testing import absltest
import jax
import numpy as np
import optax

from composer_jax import config
from composer_jax import task
from composer_jax import trace
from composer_jax.agents import external
from composer_jax.chat import compact_renderer
from composer_jax.chat import template
from composer_jax.chat import tool_calls
from composer_jax.learner import items
from composer_jax.learner import losses
from composer_jax.learner import packing
from composer_jax.learner import step
from composer_jax.model import params as params_lib
from kernels_triton import contract
from tests import serving_kit as lib

_COMMANDS = (
    'cat calc.py',
    "sed -i 's/a - b/a + b/' calc.py && cat calc.py",
    'echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT',
)
_TASK = task.Task(
    't', 'add subtracts.', {'calc.py': 'def add(a, b):\n  return a - b\n'}, ()
)
_RUN = """
export LITELLM_LOCAL_MODEL_COST_MAP=True MSWEA_COST_TRACKING=ignore_errors
export MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1
exec {python} -m minisweagent.run.mini -m "openai/$OPENAI_MODEL" \
  -t "$TASK_INSTRUCTION" -y --exit-immediately -o "$HOME/session.json"
"""
_MODEL = config.ModelConfig(
    vocab=1536,
    layers=2,
    embed=64,
    q_heads=2,
    kv_heads=1,
    head_dim=32,
    experts=4,
    moe_ffn=64,
)
_CONTEXT = 1536
_STEPS = 120
_CFG = dataclasses.replace(
    lib.EXPERIMENT,
    model=_MODEL,
    rl=dataclasses.replace(
        lib.EXPERIMENT.rl, rows_per_batch=1, tokens_per_row=_CONTEXT
    ),
    rollout=dataclasses.replace(lib.ROLLOUT, context_tokens=_CONTEXT),
)


class _Script(template.ChatFormat):
  """Reads the replies of an untrained model, one token each, as commands."""

  said = 0

  def __init__(self, *arguments):
    super().__init__(*arguments)  # tries how it reads calls
    self.said = 0

  def parse(self, ids, tools=()):
    del ids
    turn, self.said = self.said % len(_COMMANDS), self.said + 1
    return tool_calls.read(_said(turn), tool_calls.reader_of(''))


def _said(turn):
  call = {'name': 'bash', 'arguments': {'command': _COMMANDS[turn]}}
  return f'<tool_call>{json.dumps(call)}</tool_call>'


def _play(folder, chat_format, weights):
  """One episode; returns it and the messages and tools of its last call."""
  kit = lib.Kit(
      folder,
      chat_format=chat_format,
      model=_MODEL,
      weights=weights,
      context_tokens=_CONTEXT,
      slots=1,
  )
  try:
    command = '/bin/sh', '-c', _RUN.format(python=sys.executable)
    harness = external.SubprocessHarness(command, seconds=300.0)
    episode = asyncio.run(harness.run(_TASK, 'r', kit.gateway, 5))
  finally:
    kit.close()
  with contextlib.closing(
      sqlite3.connect(pathlib.Path(folder, 'calls.sqlite'))
  ) as db:
    (last,) = db.execute(
        'SELECT request FROM calls ORDER BY number DESC LIMIT 1'
    ).fetchone()
  return episode, json.loads(last)


def _lesson(compact, request):
  """(token ids of the whole session, which of them are replies)."""
  messages, tools = request['messages'], request['tools']
  replies = [i for i, m in enumerate(messages) if m['role'] == 'assistant']
  ids = compact.prompt(messages[: replies[0]], tools)
  trained = [False] * len(ids)
  (end,) = compact.stop_ids
  for turn, at in enumerate([*replies, len(messages)]):
    said = [*compact.encode(_said(turn)), end]
    ids, trained = ids + said, trained + [True] * len(said)
    if at < len(messages):
      following = [*replies, len(messages)][turn + 1]
      tail = compact.tail(messages[:following], tools, at + 1, True)
      ids, trained = ids + tail, trained + [False] * len(tail)
  return np.array(ids, np.int32), np.array(trained)


def _learn(tokens, trained):
  """Weights that say the lesson by heart, as they are published."""
  shape = packing.Shape(1, _CONTEXT, contract.KEY_BLOCK)
  item = items.Item(1, items.document(tokens, trained), 0.0)
  (batch,), _ = packing.pack_all([item], shape, now=0)
  tx = optax.adam(3e-3)
  state = step.init_state(_MODEL, tx, 0, lib.mesh())
  for _ in range(_STEPS):
    state, metrics = step.train_step(
        state,
        [batch],
        float(trained.sum()),
        cfg=_MODEL,
        loss=losses.NextToken(),
        tx=tx,
        mesh=lib.mesh(),
    )
  return params_lib.publish_dtype(jax.device_get(state.params)), metrics


@unittest.skipIf(
    importlib.util.find_spec('minisweagent') is None,
    'mini-swe-agent is missing: pip install -e .[peers]',
)
class MiniSweAgentTest(absltest.TestCase):

  def test_repairs_and_is_scored_alike_by_the_trainer(self):
    shipped = importlib.util.find_spec(
        'minisweagent'
    ).submodule_search_locations
    text = pathlib.Path(shipped[0], 'config', 'mini.yaml').read_text()
    texts = [text, *map(_said, range(len(_COMMANDS)))] * 20
    tokenizer = compact_renderer.train_tokenizer(texts, _MODEL.vocab)
    script = _Script(
        tokenizer, template.COMPACT_TEMPLATE, [compact_renderer.END]
    )
    script.stop_ids = frozenset(range(_MODEL.vocab))
    blank = params_lib.init(_MODEL, jax.random.key(0))
    folder = self.create_tempdir('script').full_path
    episode, request = _play(folder, script, params_lib.publish_dtype(blank))
    self.assertIn('a + b', episode.submission['calc.py'], episode)
    weights, metrics = _learn(*_lesson(template.compact(tokenizer), request))
    folder = self.create_tempdir('learned').full_path
    episode, _ = _play(folder, template.compact(tokenizer), weights)
    self.assertEqual(episode.meta['code'], '0')
    self.assertEqual(episode.stop, trace.StopReason.FINISHED)
    self.assertIn('a + b', episode.submission['calc.py'])
    session = json.loads(episode.submission['session.json'])
    self.assertEqual(session['info']['exit_status'], 'Submitted')
    (segment,) = episode.segments  # every turn went on from exact ids
    self.assertGreater(segment.sampled.sum(), 60, metrics)
    lib.check_rescored(self, [segment], lambda _: weights, _CFG)


if __name__ == '__main__':
  absltest.main()
