"""The lr_scheduler bucket: each scheduler's own state, and the group options that it moves.

The options are the groups' own at the save. A scheduler's ``_last_lr`` is no substitute: with two schedulers on one
optimizer (a warm-up each step, a plateau each epoch) or a learning rate changed by hand it is stale.

A scheduler keeps its lists by the groups' places. Groups that were saved in another order are found by their parameters'
names, and the lists are brought into this run's order.
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
# In each of the group options: the names of the group's parameters.
_NAMES = "params"
# Lists of torch's schedulers with one item a parameter group.
_PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums", _GROUP_OPTIONS}
)
_PARTS = "_schedulers"
_MOVED_BY_ALL = ("lr",)
_MOVED_BY_CYCLES = ("lr", "momentum", "betas")


def collect_schedulers(schedulers: Sequence[Any], names: Mapping[int, str] | None = None) -> list[dict[str, Any]]:
    """Return each scheduler's state dict, in order, with what it has set in its optimizer's groups.

    ``names``: id(parameter) -> name; without it groups are told apart by their places only.
    """
    names = names or {}
    return [{**scheduler.state_dict(), _GROUP_OPTIONS: _collect_options(scheduler, names)} for scheduler in schedulers]


def apply_schedulers(
    schedulers: Sequence[Any], saved: Sequence[Mapping[str, Any]], names: Mapping[int, str] | None = None
) -> None:
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
    pairs = [
        (scheduler, _in_this_order(state, _saved_places(scheduler, state, names or {})))
        for scheduler, state in zip(schedulers, saved, strict=False)
    ]
    for scheduler, state in pairs:
        scheduler.load_state_dict({key: value for key, value in state.items() if key != _GROUP_OPTIONS})
    # After all of them: two schedulers may share an optimizer, and a load_state_dict may write to its groups.
    for scheduler, state in pairs:
        _apply_options(scheduler, state)


def _collect_options(scheduler: Any, names: Mapping[int, str]) -> list[dict[str, Any]]:
    moved = _MOVED_BY_CYCLES if _cycles_momentum(scheduler) else _MOVED_BY_ALL
    return [
        {**{key: _plain(group[key]) for key in moved if key in group}, _NAMES: _names_of(group, names)}
        for group in _groups(scheduler)
    ]


def _names_of(group: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    return [names[id(parameter)] for parameter in group.get("params", ()) if id(parameter) in names]


def _saved_places(scheduler: Any, state: Mapping[str, Any], names: Mapping[int, str]) -> list[int]:
    """For each group of this run the place at which it was saved; their own places where names don't tell.

    A group without named parameters takes a place that is left over. Groups that were cut anew have no counterparts, and
    keep their places.
    """
    saved = [set(options.get(_NAMES, ())) for options in state.get(_GROUP_OPTIONS) or []]
    own = [set(_names_of(group, names)) for group in _groups(scheduler)]
    places = list(range(len(own)))
    if len(own) != len(saved):
        return places
    found = {place: max(places, key=lambda other: len(mine & saved[other])) for place, mine in enumerate(own)}
    found = {place: other for place, other in found.items() if own[place] & saved[other]}
    if len(set(found.values())) < len(found):
        return places
    left = [other for other in places if other not in found.values()]
    # A group that is told by nothing keeps its place if that is free.
    for place in [place for place in places if place not in found and place in left]:
        found[place] = place
        left.remove(place)
    return [found[place] if place in found else left.pop(0) for place in places]


def _in_this_order(state: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """Return ``state`` with every list that has an item a group in the order of ``places``, in parts of it too."""
    result = dict(state)
    for key, value in state.items():
        if key in _PER_GROUP and isinstance(value, (list, tuple)) and len(value) == len(places):
            result[key] = [value[place] for place in places]
        elif key == _PARTS:
            result[key] = [_in_this_order(part, places) for part in value]
    return result


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
            if key == _NAMES:
                continue
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
