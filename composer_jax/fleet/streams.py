"""What of a run lies in NATS JetStream, and who may do what there.

One stream per run; on every subject only the newest message is kept.

  RUN.t.POOL.PROMPT.MEMBER  the task, as offered
  RUN.w.PROMPT.MEMBER       who works on it, or its result
  RUN.v                     the newest weights
  RUN.c                     what a host needs to know of the run

A task's `w` says by the sequence number of its `t` which offer it belongs to,
and every write of it names the sequence number of the one before: whoever has
lost a lease writes nothing any more.
"""

from __future__ import annotations

from collections.abc import Mapping
import re
from typing import Any

from nats.js import api

_NAME = re.compile(r'[A-Za-z0-9_-]+')
_UNLIMITED = -1
ROLES = ('trainer', 'host')


def stream(run: str) -> str:
  """Name of a run's stream.

  Raises:
    ValueError: the id of the run is no name.
  """
  if not _NAME.fullmatch(run):
    raise ValueError(f'run={run!r}: want letters, digits, - and _ only')
  return f'RUN_{run}'


def task(pool: str, task_id: str) -> str:
  """Subject of a task; '*' as the pool names it in any."""
  run, prompt, member = task_id.split('/')
  return f'{run}.t.{pool}.{prompt}.{member}'


def work(task_id: str) -> str:
  """Subject of the state of a task."""
  run, prompt, member = task_id.split('/')
  return f'{run}.w.{prompt}.{member}'


def task_id(subject: str) -> str:
  """Inverse of `task` and of `work`."""
  run, *_, prompt, member = subject.split('.')
  return f'{run}/{prompt}/{member}'


def stream_config(run: str) -> api.StreamConfig:
  """The stream of a run."""
  return api.StreamConfig(
      name=stream(run),
      subjects=[f'{run}.>'],
      max_msgs_per_subject=1,
      allow_direct=True,
      storage=api.StorageType.FILE,
  )


def consumer_config(
    run: str, pool: str, lease_seconds: float
) -> api.ConsumerConfig:
  """The tasks of a pool, each for one worker at a time."""
  return api.ConsumerConfig(
      durable_name=pool,
      filter_subject=f'{run}.t.{pool}.>',
      ack_policy=api.AckPolicy.EXPLICIT,
      ack_wait=lease_seconds,
      max_deliver=_UNLIMITED,
      max_ack_pending=_UNLIMITED,
  )


def inbox(role: str) -> str:
  """What the subjects begin with on which a role gets its answers."""
  return f'_INBOX_{role}'


def permissions(role: str) -> Mapping[str, Any]:
  """What a role may do, as in the server's configuration.

  Args:
    role: one of `ROLES`. A host may lease tasks and say what became of them; it
      can neither offer one nor say which weights are the newest.
  """
  if role == 'trainer':
    return {'publish': ['>'], 'subscribe': ['>']}
  reads = ('STREAM.LIST', 'STREAM.INFO.*', 'CONSUMER.INFO.*.*')
  reads += ('CONSUMER.MSG.NEXT.*.*', 'DIRECT.GET.>')
  return {
      'publish': ['*.w.*.*', '$JS.ACK.>', *(f'$JS.API.{r}' for r in reads)],
      'subscribe': [f'{inbox(role)}.>'],
  }
