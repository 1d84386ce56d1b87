"""hyper_resume: save and resume PyTorch training exactly.

Every public name is an attribute of this package. Each is imported when it is first used, so ``import hyper_resume`` itself
does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_resume.checkpoint.base import (
        CHECKPOINTER_REGISTRY,
        CheckpointerBase,
        LoadReport,
        SaveEvent,
        build_checkpointer,
    )
    from hyper_resume.checkpoint.dcp import DistributedCheckpointer
    from hyper_resume.config import (
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
        load_config,
    )
    from hyper_resume.data import DataLoader, ResumableLoader
    from hyper_resume.errors import (
        CheckpointLockedError,
        CheckpointMismatchError,
        CheckpointNotFoundError,
        CheckpointSaveError,
        ConfigError,
        HyperResumeError,
        InsufficientMemoryError,
        PreemptedError,
        ReplicaMismatchError,
        StateNotPlainError,
        TrainingIncompleteError,
        UnsupportedError,
    )
    from hyper_resume.optim import ChainedOptimizer
    from hyper_resume.state.certificate import Certificate
    from hyper_resume.trainer.base import BaseTrainer
    from hyper_resume.trainer.callbacks import Callback, CheckpointerCallback, PreemptibleCheckpointer, TrainerState
    from hyper_resume.trainer.text_trainer import TextTrainer

__version__ = "0.2.0"

__all__ = [
    "CHECKPOINTER_REGISTRY",
    "AcceleratorConfig",
    "BaseTrainer",
    "Callback",
    "Certificate",
    "ChainedOptimizer",
    "CheckpointLockedError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointSaveError",
    "CheckpointerBase",
    "CheckpointerCallback",
    "CheckpointingConfig",
    "ConfigError",
    "DataConfig",
    "DataLoader",
    "DistributedCheckpointer",
    "HyperResumeError",
    "InsufficientMemoryError",
    "LRSchedulerConfig",
    "LoadReport",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PreemptedError",
    "PreemptibleCheckpointer",
    "ReplicaMismatchError",
    "ResumableLoader",
    "RunConfig",
    "SaveEvent",
    "StateNotPlainError",
    "TextTrainer",
    "TrainerState",
    "TrainingConfig",
    "TrainingIncompleteError",
    "TrajectoryConfig",
    "UnsupportedError",
    "__version__",
    "build_checkpointer",
    "load_config",
]

# Searched in this order, so that a name is taken from the module that imports least.
_MODULES = (
    "hyper_resume.errors",
    "hyper_resume.config",
    "hyper_resume.checkpoint.base",
    "hyper_resume.checkpoint",
    "hyper_resume.data",
    "hyper_resume.optim",
    "hyper_resume.state.certificate",
    "hyper_resume.trainer.callbacks",
    "hyper_resume.trainer.base",
    "hyper_resume.trainer.text_trainer",
)


if not TYPE_CHECKING:
    # A type checker would take this for any attribute whatever.
    def __getattr__(name: str) -> Any:
        if name in __all__:
            for module in _MODULES:
                found = getattr(import_module(module), name, None)
                if found is not None:
                    globals()[name] = found
                    return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
