"""The typed schema: what a configuration may say, with the defaults of what it leaves out.

`LayerConfig` is what a host job hands to midstream; `JobConfig` is the whole configuration of the
one-machine job, the layer's included. Unknown keys are refused, values are not coerced.
"""

from midstream.conf.schema.credit import CreditConfig
from midstream.conf.schema.curriculum import CurriculumConfig
from midstream.conf.schema.environment import EnvironmentConfig, LimitsConfig, PoolConfig, SnapshotConfig
from midstream.conf.schema.job import JobConfig
from midstream.conf.schema.layer import EngineConfig, LayerConfig, TurnConfig
from midstream.conf.schema.policies import BoundsConfig, JournalConfig, PoliciesConfig, RewindConfig
from midstream.conf.schema.sections import (
    ModelConfig,
    RolloutConfig,
    ServerConfig,
    TaskConfig,
    TaskSource,
    TrainerConfig,
    WarmStartConfig,
)

__all__ = [
    "BoundsConfig",
    "CreditConfig",
    "CurriculumConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "JobConfig",
    "JournalConfig",
    "LayerConfig",
    "LimitsConfig",
    "ModelConfig",
    "PoliciesConfig",
    "PoolConfig",
    "RewindConfig",
    "RolloutConfig",
    "ServerConfig",
    "SnapshotConfig",
    "TaskConfig",
    "TaskSource",
    "TrainerConfig",
    "TurnConfig",
    "WarmStartConfig",
]
