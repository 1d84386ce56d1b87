"""The lr_scheduler bucket: each scheduler's own state, and the group options that it moves.

The options are the groups' own at the save. A scheduler's ``_last_lr`` is no substitute: with two schedulers on one
optimizer (a warm-up each step, a plateau each epoch) or a learning rate changed by hand it is stale.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hyper_resume.errors import CheckpointMismatchError, describe

logger = logging.getLogger(__name__)

# Beside the scheduler's own entries; taken out before its load_state_dict.
_GROUP_OPTIONS = "group_options"
_MOVED_BY_ALL = ("lr",)
_MOVED_BY_CYCLES = ("lr", "momentum", "betas")


def collect_schedulers(schedulers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return each scheduler's state dict, in order, with what it has set in its optimizer's groups."""
    return [{**scheduler.state_dict(), _GROUP_OPTIONS: _collect_options(scheduler)} for scheduler in schedulers]


def apply_schedulers(schedulers: Sequence[Any], saved: Sequence[Mapping[str, Any]]) -> None:
    """Restore each scheduler and write its learning rates back into its optimizer's groups.

    A scheduler's constructor steps once and overwrites the groups' lr (and, where it cycles momentum, that too), and its
    ``load_state_dict`` does not write them back; whoever built the scheduler after loading the optimizer would train its
    first step with the initial lr. Must run after the optimizers were restored.

    Raises:
        CheckpointMismatchError: the optimizer has another number of parameter groups than the one that was saved.
    """
    if len(schedulers) != len(saved):
        logger.warning(
            "the checkpoint holds %s lr schedulers and this run has %s: pairing the first %s, the others keep their state",
            len(saved),
            len(schedulers),
            min(len(saved), len(schedulers)),
        )
    for scheduler, state in zip(schedulers, saved, strict=False):
        scheduler.load_state_dict({key: value for key, value in state.items() if key != _GROUP_OPTIONS})
    # After all of them: two schedulers may share an optimizer, and a load_state_dict may write to its groups.
    for scheduler, state in zip(schedulers, saved, strict=False):
        _apply_options(scheduler, state)


def _collect_options(scheduler: Any) -> list[dict[str, Any]]:
    moved = _MOVED_BY_CYCLES if _cycles_momentum(scheduler) else _MOVED_BY_ALL
    return [{key: _plain(group[key]) for key in moved if key in group} for group in _groups(scheduler)]


def _apply_options(scheduler: Any, state: Mapping[str, Any]) -> None:
    groups = _groups(scheduler)
    saved = state.get(_GROUP_OPTIONS)
    if saved is None:
        saved = [{"lr": lr} for lr in state.get("_last_lr", [])] or [{} for _ in groups]
    if len(saved) != len(groups):
        raise CheckpointMismatchError(
            describe(
                f"the state of {type(scheduler).__name__} does not fit its optimizer",
                expected=f"{len(groups)} parameter groups (the running job)",
                found=f"{len(saved)} (the checkpoint)",
                do="resume with the parameter groups that were saved",
            )
        )
    for group, options in zip(groups, saved, strict=True):
        for key, value in options.items():
            if isinstance(group.get(key), torch.Tensor):
                # A compiled or captured step holds on to this very tensor.
                group[key].fill_(value)
            else:
                group[key] = value


def _groups(scheduler: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    return groups


def _cycles_momentum(scheduler: Any) -> bool:
    parts = getattr(scheduler, "_schedulers", ())
    return bool(getattr(scheduler, "cycle_momentum", False)) or any(_cycles_momentum(part) for part in parts)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
