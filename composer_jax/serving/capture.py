"""Durable record of every call, in one SQLite file.

All work is done by one thread, many jobs per commit, so that neither the event
loop nor the engine waits for a disk. A result means that the job is on disk:
the write-ahead log was synced. Arrays are kept as in `trace.to_bytes`.

A call is `admitted`, then `answered` or `cancelled`. One that is still admitted
when nobody works on it any more (the process died, the engine failed) is lost,
until a retry answers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
import contextlib
import pathlib
import queue
import sqlite3
import threading
from typing import Any, NamedTuple, TypeVar

from composer_jax import trace
from composer_jax.serving import graph

_FILE = 'calls.sqlite'
_JOBS_PER_COMMIT = 256
_LOCK_SECONDS = 1.0  # until another process that uses the file counts
_SCHEMA = """
CREATE TABLE IF NOT EXISTS rollouts (
  id TEXT PRIMARY KEY,
  secret BLOB UNIQUE,  -- sha256 of the key
  mode TEXT, seed TEXT, closed INTEGER DEFAULT 0, finish TEXT);
CREATE TABLE IF NOT EXISTS calls (
  rollout TEXT, number INTEGER, state TEXT,
  identity BLOB, body BLOB,  -- what a retry repeats; sha256 of the request
  request BLOB, reply TEXT,
  parent INTEGER, prompt_tokens INTEGER, key BLOB, tools BLOB,
  finish_reason TEXT, rows BLOB,
  PRIMARY KEY (rollout, number));
