"""Callbacks of the training loop: checkpoints, preemption, progress, records."""

from hyper_resume.trainer.callbacks.base import Callback
from hyper_resume.trainer.callbacks.checkpointer import CheckpointerCallback
from hyper_resume.trainer.callbacks.preemption import PreemptibleCheckpointer, PreemptionCallback
from hyper_resume.trainer.callbacks.progress import ProgressCallback
from hyper_resume.trainer.callbacks.trajectory import TrajectoryCallback
from hyper_resume.trainer.state import TrainerState

__all__ = [
    "Callback",
    "CheckpointerCallback",
    "PreemptibleCheckpointer",
    "PreemptionCallback",
    "ProgressCallback",
    "TrainerState",
    "TrajectoryCallback",
]
