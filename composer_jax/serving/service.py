"""Calls to the policy, from a valid request to a durable reply.

A rollout is opened under a secret key; its calls sample with the engine, go on
from the exact tokens of earlier ones, and are on disk before anybody hears the
end of a reply. All methods run on one event loop.

What decides about a reply is its commit. A client that gives up before it ends
its call: it is not trained on, and nothing is missing either. One that leaves
during the commit, or later, changes nothing: the reply is a call of the rollout
and is trained. A retry is answered with it, and which bytes of an answer its
client has read is known to nobody. A call that ends because the process or the
engine did is lost, and its rollout incomplete, unless a retry is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
import contextlib
import dataclasses
import hashlib
import json
import secrets
from typing import Any

import numpy as np

from composer_jax import trace
from composer_jax.rollout import engine as engine_lib
from composer_jax.serving import api_errors
from composer_jax.serving import capture as capture_lib
from composer_jax.serving import choices as choices_lib
from composer_jax.serving import constraints
from composer_jax.serving import graph
from composer_jax.serving import metrics as metrics_lib
from composer_jax.serving import openai_replies
from composer_jax.serving import openai_requests
from composer_jax.serving import session as session_lib

MODES = ('train', 'serve')
RETRY_SECONDS = 1


class Service:
  """Answers the calls of open rollouts.

  Attributes:
    engine: samples.
    chat: the model's chat format.
    model: name of what is served.
    max_model_len: tokens of the longest window, prompt and reply.
    metrics: figures for monitoring.
    ready: whether calls are admitted: not while programs compile, nor once the
      server drains.
  """

  def __init__(
      self,
      engine: engine_lib.Engine,
      chat: session_lib.ChatFormat,
      capture: capture_lib.Capture,
      *,
      model: str,
      max_model_len: int,
      max_calls: int,
      clock: Callable[[], float],
  ):
    """Serves an engine; the class says what is not said here.

    Args:
      engine: samples.
      chat: chat format of its model.
      capture: where calls are kept.
      model: name that requests give.
      max_model_len: `RolloutConfig.context_tokens` of the engine.
      max_calls: sampled or waiting at once; more are told to come again.
      clock: seconds since 1970, for clients.
    """
    self.engine = engine
    self.chat = chat
    self.model = model
    self.max_model_len = max_model_len
    self.ready = True
    self._capture = capture
    self._max_calls = max_calls
    self._clock = clock
    self._calls = 0
    self._sessions: dict[str, session_lib.Session] = {}
    self._names: dict[bytes, str] = {}  # of sessions, by digest of their keys
    self._loading = asyncio.Lock()
    self.metrics = metrics_lib.Metrics(engine, lambda: self._calls)
    self._compiler = constraints.Compiler(chat)

  async def open(
      self, rollout: str, seed: int, mode: str, secret: str | None = None
  ) -> str:
    """Admits a rollout.

    Args:
      rollout: its id; never used before.
      seed: seed of the random numbers of its calls.
      mode: 'train' or 'serve'.
      secret: its key; None for a fresh one.

    Returns:
      The key.

    Raises:
      ValueError: the id or the key was used before.
    """
    secret = secret or 'cj-' + secrets.token_urlsafe(24)
    opened = self._capture.open(rollout, _digest(secret), mode, seed)
    await asyncio.wrap_future(opened)
    return secret

  async def session(
      self, *, secret: str | None = None, name: str | None = None
  ) -> session_lib.Session | None:
    """Finds a rollout by its key or its id, open or closed."""
    hashed = None if secret is None else _digest(secret)
    known = self._names.get(hashed, name)
    if known in self._sessions:
      return self._sessions[known]
    async with self._loading:
      stored = await asyncio.wrap_future(
          self._capture.rollout(secret=hashed, name=name)
      )
      if stored is None:
        return None
      if stored.id not in self._sessions:
        loaded = await asyncio.wrap_future(self._capture.load(stored.id))
        session = session_lib.Session(stored, *loaded)
        if session.closed:
          return session
        self._sessions[stored.id] = session
      if hashed is not None:
        self._names[hashed] = stored.id
      return self._sessions[stored.id]

  async def close(self, rollout: str) -> tuple[trace.TokenTrace, ...]:
    """Admits no further call, ends those that run, returns the segments.

    Raises:
      ConnectionError: a call was lost.
      KeyError: there is no such rollout.
    """
    session = await self.session(name=rollout)
    if session is None:
      raise KeyError(rollout)
    session.closed = True
    for task in session.tasks:
      task.cancel()
    await asyncio.gather(*session.tasks, return_exceptions=True)
    await asyncio.wrap_future(self._capture.close_rollout(rollout))
    self._sessions.pop(rollout, None)
    self._names = {k: v for k, v in self._names.items() if v != rollout}
    if lost := len(session.pending):
      self.metrics.lost.inc(lost)
      raise ConnectionError(
          f'rollout {rollout}: {lost} of {session.next} calls were lost'
      )
    return graph.segments(sorted(session.calls, key=lambda c: c.number))

  async def finish(self, session: session_lib.Session, text: str) -> None:
    """Keeps a client's last word on its rollout, as JSON."""
    if session.finish not in (None, text):
      raise api_errors.ApiError(
          409, f'rollout {session.id}: is finished, with other content'
      )
    session.finish = text
    await asyncio.wrap_future(self._capture.finish(session.id, text))
    session.finished.set()

  async def drain(self, seconds: float) -> None:
    """Admits no call; waits for those that run, but not for ever."""
    self.ready = False
    tasks = [t for s in self._sessions.values() for t in s.tasks]
    if tasks:
      await asyncio.wait(tasks, timeout=seconds)

  def submit(
      self,
      session: session_lib.Session,
      ask: openai_requests.Ask,
      request: bytes,
      *,
      retry: bool,
      key: str | None,
  ) -> session_lib.Work:
    """Starts a call, or joins the one that it repeats; `release` it later.

    Args:
      session: rollout of the call.
      ask: the request.
      request: its bytes.
      retry: whether it may repeat an earlier one.
      key: its idempotency key, if it has one.

    Raises:
      ApiError: the key came with another request.
    """
    body = _digest('plain' if ask.messages is None else 'chat', request)
    identity = body if key is None else _digest('key', key)
    repeats = retry or key is not None
    work = session.works.get(identity) if repeats else None
    if work is None:
      work = session_lib.Work(ask, request, body, identity)
      session.works[identity] = work
      work.task = asyncio.create_task(self._answer(session, work, repeats))
      session.tasks.add(work.task)
      work.task.add_done_callback(lambda _: self._done(session, work))
    elif work.body != body:
      raise _other_request()
    work.waiters += 1
    return work

  def release(self, session: session_lib.Session, work: session_lib.Work):
    """A request wants the reply no more; the last one ends the call."""
    work.waiters -= 1
    if not work.waiters and not work.task.done():
      self._forget(session, work)  # a retry must not join it
      work.task.cancel()

  def _forget(self, session, work) -> None:
    if session.works.get(work.identity) is work:
      del session.works[work.identity]

  def _done(self, session, work) -> None:
    self._forget(session, work)
    session.tasks.discard(work.task)
    work.started.set()
    work.changed.set()
    if not work.task.cancelled():
      work.task.exception()  # whoever waits gets it, too

  async def _answer(self, session, work, repeats: bool) -> dict[str, Any]:
    stored = None
    if repeats:
      stored = await asyncio.wrap_future(
          self._capture.find(session.id, work.identity)
      )
    if stored and stored.body != work.body:
      raise _other_request()
    if stored and stored.reply is not None:
      self.metrics.replayed.inc()
      work.head = json.loads(stored.reply)
      return work.head
    ask = work.ask
    if self._calls and self._calls + ask.n > self._max_calls:
      raise api_errors.ApiError(
          429,
          f'{self._calls} calls are sampled or waiting; try again later',
          retry_after=RETRY_SECONDS,
      )
    self._calls += ask.n
    try:
      forms = await self._compiler.constraints(ask)
      async with session.turn:
        parent, context = await session.context(
            ask, session_lib.chat_of(self.chat, ask), self.max_model_len
        )
        # The same number as before it was lost: the same seed, too.
        number = stored.number if stored else session.next
        work.head = self._head(session, ask, number)
        pending, admitted = self._admit(session, work, number, context, forms)
      windows = await self._sample(session, work, number, pending, admitted)
      whole = [form is None or not form.broken for form in forms]
      return await self._keep(
          session, work, number, parent, context, windows, whole
      )
    except (RuntimeError, OSError) as e:
      raise api_errors.ApiError(
          503, f'call failed: {e}; send it again', retry_after=RETRY_SECONDS
      ) from e
    finally:
      self._calls -= ask.n

  def _head(self, session, ask, number) -> dict[str, Any]:
    name = _digest(session.id, str(number)).hex()[:24]
    plain = ask.messages is None
    return {
        'id': f'cmpl-{name}' if plain else f'chatcmpl-{name}',
        'object': 'text_completion' if plain else 'chat.completion',
        'created': int(self._clock()),
        'model': self.model,
    }

  def _admit(self, session, work, number, context, forms):
    """Queues a call; returns futures of its windows, and of its record."""
    ask, chat = work.ask, self.chat
    seed, first = session.seed, number
    if session.mode == 'serve' and ask.seed is not None:
      seed, first = ask.seed, 0
    # A shortcut only: the text of a stop string may be made of other tokens.
    sequences = tuple(tuple(chat.encode(s)) for s in ask.stop)
    requests = [
        engine_lib.Request(
            context,
            ask.max_tokens or self.max_model_len,
            chat.stop_ids,
            trace.draw_seed(seed, first + i),
            ask.temperature,
            sequences,
            self._listener(work, i) if ask.stream else None,
            ask.shaping,
            forms[i],
        )
        for i in range(ask.n)
    ]
    try:
      pending = self.engine.submit_group(requests)
    except ValueError as e:
      raise api_errors.ApiError(400, str(e)) from e
    session.next = max(session.next, number + ask.n)
    session.pending |= set(range(number, number + ask.n))
    admission = capture_lib.Admission(
        number,
        ask.n,
        work.identity,
        work.body,
        work.request,
        graph.digest(b'', ask.tools),
    )
    return pending, self._capture.admit(session.id, admission)

  async def _sample(self, session, work, number, pending, admitted):
    """The windows of all choices."""
    choices = work.ask.n
    try:
      await asyncio.wrap_future(admitted)
      work.started.set()
      return await asyncio.gather(*map(asyncio.wrap_future, pending))
    except asyncio.CancelledError:
      self._capture.cancel(session.id, number, choices)
      session.pending -= set(range(number, number + choices))
      self.metrics.cancelled.inc()
      raise
    finally:
      for future in pending:
        future.cancel()

  def _listener(self, work: session_lib.Work, index: int):
    loop = asyncio.get_running_loop()

    def take(ids: list[int]) -> None:
      work.sampled[index] += ids
      work.changed.set()

    def on_tokens(ids: np.ndarray) -> None:
      with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(take, ids.tolist())

    return on_tokens

  async def _keep(self, session, work, number, parent, context, windows, whole):
    """Makes the reply and writes it down."""
    ask, at = work.ask, len(context)
    choices, calls = [], []
    for i, window in enumerate(windows):
      if ask.steered:  # not a sample of the policy: never trained
        sampled = window.sampled & (np.arange(len(window)) < at)
        window = dataclasses.replace(window, sampled=sampled)
      shown, window, key = choices_lib.choice(
          ask,
          session_lib.chat_of(self.chat, ask),
          window,
          at,
          f'{work.head["id"]}-{i}',
          whole=whole[i],
      )
      choices.append({'index': i, **shown})
      calls.append(
          graph.child(parent, number + i, window, at, key, self.engine.digests)
      )
    usage = openai_replies.usage(at, sum(len(c) - at for c in calls))
    reply = {**work.head, 'choices': choices, 'usage': usage}
    reasons = [choice['finish_reason'] for choice in choices]
    saved = asyncio.wrap_future(
        self._capture.answer(session.id, calls, reasons, json.dumps(reply))
    )
    while not saved.done():  # it cannot be undone, whoever has left by now
      with contextlib.suppress(asyncio.CancelledError):
        await asyncio.shield(saved)
    saved.result()
    for call in calls:
      session.add(call)
    return reply


def _digest(*parts: bytes | str) -> bytes:
  """Digest of parts that hold no NUL, but for the last."""
  encoded = [p.encode() if isinstance(p, str) else p for p in parts]
  return hashlib.sha256(b'\0'.join(encoded)).digest()


def _other_request() -> api_errors.ApiError:
  return api_errors.ApiError(
      409, 'Idempotency-Key: was used with another request; use a fresh one'
  )
