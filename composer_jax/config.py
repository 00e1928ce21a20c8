"""Frozen configuration and its typed text form.

An `Experiment` is plain data plus a few OBJECTS (loss, advantage, tasks,
rewards, optimizers): frozen dataclasses whose fields are their own
hyper-parameters, so `--set=loss.width=0.2` reaches into them too.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def _require(ok: bool, owner: Any, field: str, cure: str) -> None:
  if not ok:
    value = getattr(owner, field)
    raise ValueError(f'{type(owner).__name__}.{field}={value!r}: {cure}')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Decoder with grouped-query attention and a sparse MoE in every layer.

  Shared experts see every token, beside the routed ones. A dense model has
  experts=0, top_k=0 and shared experts only.
  """

  vocab: int = 512
  layers: int = 3
  embed: int = 96
  q_heads: int = 4
  kv_heads: int = 2
  head_dim: int = 32
  experts: int = 8
  top_k: int = 2
  moe_ffn: int = 128  # width of one expert
  shared_experts: int = 0
  shared_gate: bool = False  # scales what the shared experts add, per token
  qkv_bias: bool = False
  qk_norm: bool = False  # of every query and key head
  tied: bool = False  # the head is the transposed embedding
  router: str = 'softmax'  # or 'sigmoid', with a bias for the choice only
  renormalize: bool = True  # gates of the chosen sum to routed_scale
  routed_scale: float = 1.0  # factor of the routed experts' sum
  # A replayed expert below this share of the weakest live choice is replaced
  # by the live router's own; 0 obeys the record whatever it says.
  replay_threshold: float = 0.0
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  dtype: str = 'float32'  # of activations; published weights are always bf16
  remat: bool = False  # a layer is computed again in the backward pass, not kept
  kernels: str | None = None  # None: triton on a GPU, reference elsewhere

  def __post_init__(self):
    _require(
        self.q_heads % self.kv_heads == 0,
        self,
        'q_heads',
        f'must be a multiple of kv_heads={self.kv_heads}',
    )
    _require(
        min(1, self.experts) <= self.top_k <= self.experts,
        self,
        'top_k',
        f'must be in [{min(1, self.experts)}, experts={self.experts}]',
    )
    _require(
        self.shared_experts >= (self.experts == 0),
        self,
        'shared_experts',
        'must be at least 0, and 1 in a dense model (experts=0)',
    )
    _require(
        self.shared_experts > 0 or not self.shared_gate,
        self,
        'shared_gate',
        'needs shared_experts of at least 1',
    )
    _require(
        self.router in ('softmax', 'sigmoid'),
        self,
        'router',
        "must be 'softmax' or 'sigmoid'",
    )
    _require(self.routed_scale > 0, self, 'routed_scale', 'must be above 0')
    _require(
        0 <= self.replay_threshold <= 1,
        self,
        'replay_threshold',
        'must be in [0, 1]',
    )
    _require(self.head_dim % 2 == 0, self, 'head_dim', 'must be even (RoPE)')
    _require(
        self.dtype in ('float32', 'bfloat16'),
        self,
        'dtype',
        "must be 'float32' or 'bfloat16'",
    )
    _require(
        self.kernels in (None, 'triton', 'reference', 'interpret'),
        self,
        'kernels',
        "must be 'triton', 'reference', 'interpret' or None",
    )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How many devices the trainer's work is split over, along four axes.

  The rows of a batch are split over data x fsdp x expert.
  """

  data: int = 2  # copies of the weights
  fsdp: int = 1  # splits every tensor; a layer is gathered while it runs
  expert: int = 1  # splits the experts
  tensor: int = 1  # splits heads and the FFNs' columns

  def __post_init__(self):
    for field in dataclasses.fields(self):
      ok = getattr(self, field.name) > 0
      _require(ok, self, field.name, 'must be at least 1')

  @property
  def row_shards(self) -> int:
    return self.data * self.fsdp * self.expert

  @property
  def devices(self) -> int:
    return self.row_shards * self.tensor

  def text(self) -> str:
    """Such as 'mesh.data=2 x mesh.expert=4'."""
    axes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    split = [f'mesh.{name}={n}' for name, n in axes.items() if n > 1]
    return ' x '.join(split or ['mesh.data=1'])


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
  path: str | None = None  # None: the running interpreter's standard library
  suffix: str = '.py'
  max_bytes: int = 6_000_000
  heldout_fraction: float = 0.02  # of files, chosen by hash of their name


@dataclasses.dataclass(frozen=True)
class PhaseConfig:
  """Next-token training on packed rows; shared by mid-training and warm-up."""

  steps: int
  rows_per_step: int
  tokens_per_row: int
  demo_fraction: float = 0.0  # share of ROWS filled with harness demos


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  slots: int = 256  # sequences decoded together
  context_tokens: int = 128  # longest sequence, prompt included
  steps_per_sync: int = 2  # decode steps per host round trip
  prefill_tokens: int = 2048  # most prompt tokens between two decode blocks
  cache_tokens: int | None = None  # of all slots; None: never short of room
  # What new weights do to a running turn: it goes on with them ('async'), or
  # ends on the old ones while new requests wait ('sync').
  swap: str = 'async'

  def __post_init__(self):
    _require(
        self.swap in ('async', 'sync'),
        self,
        'swap',
        "must be 'async' or 'sync'",
    )
    _require(self.prefill_tokens >= 4, self, 'prefill_tokens', 'must be >= 4')
    _require(
        self.cache_tokens is None or self.cache_tokens >= self.context_tokens,
        self,
        'cache_tokens',
        f'must hold one context of {self.context_tokens} tokens on every lane',
    )


@dataclasses.dataclass(frozen=True)
class HarnessConfig:
  max_turns: int = 3
  max_turn_tokens: int = 16
  max_context_tokens: int = 128
  tool_output_bytes: int = 200
  tool_seconds: float = 5.0
  # A context window that grows to this length ends with a summary by the
  # policy, and another window begins with it. None: one window an episode.
  summary_trigger_tokens: int | None = None
  summary_tokens: int = 16  # sampled at most for one
  train_summaries: bool = True  # False: a summary is context, in no loss

  def __post_init__(self):
    if self.summary_trigger_tokens is not None:
      room = self.max_turn_tokens + self.summary_tokens
      _require(
          0 < self.summary_trigger_tokens < self.max_context_tokens - room,
          self,
          'summary_trigger_tokens',
          f'must be positive and leave max_turn_tokens + summary_tokens={room}'
          f' and a query below max_context_tokens={self.max_context_tokens}',
      )


@dataclasses.dataclass(frozen=True)
class RlConfig:
  steps: int = 100
  groups_per_step: int = 12
  rollouts_per_group: int = 16
  # Tasks a prompt draws one from, rather of a kind that is not yet always
  # solved; 1: as they come.
  candidates_per_prompt: int = 1
  max_staleness_versions: int = 2  # 0: synchronous, fully on-policy
  # Rows of one packed micro-batch, the shape a step is compiled for; a step
  # accumulates over as many as its rollouts fill.
  rows_per_batch: int = 32
  tokens_per_row: int = 256
  norm_tokens: int = 8  # L_norm: Z = rollouts in the batch x norm_tokens
  withhold_staleness_versions: int = 8  # older tokens leave the loss only
  lease_seconds: float = 60.0
  workers: int = 256  # rollouts in flight
  checkpoint_every_steps: int = 20
  eval_every_steps: int = 50


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  tasks: int = 256
  seed: int = 1_000_003  # task seeds; disjoint from training by construction
  showcase: int = 5


@dataclasses.dataclass(frozen=True)
class WeightsConfig:
  codec: str = 'E'  # of deltas; D2 is faster and larger, F slower and smaller
  tile_elements: int = 262_144
  base_every_versions: int = 100
  skip_every_versions: int = 8
  keep_bases: int = 2
  raw_above_changed_fraction: float = 0.9

  def __post_init__(self):
    _require(
        self.codec in ('D2', 'E', 'F'),
        self,
        'codec',
        "must be 'D2', 'E' or 'F'",
    )


@dataclasses.dataclass(frozen=True)
class Experiment:
  """Everything a run needs; built by `experiment()` of a config module."""

  name: str
  loss: Any
  advantage: Any
  tasks: Any
  rewards: tuple[Any, ...]
  midtrain_optimizer: Any
  warmup_optimizer: Any
  rl_optimizer: Any
  seed: int = 0
  model: ModelConfig = ModelConfig()
  mesh: MeshConfig = MeshConfig()
  corpus: CorpusConfig = CorpusConfig()
  midtrain: PhaseConfig = PhaseConfig(200, 16, 256)
  warmup: PhaseConfig = PhaseConfig(200, 16, 256, demo_fraction=0.8)
  rollout: RolloutConfig = RolloutConfig()
  harness: HarnessConfig = HarnessConfig()
  rl: RlConfig = RlConfig()
  evaluation: EvalConfig = EvalConfig()
  weights: WeightsConfig = WeightsConfig()

  def __post_init__(self):
    window = self.harness.max_context_tokens
    for name, room in (
        ('rollout.context_tokens', self.rollout.context_tokens),
        ('rl.tokens_per_row', self.rl.tokens_per_row),
    ):
      if room < window:
        raise ValueError(
            f'{name}={room}: must be at least'
            f' harness.max_context_tokens={window}'
        )
