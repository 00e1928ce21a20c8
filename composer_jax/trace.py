"""What travels between rollout hosts and the trainer: numpy only, no jax.

Two things pass between the two worlds and nothing else: a `Trajectory` (up)
and a `WeightVersion` (down).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import enum
import hashlib
import json
import struct

import numpy as np

_MIN_SPREAD = 1e-6  # of the rewards of a group


class StopReason(enum.StrEnum):
  """Why a rollout ended; only `INFRA_ERROR` is not the policy's own doing."""

  FINISHED = 'finished'
  MAX_TURNS = 'max_turns'
  MAX_TOKENS = 'max_tokens'
  TOOL_BUDGET = 'tool_budget'
  PARSE_ERROR = 'parse_error'
  TIMEOUT = 'timeout'
  POLICY_FAILURE = 'policy_failure'
  INFRA_ERROR = 'infra_error'


@dataclasses.dataclass(frozen=True)
class WeightVersion:
  """One immutable published set of weights.

  Attributes:
    step: version counter, monotone over trainer restarts.
    digest: root hash over the named bf16 leaves (`weights.codec`).
    parent: digest of the version the delta was taken from; None for a base.
  """

  step: int
  digest: str
  parent: str | None


def route_dtype(experts: int) -> np.dtype:
  """Smallest unsigned type that holds an expert id and the blank mark.

  Args:
    experts: number of routed experts E; 0 in a dense model.

  Returns:
    uint8 if every id is below 255, else uint16 (ids below 65535).
  """
  if not 0 <= experts < 0xFFFF:
    raise ValueError(f'experts={experts}: must be in [0, 65534]')
  return np.dtype(np.uint8 if experts < 0xFF else np.uint16)


def blank_route(dtype: np.dtype) -> int:
  """The id that means "not recorded": the largest value of the route type."""
  return int(np.iinfo(dtype).max)


@dataclasses.dataclass(frozen=True)
class RoutingTrace:
  """Experts chosen for every token at every MoE layer.

  Row t holds the choice made while token t was the INPUT. The last token of a
  segment has never been an input, so its row is blank (`blank_route`); a
  blank row makes the trainer use its own routing, which is harmless there
  because nothing after it is trained.

  Attributes:
    experts: uint8 or uint16 [T L K]; K = 0 in a dense model.
  """

  experts: np.ndarray

  def __post_init__(self):
    if self.experts.ndim != 3 or self.experts.dtype not in (
        np.uint8,
        np.uint16,
    ):
      raise ValueError(
          'RoutingTrace.experts: want uint8|uint16 [T L K], got'
          f' {self.experts.dtype} {self.experts.shape}'
      )


@dataclasses.dataclass(frozen=True)
class TokenTrace:
  """One contiguous context window: flat, without a prompt/completion split.

  Attributes:
    tokens: int32 [T].
    sampled: bool [T], drawn by the policy and therefore trainable.
    logps: float32 [T], behaviour log-prob of a sampled token; 0 elsewhere.
    versions: int32 [T], weight step that computed the token (for a prompt
      token: that prefilled it first).
    routing: experts per token, or None if nothing recorded them.
  """

  tokens: np.ndarray
  sampled: np.ndarray
  logps: np.ndarray
  versions: np.ndarray
  routing: RoutingTrace | None = None

  def __post_init__(self):
    want = {
        'tokens': np.int32,
        'sampled': np.bool_,
        'logps': np.float32,
        'versions': np.int32,
    }
    n = self.tokens.shape[0] if self.tokens.ndim == 1 else -1
    for name, dtype in want.items():
      value = getattr(self, name)
      if value.dtype != dtype or value.shape != (n,):
        raise ValueError(
            f'TokenTrace.{name}: want {np.dtype(dtype)} [{n}], got'
            f' {value.dtype} {value.shape}'
        )
    if self.routing is not None and self.routing.experts.shape[0] != n:
      raise ValueError(
          f'TokenTrace.routing: {self.routing.experts.shape[0]} rows for {n}'
          ' tokens; a misaligned routing trace is refused, never padded'
      )

  def __len__(self) -> int:
    return self.tokens.shape[0]


def empty() -> TokenTrace:
  """A window without tokens."""
  return TokenTrace(
      tokens=np.zeros(0, np.int32),
      sampled=np.zeros(0, np.bool_),
      logps=np.zeros(0, np.float32),
      versions=np.zeros(0, np.int32),
  )


def extend(window: TokenTrace, ids: Sequence[int]) -> TokenTrace:
  """Appends context tokens: not sampled, version and routes not known yet."""
  tokens = np.asarray(ids, np.int32)
  routing = window.routing
  if routing is not None:
    _, layers, k = routing.experts.shape
    dtype = routing.experts.dtype
    rows = np.full((len(tokens), layers, k), blank_route(dtype), dtype)
    routing = RoutingTrace(np.concatenate([routing.experts, rows]))

  def join(old, value):
    return np.concatenate([old, np.full(len(tokens), value, old.dtype)])

  return TokenTrace(
      tokens=np.concatenate([window.tokens, tokens]),
      sampled=join(window.sampled, False),
      logps=join(window.logps, 0),
      versions=join(window.versions, -1),
      routing=routing,
  )


