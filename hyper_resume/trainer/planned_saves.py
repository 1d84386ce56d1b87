"""Which steps a run will save, as far as its configuration tells at the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_resume.config.schema import CheckpointingConfig
from hyper_resume.trainer.resume_point import steps_per_epoch
from hyper_resume.trainer.state import TrainerState


def planned_saves(trainer: Any, config: CheckpointingConfig, state: TrainerState) -> Callable[[int], bool]:
    """Return a function that says whether a step will be saved by a run that begins at ``state.global_step``.

    Planned are the steps that ``save_steps`` divides, the ends of epochs that ``save_epochs`` divides, and the last step. A
    preemption, and an epoch of another length than the loader states, save other steps.
    """
    first, last = state.global_step, int(trainer.train_steps)
    every = [config.save_steps] if config.save_steps > 0 else []
    if config.save_epochs > 0:
        every.append(config.save_epochs * steps_per_epoch(trainer))
    return lambda step: first < step <= last and (step == last or any(step % steps == 0 for steps in every))
