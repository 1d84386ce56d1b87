"""From one counter to a place in the data: (global_step) -> (start_epoch, start_step)."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def accumulation_steps(trainer: Any) -> int:
    """Return how many micro-batches make an optimizer step (1 for a trainer that does not say)."""
    training = getattr(trainer.config, "training", None)
    return int(getattr(training, "gradient_accumulation_steps", 1))


def steps_per_epoch(trainer: Any) -> int:
    """Return OPTIMIZER steps in an epoch; the last one of an epoch may have fewer micro-batches.

    A loader without a length gives ``trainer.train_steps``: one endless epoch.
    """
    try:
        batches = len(trainer.train_dataloader)
    except TypeError:
        return max(1, int(trainer.train_steps))
    return max(1, -(-batches // accumulation_steps(trainer)))


def resume_point(trainer: Any, *, positioned: bool) -> tuple[int, int]:
    """Return (start_epoch, start_step), start_step counting optimizer steps into that epoch.

    They are derived from ``global_step`` (specification 3.3), and held against the data position where the loader knows its
    own (``epoch``, ``batches_consumed``). The two differ when the position was dropped because the data changed, or when an
    epoch has another length now; the loader is then right, because it is what will be read.
    """
    global_step = trainer.state.global_step
    per_epoch = steps_per_epoch(trainer)
    derived = (global_step // per_epoch, global_step % per_epoch)
    loader = trainer.train_dataloader
    if not positioned or not hasattr(loader, "batches_consumed") or not hasattr(loader, "epoch"):
        return derived
    done = -(-loader.batches_consumed // accumulation_steps(trainer))
    actual = (loader.epoch + 1, 0) if done >= per_epoch else (loader.epoch, done)
    if actual != derived:
        logger.warning(
            "global_step %s at %s steps an epoch would be epoch %s, step %s, but the data position is epoch %s, step %s; "
            "the data position is followed",
            global_step,
            per_epoch,
            *derived,
            *actual,
        )
    return actual