CREATE INDEX IF NOT EXISTS retries ON calls (rollout, identity);
"""
T = TypeVar('T')
Job = Callable[[sqlite3.Connection], Any]


class Rollout(NamedTuple):
  """A rollout as it is stored; `finish` is the JSON of what ended it."""

  id: str
  mode: str
  seed: int
  closed: bool
  finish: str | None


class Admission(NamedTuple):
  """A call before it is answered.

  Attributes:
    number: number of the first choice; one more for every other one.
    choices: replies sampled for the same prompt.
    identity: equal in retries.
    body: digest of the request.
    request: its JSON.
    tools: digest of the tools on offer.
  """

  number: int
  choices: int
  identity: bytes
  body: bytes
  request: bytes
  tools: bytes


class Stored(NamedTuple):
  """An earlier call with the same identity."""

  number: int
  body: bytes
  reply: str | None


class Capture:
  """The record; every method returns a future of its result.

  Awaiting one and being cancelled does not undo the job.
  """

  def __init__(self, folder: pathlib.Path):
    """Opens or creates the record.

    Raises:
      ValueError: the folder cannot be written, or another process uses it.
    """
    self._jobs: queue.SimpleQueue[tuple[Job, futures.Future] | None]
    self._jobs = queue.SimpleQueue()
    try:
      folder.mkdir(parents=True, exist_ok=True)
      self._db = _connect(folder / _FILE)
    except (OSError, sqlite3.Error) as e:
      raise ValueError(
          f'capture={folder}: {e}; name a folder of its own that can be written'
      ) from e
    self._thread = threading.Thread(
        target=self._run, name='capture', daemon=True
    )
    self._thread.start()

  def close(self) -> None:
    """Finishes what was asked for."""
    self._jobs.put(None)
    self._thread.join()
    self._db.close()

  def _do(self, job: Callable[[sqlite3.Connection], T]) -> futures.Future[T]:
    future: futures.Future[T] = futures.Future()
    future.set_running_or_notify_cancel()  # nobody can cancel it any more
    self._jobs.put((job, future))
    return future

  def _run(self) -> None:
    while batch := self._next():
      try:
        self._db.execute('BEGIN IMMEDIATE')
        results = [_outcome(job, self._db) for job, _ in batch]
        self._db.execute('COMMIT')
      except sqlite3.Error as e:  # a full disk, for instance
        with contextlib.suppress(sqlite3.Error):
          self._db.execute('ROLLBACK')
        results = [(None, OSError(f'capture: {e}'))] * len(batch)
      for (_, future), (value, error) in zip(batch, results, strict=True):
        if error is None:
          future.set_result(value)
        else:
          future.set_exception(error)

  def _next(self) -> list[tuple[Job, futures.Future]]:
    """Waits for a job, and takes those that wait behind it; none at the end."""
    batch = []
    while not batch or (
        len(batch) < _JOBS_PER_COMMIT and not self._jobs.empty()
    ):
      job = self._jobs.get()
      if job is None:
        self._jobs.put(None)
        break
      batch.append(job)
    return batch

  def open(
      self, rollout: str, secret: bytes, mode: str, seed: int
  ) -> futures.Future[None]:
    """Admits a rollout; ValueError if its id or key was used before."""

    def job(db):
      try:
        db.execute(
            'INSERT INTO rollouts (id, secret, mode, seed) VALUES (?, ?, ?, ?)',
            (rollout, secret, mode, str(seed)),
        )
      except sqlite3.IntegrityError as e:
        raise ValueError(
            f'rollout {rollout}: this id or key is already in use; choose'
            ' another one'
        ) from e

    return self._do(job)

  def rollout(
      self, *, secret: bytes | None = None, name: str | None = None
  ) -> futures.Future[Rollout | None]:
    """Looks a rollout up by the digest of its key, or by its id."""

    def job(db):
      row = db.execute(
          'SELECT id, mode, seed, closed, finish FROM rollouts'
          ' WHERE secret = ? OR id = ?',
          (secret, name),
      ).fetchone()
      return row and Rollout(row[0], row[1], int(row[2]), bool(row[3]), row[4])

    return self._do(job)

  def finish(self, rollout: str, text: str) -> futures.Future[None]:
    """Keeps what a service said at the end."""
    return self._update('rollouts', 'finish = ?', 'id = ?', (text, rollout))

  def close_rollout(self, rollout: str) -> futures.Future[None]:
    """Admits no further call, also after a restart."""
    return self._update('rollouts', 'closed = 1', 'id = ?', (rollout,))

  def _update(self, table, change, where, values) -> futures.Future[None]:
    def job(db):
      db.execute(f'UPDATE {table} SET {change} WHERE {where}', values)

    return self._do(job)

  def find(
      self, rollout: str, identity: bytes
  ) -> futures.Future[Stored | None]:
    """The newest call with this identity."""

    def job(db):
      row = db.execute(
          'SELECT number, body, reply FROM calls WHERE rollout = ?'
          ' AND identity = ? ORDER BY number DESC LIMIT 1',
          (rollout, identity),
      ).fetchone()
      return row and Stored(*row)

    return self._do(job)

  def admit(self, rollout: str, call: Admission) -> futures.Future[None]:
    """Records that a call is being worked on, once more if it was lost."""

    def job(db):
      for i in range(call.choices):
        first = (call.identity, call.body, call.request) if i == 0 else ()
        db.execute(
            'INSERT OR REPLACE INTO calls (rollout, number, state, tools,'
            " identity, body, request) VALUES (?, ?, 'admitted', ?, ?, ?, ?)",
            (rollout, call.number + i, call.tools, *(first or (None,) * 3)),
        )

    return self._do(job)

  def answer(
      self,
      rollout: str,
      calls: Sequence[graph.Call],
      reasons: Sequence[str],
      reply: str,
  ) -> futures.Future[None]:
    """Records the answer to a call.

    Args:
      rollout: its id.
      calls: one per choice.
      reasons: why each of them ended.
      reply: JSON, kept with the first choice.
    """

    def job(db):
      for call, reason in zip(calls, reasons, strict=True):
        parent = call.parent and call.parent.number
        db.execute(
            "UPDATE calls SET state = 'answered', parent = ?,"
            ' prompt_tokens = ?, key = ?, finish_reason = ?, rows = ?'
            ' WHERE rollout = ? AND number = ?',
            (parent, call.prompt_tokens, call.key, reason, _to_blob(call))
            + (rollout, call.number),
        )
      db.execute(
          'UPDATE calls SET reply = ? WHERE rollout = ? AND number = ?',
          (reply, rollout, calls[0].number),
      )

    return self._do(job)

  def cancel(
      self, rollout: str, number: int, choices: int
  ) -> futures.Future[None]:
    """Records that the caller gave up; nothing of it is trained on."""
    return self._update(
        'calls',
        "state = 'cancelled'",
        'rollout = ? AND number >= ? AND number < ?',
        (rollout, number, number + choices),
    )

  def load(
      self, rollout: str
  ) -> futures.Future[tuple[list[graph.Call], set[int], int]]:
    """Returns (answered calls in order, numbers admitted only, next number)."""

    def job(db):
      found: dict[int, graph.Call] = {}
      for number, parent, prompt_tokens, key, rows in db.execute(
          'SELECT number, parent, prompt_tokens, key, rows FROM calls'
          " WHERE rollout = ? AND state = 'answered' ORDER BY number",
          (rollout,),
      ):
        window = trace.from_bytes(rows)
        above = None if parent is None else found[parent]
        start = len(above) - 1 if above else 0
        found[number] = graph.Call(
            number,
            above,
            start,
            window.segments[0],
            prompt_tokens,
            key,
            window.weights,
        )
      states = db.execute(
          'SELECT number, state FROM calls WHERE rollout = ?', (rollout,)
      ).fetchall()
      pending = {n for n, state in states if state == 'admitted'}
      following = 1 + max((n for n, _ in states), default=-1)
      return [*found.values()], pending, following

    return self._do(job)


def _connect(path: pathlib.Path) -> sqlite3.Connection:
  db = sqlite3.connect(
      path, _LOCK_SECONDS, isolation_level=None, check_same_thread=False
  )
  db.execute('PRAGMA locking_mode = EXCLUSIVE')  # two servers would race
  db.execute('PRAGMA journal_mode = WAL')
  db.execute('PRAGMA synchronous = FULL')
  db.executescript(_SCHEMA)
  return db


def _outcome(job: Job, db: sqlite3.Connection):
  """(result, None) or (None, error); a database error ends the whole batch."""
  try:
    return job(db), None
  except ValueError as e:
    return None, e


def _to_blob(call: graph.Call) -> bytes:
  return trace.to_bytes(
      trace.Trajectory(
          task_id=str(call.number),
          group_id='',
          segments=(call.rows,),
          reward=None,
          reward_parts={},
          stop=trace.StopReason.FINISHED,
          weights=call.digests,
      )
  )
