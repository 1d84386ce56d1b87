"""Storage: how a payload becomes a durable directory, and comes back. Knows no trainer."""

import warnings

from hyper_resume.checkpoint.base import (
    CHECKPOINTER_REGISTRY,
    CheckpointerBase,
    build_checkpointer,
)
from hyper_resume.checkpoint.dcp import DistributedCheckpointer
from hyper_resume.config import CheckpointingConfig

__all__ = [
    "CHECKPOINTER_REGISTRY",
    "CheckpointerBase",
    "CheckpointingConfig",
    "DistributedCheckpointer",
    "build_checkpointer",
]

# DCP says so at every call of a single process; here that is meant.
warnings.filterwarnings(
    "ignore", message=r"torch\.distributed is disabled, unavailable or uninitialized, assuming the intent"
)
