"""From ``global_step`` to the place in the data where a resumed training starts: (start_epoch, start_step)."""

from __future__ import annotations

import logging
from typing import Any

from hyper_resume.data.passes import length_of

logger = logging.getLogger(__name__)


def accumulation_steps(trainer: Any) -> int:
    """Return the micro-batches per optimizer step; 1 for a trainer without that setting."""
    training = getattr(trainer.config, "training", None)
    return int(getattr(training, "gradient_accumulation_steps", 1))


def steps_per_epoch(trainer: Any) -> int:
    """Return the OPTIMIZER steps per epoch; the last one of an epoch may have fewer micro-batches.

    A loader without a length gives ``trainer.train_steps``: one endless epoch.
    """
    try:
        batches = len(trainer.train_dataloader)
    except TypeError:
        return max(1, int(trainer.train_steps))
    return max(1, -(-batches // accumulation_steps(trainer)))


def resume_point(trainer: Any, *, positioned: bool) -> tuple[int, int]:
    """Return (start_epoch, start_step), start_step counting optimizer steps into that epoch.

    They are derived from ``global_step`` (specification 3.3) and compared with the loader's own position (``epoch``,
    ``batches_consumed``) where it has one. The two differ when the position was dropped because the data changed, or when an
    epoch has another length now; the loader's position then counts, because it decides what is read.
    """
    loader = trainer.train_dataloader
    if not positioned or not knows_position(loader):
        return _derived(trainer, trainer.state.global_step)
    reason = check_position(trainer, trainer.state.global_step, loader.epoch, loader.batches_consumed)
    if reason is not None:
        logger.warning("%s", reason)
    if getattr(loader, "finished", False):
        # Known to a loader that has no length, too.
        return (loader.epoch + 1, 0)
    return _actual(trainer, loader.epoch, loader.batches_consumed)


def knows_position(loader: Any) -> bool:
    """True for a loader that reports its own position."""
    return hasattr(loader, "batches_consumed") and hasattr(loader, "epoch")


def check_position(trainer: Any, global_step: int, epoch: int, batches_consumed: int) -> str | None:
    """Return why training would not continue at the place that ``global_step`` gives; None when it would.

    A loader without a length has only its own position: without the steps per epoch none follows from ``global_step``.
    """
    if length_of(trainer.train_dataloader) is None:
        return None
    derived, actual = _derived(trainer, global_step), _actual(trainer, epoch, batches_consumed)
    if actual == derived:
        return None
    return (
        f"global_step {global_step} at {steps_per_epoch(trainer)} steps per epoch is epoch {derived[0]}, "
        f"step {derived[1]}, but the data position is epoch {actual[0]}, step {actual[1]}; the data position is used"
    )


def _derived(trainer: Any, global_step: int) -> tuple[int, int]:
    per_epoch = steps_per_epoch(trainer)
    return (global_step // per_epoch, global_step % per_epoch)


def _actual(trainer: Any, epoch: int, batches_consumed: int) -> tuple[int, int]:
    done = -(-batches_consumed // accumulation_steps(trainer))
    return (epoch + 1, 0) if done >= steps_per_epoch(trainer) else (epoch, done)
