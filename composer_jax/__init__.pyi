# An experiment: everything a run needs, and its parts.
from .config import Experiment as Experiment
from .config import MeshConfig as MeshConfig
from .config import ModelConfig as ModelConfig
from .config_text import override as override
from .phases import Balancing as Balancing
from .phases import CorpusConfig as CorpusConfig
from .phases import Mtp as Mtp
from .phases import PhaseConfig as PhaseConfig
from .phases import ShardsConfig as ShardsConfig
from .reinforcement import EvalConfig as EvalConfig
from .reinforcement import HarnessConfig as HarnessConfig
from .reinforcement import RlConfig as RlConfig
from .reinforcement import RolloutConfig as RolloutConfig
from .reinforcement import WeightsConfig as WeightsConfig
from .rope import Llama3 as Llama3
from .rope import Yarn as Yarn

# Losses: what they see, what they measure, those that are here.
from .learner.batch import Loss as Loss
from .learner.batch import Max as Max
from .learner.batch import Mean as Mean
from .learner.batch import TokenStats as TokenStats
from .learner.losses import Cispo as Cispo
from .learner.losses import Composer2 as Composer2
from .learner.losses import DppoTv as DppoTv
from .learner.losses import GrpoClip as GrpoClip
from .learner.losses import Gspo as Gspo
from .learner.losses import IcePop as IcePop
from .learner.losses import Ipo as Ipo
from .learner.losses import M2po as M2po
from .learner.losses import NextToken as NextToken
from .learner.losses import rollout_sums as rollout_sums

# Advantages and optimizers.
from .learner.advantages import Advantage as Advantage
from .learner.advantages import GroupMean as GroupMean
from .learner.advantages import GroupStandard as GroupStandard
from .learner.optimizer import AdamW as AdamW
from .learner.optimizer import Constant as Constant
from .learner.optimizer import Cosine as Cosine
from .learner.optimizer import Muon as Muon
from .learner.optimizer import Wsd as Wsd

# Environments: tasks, where they come from, what a policy may do.
from .agents.tools import Ask as Ask
from .agents.tools import Done as Done
from .agents.tools import Edit as Edit
from .agents.tools import Read as Read
from .agents.tools import Replace as Replace
from .agents.tools import Run as Run
from .agents.tools import Search as Search
from .environments.harbor import HarborDirectory as HarborDirectory
from .environments.human_eval import HumanEval as HumanEval
from .environments.micro_repair import MicroRepair as MicroRepair
from .environments.summary_repair import SummaryRepair as SummaryRepair
from .task import Case as Case
from .task import Limits as Limits
from .task import Suite as Suite
from .task import Task as Task
from .task import TaskSource as TaskSource
from .task import fingerprint as fingerprint

# Rewards, and the episodes and trajectories that they judge.
from .agents.harness import Episode as Episode
from .rewards.hierarchy import INFLUENCE as INFLUENCE
from .rewards.judge import Judge as Judge
from .rewards.length import LengthPenalty as LengthPenalty
from .rewards.rubric import Rubric as Rubric
from .rewards.verify import RewardResult as RewardResult
from .rewards.verify import Verify as Verify
from .trace import RoutingTrace as RoutingTrace
from .trace import StopReason as StopReason
from .trace import TokenTrace as TokenTrace
from .trace import Trajectory as Trajectory
from .trace import WeightVersion as WeightVersion
