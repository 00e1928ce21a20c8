"""A real endpoint over loopback, around an engine with random weights."""

import asyncio
import contextlib
import dataclasses
import functools
import pathlib
import threading
import time

import jax
import numpy as np
from tests import fresh
from tests import small_config

from composer_jax import config
from composer_jax import trace
from composer_jax.chat import compact_renderer
from composer_jax.chat import template
from composer_jax.learner import step
from composer_jax.model import params as params_lib
from composer_jax.rollout import engine as engine_lib
from composer_jax.runs import evaluate
from composer_jax.serving import capture as capture_lib
from composer_jax.serving import endpoint
from composer_jax.serving import gateway
from composer_jax.serving import server as server_lib
from composer_jax.serving import service as service_lib

MODEL = 'tiny'
ADMIN = 'admin-secret'
ROLLOUT = config.RolloutConfig(
    slots=32, context_tokens=256, steps_per_sync=3, prefill_tokens=512
)
_SMALL = small_config.experiment()
EXPERIMENT = dataclasses.replace(
    _SMALL,
    rollout=ROLLOUT,
    mesh=config.MeshConfig(1),
    rl=dataclasses.replace(_SMALL.rl, rows_per_batch=4, tokens_per_row=256),
)


@functools.cache
def tokenizer():
  words = 'def add(a, b):\n  return a + b\n # tools: run edit naïve ☃\n'
  return compact_renderer.train_tokenizer([words * 20], EXPERIMENT.model.vocab)


@functools.cache
def params(seed):
  """Random weights; the scaled head makes the samples less uniform."""
  made = fresh.params(EXPERIMENT.model, seed)
  return params_lib.publish_dtype(made.replace(unembed=made.unembed * 1.5))


def version(at):
  return trace.WeightVersion(at, f'digest-{at}', None)


class Kit:
  """An engine, its service and a server; one per test class.

  Attributes:
    gate: while it is clear, the engine stands still before its next block.
    fresh: weights that the engine takes next: (version, params).
    delay: seconds that it waits before every block.
  """

  def __init__(
      self,
      folder,
      *,
      chat_format=None,
      max_calls=200,
      model=EXPERIMENT.model,
      weights=None,
      patience=server_lib.PATIENCE_SECONDS,
      **sizes,
  ):
    self.gate = threading.Event()
    self.gate.set()
    self.fresh = []
    self.delay = 0.0
    self.engine = engine_lib.Engine(
        model,
        dataclasses.replace(ROLLOUT, **sizes),
        version(0),
        params(0) if weights is None else weights,
        devices=jax.devices()[:1],
        refresh=self._refresh,
    )
    self.capture = capture_lib.Capture(pathlib.Path(folder))
    self.server = server_lib.Server(server_lib.bind('127.0.0.1', 0), patience)
    self.url = self.server.url
    self.chat = chat_format or template.compact(tokenizer())
    self._max_calls = max_calls
    self._limit = sizes.get('context_tokens', ROLLOUT.context_tokens)
    self._names = 0
    self.server.call(self._serve())
    self.gateway = gateway.EndpointGateway(self.service, self.server)
    self.idle = self.engine.free()

  def _refresh(self):
    self.gate.wait(600)
    time.sleep(self.delay)
    return self.fresh.pop(0) if self.fresh else None

  async def _serve(self):
    self.service = service_lib.Service(
        self.engine,
        self.chat,
        self.capture,
        model=MODEL,
        max_model_len=self._limit,
        max_calls=self._max_calls,
        clock=time.time,
    )
    await self.server.start(endpoint.app(self.service, ADMIN))

  def close(self):
    self.gate.set()
    self.engine.close()
    self.server.stop()
    self.capture.close()

  def open(self, mode='train', seed=7):
    """Opens a rollout; returns (its id, its key)."""
    self._names += 1
    name = f'run/{self._names}/0'
    return name, self.server.call(self.service.open(name, seed, mode))

  def segments(self, name):
    """Closes a rollout."""
    return asyncio.run(self.gateway.close(name))

  def settled(self):
    """Waits until no request holds a page or a slot; says whether that is so."""
    with contextlib.suppress(TimeoutError):
      wait(lambda: self.engine.free() == self.idle)
    return self.engine.free() == self.idle


def wait(until, seconds=600.0):
  end = time.monotonic() + seconds
  while not until():
    if time.monotonic() > end:
      raise TimeoutError
    time.sleep(0.005)


def ask(text='add a b', **fields):
  """A chat request."""
  messages = [{'role': 'user', 'content': text}]
  return {'model': MODEL, 'messages': messages, 'max_tokens': 12, **fields}


def bearer(key):
  return {'Authorization': f'Bearer {key}'}


@functools.cache
def mesh():
  return step.make_mesh(EXPERIMENT.mesh)


def check_rescored(test, segments, weights=params, cfg=EXPERIMENT):
  """The trainer's own forward gives every sampled token the same bits.

  Args:
    test: asserts.
    segments: all of one weight version.
    weights: makes them from the version.
    cfg: of the model.
  """
  (at,) = {int(v) for s in segments for v in s.versions}
  scores = evaluate.rescore(cfg, segments, weights(at), mesh())
  for segment, (logps, routing) in zip(segments, scores, strict=True):
    at = segment.sampled
    test.assertTrue(at.any())
    test.assertEqual(logps[at].tobytes(), segment.logps[at].tobytes())
    recorded = segment.routing.experts[:-1]
    np.testing.assert_array_equal(recorded, routing[: len(recorded)])