def draw_seed(seed: int, number: int) -> int:
  """Seed (32 bits) of draw `number` of a rollout, whatever else is in flight."""
  content = struct.pack('<QQ', seed & (2**64 - 1), number)
  digest = hashlib.blake2b(content, digest_size=4).digest()
  return int.from_bytes(digest, 'little')


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One rollout: every context window it used, and what it earned.

  Attributes:
    task_id: `run/prompt/member`, unique in a run.
    group_id: `run/prompt`; members of a group share one prompt.
    segments: more than one after a self-summary or a rewritten history.
    reward: None if no grade could be given (the rollout is then invalid).
    reward_parts: named components, kept so that re-weighting is offline.
    stop: why it ended.
    weights: version step -> root digest for every version in `segments`.
    meta: free text facts (task family, submission digest, ...).
  """

  task_id: str
  group_id: str
  segments: tuple[TokenTrace, ...]
  reward: float | None
  reward_parts: Mapping[str, float]
  stop: StopReason
  weights: Mapping[int, str] = dataclasses.field(default_factory=dict)
  meta: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def valid(self) -> bool:
    """True if the rollout may enter its group's statistics."""
    return self.stop is not StopReason.INFRA_ERROR and self.reward is not None


def fault(rollouts: Sequence[Trajectory]) -> str:
  """Why a group has nothing to teach: '', 'too_few' or 'zero_variance'.

  Args:
    rollouts: the valid ones of one prompt.
  """
  rewards = [t.reward for t in rollouts]
  if len(rewards) < 2:  # one alone is no baseline
    return 'too_few'
  return '' if max(rewards) - min(rewards) > _MIN_SPREAD else 'zero_variance'


_MAGIC = b'CJT1'
_FIELDS = ('tokens', 'sampled', 'logps', 'versions')


def to_bytes(trajectory: Trajectory) -> bytes:
  """Serialises a trajectory: magic, sha256 of the rest, json head, arrays."""
  head = {
      'task_id': trajectory.task_id,
      'group_id': trajectory.group_id,
      'reward': trajectory.reward,
      'reward_parts': dict(trajectory.reward_parts),
      'stop': trajectory.stop.value,
      'weights': {str(k): v for k, v in trajectory.weights.items()},
      'meta': dict(trajectory.meta),
      'segments': [],
  }
  payload = []
  for s in trajectory.segments:
    routing = None
    if s.routing is not None:
      routing = [str(s.routing.experts.dtype), *s.routing.experts.shape[1:]]
    head['segments'].append({'length': len(s), 'routing': routing})
    payload += [np.ascontiguousarray(getattr(s, f)).tobytes() for f in _FIELDS]
    if s.routing is not None:
      payload.append(np.ascontiguousarray(s.routing.experts).tobytes())
  text = json.dumps(head, sort_keys=True).encode()
  body = b''.join((struct.pack('<I', len(text)), text, *payload))
  return _MAGIC + hashlib.sha256(body).digest() + body


def from_bytes(data: bytes) -> Trajectory:
  """Inverse of `to_bytes`.

  Raises:
    ValueError: wrong magic, or the content does not match its digest.
  """
  if data[:4] != _MAGIC:
    raise ValueError(f'trajectory: bad magic {data[:4]!r}, want {_MAGIC!r}')
  body = data[36:]
  if hashlib.sha256(body).digest() != data[4:36]:
    raise ValueError('trajectory: content does not match its sha256; damaged')
  (size,) = struct.unpack_from('<I', body)
  head = json.loads(body[4 : 4 + size])
  offset = 4 + size

  def take(dtype, shape):
    nonlocal offset
    count = int(np.prod(shape))
    out = np.frombuffer(body, dtype, count, offset).reshape(shape)
    offset += out.nbytes
    return out

  segments = []
  for s in head['segments']:
    n = s['length']
    arrays = dict(
        tokens=take(np.int32, (n,)),
        sampled=take(np.bool_, (n,)),
        logps=take(np.float32, (n,)),
        versions=take(np.int32, (n,)),
    )
    routing = None
    if s['routing'] is not None:
      dtype, *shape = s['routing']
      routing = RoutingTrace(take(np.dtype(dtype), (n, *shape)))
    segments.append(TokenTrace(**arrays, routing=routing))
  return Trajectory(
      task_id=head['task_id'],
      group_id=head['group_id'],
      segments=tuple(segments),
      reward=head['reward'],
      reward_parts=head['reward_parts'],
      stop=StopReason(head['stop']),
      weights={int(k): v for k, v in head['weights'].items()},
      meta=head['meta'],
  )
