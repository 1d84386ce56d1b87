"""Configuration: one typed tree, read from YAML, any field overridden as ``--dotted.path=value``."""

from hyper_resume.config.load import load_config
from hyper_resume.config.schema import (
    RESERVED_CHECKPOINT_FIELDS,
    AcceleratorConfig,
    CheckpointingConfig,
    DataConfig,
    LoraConfig,
    LRSchedulerConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
    TrajectoryConfig,
)

__all__ = [
    "RESERVED_CHECKPOINT_FIELDS",
    "AcceleratorConfig",
    "CheckpointingConfig",
    "DataConfig",
    "LRSchedulerConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "TrainingConfig",
    "TrajectoryConfig",
    "load_config",
]
