"""What the checkpointer needs of a trainer, and of a state that a hook is handed."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hyper_resume.config.schema import CheckpointingConfig
from hyper_resume.errors import ConfigError, describe

logger = logging.getLogger(__name__)

_OF_A_STATE = ("global_step", "epoch")
_OF_A_TRAINER = (
    "config.checkpoint",
    "model",
    "optimizer",
    "lr_scheduler",
    "train_dataloader",
    *(f"state.{name}" for name in _OF_A_STATE),
    "train_steps",
    "start_epoch",
    "start_step",
)


def require_attributes(trainer: Any) -> None:
    """Refuse a trainer that lacks what the checkpointer uses.

    Raises:
        ConfigError: names everything that is missing.
    """
    _refuse_absent(
        trainer,
        _OF_A_TRAINER,
        "the trainer lacks attributes that saving and restoring use",
        do="set them before the callback is made (state is a TrainerState; lr_scheduler may be None)",
    )


def as_config(found: Any) -> CheckpointingConfig:
    """Return the configuration; of another object, the fields that it has, and the defaults for the others.

    Raises:
        ConfigError: a field has a wrong value, or ``found`` has none of the fields.
    """
    if isinstance(found, CheckpointingConfig):
        return found
    names = [field.name for field in dataclasses.fields(CheckpointingConfig)]
    values = {name: getattr(found, name) for name in names if hasattr(found, name)}
    if not values:
        raise ConfigError(
            describe(
                "the trainer's checkpoint configuration has none of the fields",
                where="trainer.config.checkpoint",
                expected=f"a CheckpointingConfig, or an object with {', '.join(names)}",
                found=type(found).__name__,
                do="make a CheckpointingConfig",
            )
        )
    return CheckpointingConfig(**values)


def require_counters(state: Any) -> None:
    """Refuse a state, handed to a hook, that lacks the counters of a save.

    Raises:
        ConfigError: names everything that is missing.
    """
    _refuse_absent(
        state,
        _OF_A_STATE,
        "a hook was handed a state that lacks counters",
        do="hand in a TrainerState, or nothing: then trainer.state counts",
    )


def _refuse_absent(owner: Any, names: Sequence[str], what: str, *, do: str) -> None:
    absent = [name for name in names if not _has(owner, name)]
    if absent:
        raise ConfigError(
            describe(
                what,
                where=f"CheckpointerCallback({type(owner).__name__})",
                expected=", ".join(names),
                found=f"no {', '.join(absent)}",
                do=do,
            )
        )


def _has(owner: Any, dotted: str) -> bool:
    for name in dotted.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def copy_counters(source: Any, target: Any) -> None:
    """Copy the restored counters to the state of a loop that keeps one of its own."""
    if target is not source:
        for name in (*_OF_A_STATE, "epoch_ended"):
            if hasattr(source, name):
                setattr(target, name, getattr(source, name))


def metrics_of(state: Any, name: str) -> dict[str, float]:
    """Return the metric by which retention ranks checkpoints.

    Raises:
        ConfigError: the trainer has no such number.
    """
    metrics = getattr(state, "metrics", None)
    value = getattr(state, name, metrics.get(name) if isinstance(metrics, Mapping) else None)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(
            describe(
                f"there is no metric {name!r} by which to keep the best checkpoints",
                where="checkpoint.keep_best_metric",
                expected="a number in trainer.state, or in trainer.state.metrics",
                found="nothing" if value is None else type(value).__name__,
                do="set it before the save (your own callbacks run before the checkpointer), or set another metric",
            )
        )
    if not math.isfinite(value):
        logger.warning("%s is %s at this save: it can't be ranked, so keep_best does not delete it", name, value)
    return {name: float(value)}
