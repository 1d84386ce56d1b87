"""Storage: writes a state to a step directory and reads it back, without the trainer.

``base`` the interface of a storage backend · ``dcp`` the backend on ``torch.distributed.checkpoint`` · ``commands`` what the
command line does with a checkpoint · ``saving`` the steps of a save · ``loading`` the steps of a load · ``history`` which save
LATEST means and which saves are deleted · ``format`` the files of a step directory · ``parsing`` readers for untrusted bytes ·
``tensors`` copying and flattening of states · ``disk`` file operations and the writer lock
"""

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

# DCP warns of this at every call in a single process. Here a single process is a supported case.
warnings.filterwarnings(
    "ignore", message=r"torch\.distributed is disabled, unavailable or uninitialized, assuming the intent"
)
