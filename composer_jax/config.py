"""Frozen configuration and its typed text form.

An `Experiment` is plain data plus a few OBJECTS (loss, advantage, tasks,
rewards, optimizers): frozen dataclasses whose fields are their own
hyper-parameters, so `--set=loss.width=0.2` reaches into them too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from composer_jax import phases
from composer_jax import rope

_require = phases.require
CorpusConfig = phases.CorpusConfig
ShardsConfig = phases.ShardsConfig
Balancing = phases.Balancing
Mtp = phases.Mtp
PhaseConfig = phases.PhaseConfig


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Decoder with a sparse MoE in every layer but the first few.

  Shared experts see every token, beside the routed ones. A dense model has
  experts=0, top_k=0 and shared experts only.

  Attention is grouped-query, or with kv_latent > 0 multi-head latent attention
  (MLA, arXiv 2405.04434). There head_dim counts the dimensions of a query head
  that do not rotate, rope_dim those that do, and all heads share one key and
  value, the latent: kv_heads=1.
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
  dense_layers: int = 0  # at the start, with one FFN in place of the experts
  dense_ffn: int = 0  # its width
  kv_latent: int = 0  # width of what all heads share; 0: grouped-query
  q_latent: int = 0  # width that queries are made from; 0: the full one
  rope_dim: int = 0
  value_dim: int = 0  # of a head, with kv_latent
  qkv_bias: bool = False
  qk_norm: bool = False  # of every query and key head
  tied: bool = False  # the head is the transposed embedding
  router: str = 'softmax'  # or 'sigmoid', with a bias for the choice only
  renormalize: bool = True  # gates of the chosen sum to routed_scale
  routed_scale: float = 1.0  # factor of the routed experts' sum
  # Experts are chosen among those of the best groups of neighbors. A group
  # counts what its two best experts do.
  expert_groups: int = 1
  top_groups: int = 1
  # A replayed expert below this share of the weakest live choice is replaced
  # by the live router's own; 0 obeys the record whatever it says.
  replay_threshold: float = 0.0
  rope_theta: float = 10_000.0
  rope_scaling: rope.Yarn | rope.Llama3 | None = None
  norm_eps: float = 1e-6
  dtype: str = 'float32'  # of activations; published weights are always bf16
  remat: bool = False  # computes a layer again for its gradient, keeps less
  mtp_layers: int = 0  # tokens after the next one that training predicts too
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
    _require(self.mtp_layers >= 0, self, 'mtp_layers', 'must be at least 0')
    self._check_layers()
    self._check_attention()
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

  def _check_layers(self) -> None:
    dense, groups = self.dense_layers, self.expert_groups
    size = self.experts // max(groups, 1)
    for ok, field, cure in (
        (
            0 <= dense < self.layers and (self.experts > 0 or not dense),
            'dense_layers',
            f'must be in [0, layers={self.layers}), and 0 without experts',
        ),
        (
            (self.dense_ffn > 0) == (dense > 0),
            'dense_ffn',
            f'must be above 0 only if dense_layers={dense} is',
        ),
        (
            groups == 1
            or (groups > 1 and size >= 2 and size * groups == self.experts),
            'expert_groups',
            f'must divide experts={self.experts} into groups of 2 or more',
        ),
        (
            groups == 1 or self.router == 'sigmoid',
            'expert_groups',
            "above 1 only with router='sigmoid'",
        ),
        (
            1 <= self.top_groups <= groups
            and self.top_k <= self.top_groups * size,
            'top_groups',
            f'must be in [1, expert_groups={groups}] and hold'
            f' top_k={self.top_k} experts',
        ),
    ):
      _require(ok, self, field, cure)

  def _check_attention(self) -> None:
    latent = self.kv_latent > 0
    rotated = 'rope_dim' if latent else 'head_dim'
    for field in ('rope_dim', 'value_dim'):
      _require(
          (getattr(self, field) > 0) == latent,
          self,
          field,
          f'must be above 0 only if kv_latent={self.kv_latent} is',
      )
    for ok, field, cure in (
        (getattr(self, rotated) % 2 == 0, rotated, 'must be even (RoPE)'),
        (latent or not self.q_latent, 'q_latent', 'needs kv_latent above 0'),
        (not latent or self.kv_heads == 1, 'kv_heads', 'is 1 with kv_latent'),
        (not (latent and self.qkv_bias), 'qkv_bias', 'not with kv_latent'),
        (not (latent and self.qk_norm), 'qk_norm', 'not with kv_latent'),
    ):
      _require(ok, self, field, cure)

  @property
  def moe_layers(self) -> int:
    """Layers whose routes are recorded: all but the first, dense ones."""
    return self.layers - self.dense_layers

  def dense(self) -> ModelConfig:
    """The first layers, as a dense model of their own."""
    return dataclasses.replace(
        self,
        layers=self.dense_layers,
        experts=0,
        top_k=0,
        moe_ffn=self.dense_ffn,
        shared_experts=1,
        shared_gate=False,
        dense_layers=0,
        dense_ffn=0,
        mtp_layers=0,
        expert_groups=1,
        top_groups=1,
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
  rl_optimizer: Any
  phases: tuple[PhaseConfig, ...]
  seed: int = 0
  # Folder of a published model to start from: its sizes take the place of
  # `model`, its tokenizer that of one that is fitted.
  base: str | None = None
  model: ModelConfig = ModelConfig()
  mesh: MeshConfig = MeshConfig()
  corpus: CorpusConfig = CorpusConfig()
  shards: tuple[ShardsConfig, ...] = ()
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
    names = [phase.name for phase in self.phases]
    if len(set(names)) < len(names):
      raise ValueError(f'Experiment.phases: names must differ, have {names}')
    sources = ['code', 'demos', *(s.name for s in self.shards)]
    if len(set(sources)) < len(sources):
      raise ValueError(f'Experiment.shards: names must differ, have {sources}')
    for phase in self.phases:
      if unknown := dict(phase.mix).keys() - set(sources):
        raise ValueError(
            f'phases.{phase.name}.mix: no source {min(unknown)!r}; have'
            f' {sources}'
        )
      if phase.mtp.weight and not self.model.mtp_layers:
        raise ValueError(
            f'phases.{phase.name}.mtp.weight={phase.mtp.weight}: needs'
            ' model.mtp_layers above 0'
        )
      if phase.balancing.bias_speed and self.model.router != 'sigmoid':
        raise ValueError(
            f'phases.{phase.name}.balancing.bias_speed='
            f"{phase.balancing.bias_speed}: needs model.router='sigmoid', whose"
            ' choice has a bias'
        )
