"""The lr_scheduler bucket."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)


def collect_schedulers(schedulers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return each scheduler's state dict, in order."""
    return [scheduler.state_dict() for scheduler in schedulers]


def apply_schedulers(schedulers: Sequence[Any], saved: Sequence[dict[str, Any]]) -> None:
    """Restore each scheduler and write its learning rates back into its optimizer's groups.

    A scheduler's constructor steps once and overwrites the groups' lr, and its ``load_state_dict`` does not write it back;
    whoever built the scheduler after loading the optimizer would train its first step with the initial lr.
    Must run after the optimizers were restored.
    """
    if len(schedulers) != len(saved):
        logger.warning(
            "the checkpoint holds %s lr schedulers and this run has %s: pairing the first %s, the others keep their state",
            len(saved),
            len(schedulers),
            min(len(saved), len(schedulers)),
        )
    for scheduler, state in zip(schedulers, saved, strict=False):
        scheduler.load_state_dict(state)
        last = getattr(scheduler, "_last_lr", None)
        optimizer = getattr(scheduler, "optimizer", None)
        if last is None or optimizer is None:
            continue
        for group, lr in zip(optimizer.param_groups, last, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(lr))
            else:
                group["lr"] = float(lr)
