"""The lr_scheduler bucket: each scheduler's own state, and the group options that it moves.

The options are the groups' own at the save. A scheduler's ``_last_lr`` is no substitute: with two schedulers on one
optimizer (a warm-up each step, a plateau each epoch) or a learning rate changed by hand it is stale.

A scheduler keeps its lists by the groups' places. Groups that were saved in another order are found by their parameters'
names, and the lists are brought into this run's order.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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


def check_schedulers(schedulers: Sequence[Any], saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why the checkpoint has another number of schedulers than this run; nothing is changed.

    Raises:
        CheckpointMismatchError: an optimizer has another number of parameter groups than the one that was saved.
    """
    for scheduler, state in zip(schedulers, saved, strict=False):
        _check_groups(scheduler, state)
    return _other_count(schedulers, saved)


def check_scheduler_fields(schedulers: Sequence[Any], saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which fields of a scheduler the saved state does not have, as when another kind of scheduler wrote it.

    Fields on the other side are no complaint: a scheduler may get some of them only as it steps.
    """
    pairs = list(zip(schedulers, saved, strict=False))
    lacking = [sorted(set(scheduler.state_dict()) - set(state)) for scheduler, state in pairs]
    return [
        f"the saved state of lr scheduler {index} lacks {', '.join(names)}, which {type(pairs[index][0]).__name__} has"
        for index, names in enumerate(lacking)
        if names
    ]


def apply_schedulers(
    schedulers: Sequence[Any],
    saved: Sequence[Mapping[str, Any]],
    names: Mapping[int, str] | None = None,
    *,
    undo: ExitStack | None = None,
) -> None:
    """Restore each scheduler and write its learning rates back into its optimizer's groups.

    A scheduler's constructor steps once and overwrites the groups' lr (and, where it cycles momentum, that too), and its
    ``load_state_dict`` does not write them back; whoever built the scheduler after loading the optimizer would train its
    first step with the initial lr. Must run after the optimizers were restored.

    ``undo`` gets what brings back the schedulers' own state; the groups are the optimizers'.

    Raises:
        CheckpointMismatchError: the optimizer has another number of parameter groups than the one that was saved, or the
            scheduler can't take the state.
    """
    for reason in _other_count(schedulers, saved):
        logger.warning("%s", reason)
    pairs = list(zip(schedulers, expected_scheduler_states(schedulers, saved, names), strict=False))
    for scheduler, state in pairs:
        if undo is not None:
            undo.callback(scheduler.load_state_dict, copy.deepcopy(scheduler.state_dict()))
        _load_one(scheduler, {key: value for key, value in state.items() if key != _GROUP_OPTIONS})
    # After all of them: two schedulers may share an optimizer, and a load_state_dict may write to its groups.
    for scheduler, state in pairs:
        _apply_options(scheduler, state)


def expected_scheduler_states(
    schedulers: Sequence[Any], saved: Sequence[Mapping[str, Any]], names: Mapping[int, str] | None = None
) -> list[dict[str, Any]]:
    """Return the saved states of the schedulers that this run has too, with the groups in this run's order."""
    return [
        _in_this_order(state, _saved_places(scheduler, state, names or {}))
        for scheduler, state in zip(schedulers, saved, strict=False)
    ]


def _other_count(schedulers: Sequence[Any], saved: Sequence[Any]) -> list[str]:
    if len(schedulers) == len(saved):
        return []
    return [
        f"the checkpoint holds {len(saved)} lr schedulers and this run has {len(schedulers)}: "
        f"pairing the first {min(len(saved), len(schedulers))}, the others keep their state"
    ]


def _load_one(scheduler: Any, state: dict[str, Any]) -> None:
    try:
        scheduler.load_state_dict(state)
    except Exception as error:
        raise CheckpointMismatchError(
            describe(
                f"{type(scheduler).__name__} can't take the saved state",
                expected=f"fields {', '.join(sorted(scheduler.state_dict()))}",
                found=f"{', '.join(sorted(state))} ({type(error).__name__}: {error})",
                do="resume with the lr scheduler that was saved",
            )
        ) from error


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
    _check_groups(scheduler, state)
    for group, options in zip(_groups(scheduler), _options_of(scheduler, state), strict=True):
        for key, value in options.items():
            if key == _NAMES:
                continue
            if isinstance(group.get(key), torch.Tensor):
                # A compiled or captured step holds on to this very tensor.
                group[key].fill_(value)
            else:
                group[key] = value


def _check_groups(scheduler: Any, state: Mapping[str, Any]) -> None:
    groups, saved = _groups(scheduler), _options_of(scheduler, state)
    if len(saved) != len(groups):
        raise CheckpointMismatchError(
            describe(
                f"the state of {type(scheduler).__name__} does not fit its optimizer",
                expected=f"{len(groups)} parameter groups (the running job)",
                found=f"{len(saved)} (the checkpoint)",
                do="resume with the parameter groups that were saved",
            )
        )


def _options_of(scheduler: Any, state: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What each group had when the state was saved; state of other origin tells at most the learning rates."""
    saved: Sequence[Mapping[str, Any]] | None = state.get(_GROUP_OPTIONS)
    if saved is not None:
        return saved
    return [{"lr": lr} for lr in state.get("_last_lr", [])] or [{} for _ in _groups(scheduler)]


def _groups(scheduler: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    return groups


def _cycles_momentum(scheduler: Any) -> bool:
    parts = getattr(scheduler, "_schedulers", ())
    return bool(getattr(scheduler, "cycle_momentum", False)) or any(_cycles_momentum(part) for part in parts)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
