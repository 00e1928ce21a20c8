"""Frozen configuration: what a run is made of, every field with its range.

An `Experiment` is plain data plus a few OBJECTS (loss, advantage, tasks,
rewards, optimizers): frozen dataclasses whose fields are their own
hyper-parameters, so `--set=loss.width=0.2` reaches into them too.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from composer_jax import checks
from composer_jax import phases
from composer_jax import reinforcement
from composer_jax import rope
from composer_jax.checks import Range

CorpusConfig = phases.CorpusConfig
ShardsConfig = phases.ShardsConfig
Balancing = phases.Balancing
Mtp = phases.Mtp
PhaseConfig = phases.PhaseConfig
EvalConfig = reinforcement.EvalConfig
HarnessConfig = reinforcement.HarnessConfig
RlConfig = reinforcement.RlConfig
RolloutConfig = reinforcement.RolloutConfig
WeightsConfig = reinforcement.WeightsConfig

_Width = Annotated[int, Range(1, 2**20)]
_Part = Annotated[int, Range(0, 2**20)]  # 0: the model does without


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

  vocab: Annotated[int, Range(1, 2**24)] = 512
  layers: Annotated[int, Range(1, 4096)] = 3
  embed: _Width = 96
  q_heads: _Width = 4
  kv_heads: _Width = 2
  head_dim: _Width = 32
  experts: Annotated[int, Range(0, 65_534)] = 8
  top_k: Annotated[int, Range(0, 256)] = 2
  moe_ffn: _Width = 128  # width of one expert
  shared_experts: Annotated[int, Range(0, 256)] = 0
  shared_gate: bool = False  # scales what the shared experts add, per token
  # Layers at the start with one FFN, of this width, in place of the experts.
  dense_layers: Annotated[int, Range(0, 4096)] = 0
  dense_ffn: _Part = 0
  kv_latent: _Part = 0  # width of what all heads share; 0: grouped-query
  q_latent: _Part = 0  # width that queries are made from; 0: the full one
  rope_dim: _Part = 0
  value_dim: _Part = 0  # of a head, with kv_latent
  qkv_bias: bool = False
  qk_norm: bool = False  # of every query and key head
  tied: bool = False  # the head is the transposed embedding
  # A sigmoid router chooses with a bias that the gates do not have.
  router: Literal['softmax', 'sigmoid'] = 'softmax'
  renormalize: bool = True  # gates of the chosen sum to routed_scale
  # Factor of the routed experts' sum.
  routed_scale: Annotated[float, Range(0, 1e6, above=True)] = 1.0
  # Experts are chosen among those of the best groups of neighbors. A group
  # counts what its two best experts do.
  expert_groups: Annotated[int, Range(1, 65_534)] = 1
  top_groups: Annotated[int, Range(1, 65_534)] = 1
  # A replayed expert below this share of the weakest live choice is replaced
  # by the live router's own; 0 obeys the record whatever it says.
  replay_threshold: checks.Share = 0.0
  rope_theta: Annotated[float, Range(1, 1e12)] = 10_000.0
  rope_scaling: rope.Yarn | rope.Llama3 | None = None
  norm_eps: Annotated[float, Range(0, 1, above=True)] = 1e-6
  # Of activations; published weights are always bf16.
  dtype: Literal['float32', 'bfloat16'] = 'float32'
  remat: bool = False  # computes a layer again for its gradient, keeps less
  # Tokens after the next one that training predicts, too.
  mtp_layers: Annotated[int, Range(0, 64)] = 0
  # None: triton on a GPU, reference elsewhere.
  kernels: Literal['triton', 'reference', 'interpret'] | None = None

  def __post_init__(self):
    checks.fields(self)
    checks.require(
        self,
        (
            self.q_heads % self.kv_heads == 0,
            'q_heads',
            f'must be a multiple of kv_heads={self.kv_heads}',
        ),
        (
            min(1, self.experts) <= self.top_k <= self.experts,
            'top_k',
            f'must be in [{min(1, self.experts)}, experts={self.experts}]',
        ),
        (
            self.shared_experts or self.experts,
            'shared_experts',
            'must be at least 1 in a dense model (experts=0)',
        ),
        (
            self.shared_experts or not self.shared_gate,
            'shared_gate',
            'needs shared_experts of at least 1',
        ),
    )
    self._check_layers()
    self._check_attention()

  def _check_layers(self) -> None:
    dense, groups = self.dense_layers, self.expert_groups
    size = self.experts // groups
    checks.require(
        self,
        (
            dense < self.layers and (self.experts > 0 or not dense),
            'dense_layers',
            f'must be in [0, layers={self.layers}), and 0 without experts',
        ),
        (
            (self.dense_ffn > 0) == (dense > 0),
            'dense_ffn',
            f'must be above 0 only if dense_layers={dense} is',
        ),
        (
            groups == 1 or (size >= 2 and size * groups == self.experts),
            'expert_groups',
            f'must divide experts={self.experts} into groups of 2 or more',
        ),
        (
            groups == 1 or self.router == 'sigmoid',
            'expert_groups',
            "above 1 only with router='sigmoid'",
        ),
        (
            self.top_groups <= groups and self.top_k <= self.top_groups * size,
            'top_groups',
            f'must be in [1, expert_groups={groups}] and hold'
            f' top_k={self.top_k} experts',
        ),
    )

  def _check_attention(self) -> None:
    latent = self.kv_latent > 0
    rotated = 'rope_dim' if latent else 'head_dim'
    both = f'must be above 0 only if kv_latent={self.kv_latent} is'
    checks.require(
        self,
        ((self.rope_dim > 0) == latent, 'rope_dim', both),
        ((self.value_dim > 0) == latent, 'value_dim', both),
        (getattr(self, rotated) % 2 == 0, rotated, 'must be even (RoPE)'),
        (latent or not self.q_latent, 'q_latent', 'needs kv_latent above 0'),
        (not latent or self.kv_heads == 1, 'kv_heads', 'is 1 with kv_latent'),
        (not (latent and self.qkv_bias), 'qkv_bias', 'not with kv_latent'),
        (not (latent and self.qk_norm), 'qk_norm', 'not with kv_latent'),
    )

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


_Devices = Annotated[int, Range(1, 8192)]


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How many devices the trainer's work is split over, along four axes.

  The rows of a batch are split over data x fsdp x expert.
  """

  data: _Devices = 2  # copies of the weights
  fsdp: _Devices = 1  # splits every tensor; a layer is gathered while it runs
  expert: _Devices = 1  # splits the experts
  tensor: _Devices = 1  # splits heads and the FFNs' columns

  def __post_init__(self):
    checks.fields(self)
    if self.devices > 8192:
      raise ValueError(f'{self.text()}: must be at most 8,192 devices')

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
class Experiment:
  """Everything a run needs; built by `experiment()` of a config module."""

  name: str
  loss: Any
  advantage: Any
  tasks: Any
  rewards: tuple[Any, ...]
  rl_optimizer: Any
  phases: tuple[PhaseConfig, ...]
  seed: checks.Seed = 0
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
    checks.fields(self)
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
