"""One YAML for all services. A wrong combination is refused at load, with a sentence."""

from services.common.config.algorithm import AlgorithmConfig
from services.common.config.data import DataConfig, PreferenceSourceConfig, SourceConfig
from services.common.config.load import load_config, parse_config
from services.common.config.overrides import all_overrides, overrides_by_algorithm, overrides_environment
from services.common.config.root import Config, PrepareConfig
from services.common.config.run import (
    BlobConfig,
    EvaluationConfig,
    ModelConfig,
    RedisConfig,
    RunConfig,
    SamplingConfig,
    ServerConfig,
)
from services.common.config.services import (
    CollapseConfig,
    OptimizerConfig,
    RecordingConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    ScorerConfig,
    TrainerConfig,
)
from services.common.config.stability import (
    Consistency,
    ImportanceSampling,
    SequenceMasking,
    StabilityConfig,
    UnbiasedKl,
)
from services.common.config.weights import WeightsConfig
from services.common.errors import ConfigError

__all__ = [
    "AlgorithmConfig",
    "BlobConfig",
    "CollapseConfig",
    "Config",
    "ConfigError",
    "Consistency",
    "DataConfig",
    "EvaluationConfig",
    "ImportanceSampling",
    "ModelConfig",
    "OptimizerConfig",
    "PreferenceSourceConfig",
    "PrepareConfig",
    "RecordingConfig",
    "RedisConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "ScorerConfig",
    "SequenceMasking",
    "ServerConfig",
    "SourceConfig",
    "StabilityConfig",
    "TrainerConfig",
    "UnbiasedKl",
    "WeightsConfig",
    "all_overrides",
    "load_config",
    "overrides_by_algorithm",
    "overrides_environment",
    "parse_config",
]
