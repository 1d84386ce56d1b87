"""Configuration: one typed tree from YAML and ``--dotted.path=value``, and where each value comes from."""

from hyper_resume.config import construction as construction  # registers the check of new blocks
from hyper_resume.config.load import ResolvedConfig, as_plain, load_config, reserved_fields_set, resolve_config
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
    "ResolvedConfig",
    "RunConfig",
    "TrainingConfig",
    "TrajectoryConfig",
    "as_plain",
    "load_config",
    "reserved_fields_set",
    "resolve_config",
]
