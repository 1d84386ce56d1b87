"""The lr_scheduler bucket: the state of each scheduler, and the options of the parameter groups that it changes.

The options are read from the groups at the save. A scheduler's ``_last_lr`` can't replace them: it is out of date if two
schedulers share an optimizer (a warm-up per step, a plateau per epoch), or if a learning rate was changed by hand.

A scheduler has lists with one item per group. If the groups were saved in another order, they are matched by their parameters'
names, and the lists are reordered.
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

# An extra key in the scheduler's state dict; removed before its load_state_dict.
_GROUP_OPTIONS = "group_options"
# A key of each group's options: the names of the group's parameters.
_NAMES = "params"
# Attributes of torch's schedulers that are lists with one item per parameter group.
_PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums", _GROUP_OPTIONS}
)
_INNER_SCHEDULERS = "_schedulers"
_SET_BY_ALL = ("lr",)
_SET_WHEN_CYCLING = ("lr", "momentum", "betas")


def collect_schedulers(schedulers: Sequence[Any], names: Mapping[int, str] | None = None) -> list[dict[str, Any]]:
    """Return each scheduler's state dict, in order, with the options that it sets in its optimizer's groups.

    ``names``: id(parameter) -> name; without it, groups are matched by their position only.
    """
    names = names or {}
    return [{**scheduler.state_dict(), _GROUP_OPTIONS: _collect_options(scheduler, names)} for scheduler in schedulers]


def check_schedulers(schedulers: Sequence[Any], saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a reason if the checkpoint has another number of schedulers than this run; changes nothing.

    Raises:
        CheckpointMismatchError: an optimizer has another number of parameter groups than the one that was saved.
    """
    for scheduler, state in zip(schedulers, saved, strict=False):
        _check_groups(scheduler, state)
    return _count_difference(schedulers, saved)


def check_scheduler_fields(schedulers: Sequence[Any], saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which fields of a scheduler are missing in the saved state, as if another type of scheduler had written it.

    Extra fields in the saved state are not reported, because a scheduler may create some of them only when it steps.
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
    """Restore each scheduler, and write its learning rates back to its optimizer's groups.

    A scheduler's constructor makes a step and overwrites the groups' lr (and momentum, if it cycles that), and its
    ``load_state_dict`` does not write them back. So the first step after a resume would use the initial lr. It must run after
    the optimizers are restored.

    ``undo`` receives callbacks that restore the schedulers' own state. The groups belong to the optimizers' undo.

    Raises:
        CheckpointMismatchError: the optimizer has another number of parameter groups than the saved one, or the scheduler
            refuses the state.
    """
    for reason in _count_difference(schedulers, saved):
        logger.warning("%s", reason)
    pairs = list(zip(schedulers, expected_scheduler_states(schedulers, saved, names), strict=False))
    for scheduler, state in pairs:
        if undo is not None:
            undo.callback(scheduler.load_state_dict, copy.deepcopy(scheduler.state_dict()))
        _load_one(scheduler, {key: value for key, value in state.items() if key != _GROUP_OPTIONS})
    # After all loads: two schedulers may share an optimizer, and a load_state_dict may write to its groups.
    for scheduler, state in pairs:
        _apply_options(scheduler, state)


def expected_scheduler_states(
    schedulers: Sequence[Any], saved: Sequence[Mapping[str, Any]], names: Mapping[int, str] | None = None
) -> list[dict[str, Any]]:
    """Return the saved states of the schedulers that this run has, with the groups in this run's order."""
    return [
        _with_names_in_order(_reorder_groups(state, _saved_indices(scheduler, state, names or {})))
        for scheduler, state in zip(schedulers, saved, strict=False)
    ]


def rename_schedulers(saved: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> None:
    """Replace parameter names in saved states, in place: saved name -> name."""
    for options in (each for state in saved for each in state.get(_GROUP_OPTIONS) or ()):
        if _NAMES in options:
            options[_NAMES] = [names.get(name, name) for name in options[_NAMES]]


def _count_difference(schedulers: Sequence[Any], saved: Sequence[Any]) -> list[str]:
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
                f"{type(scheduler).__name__} refuses the saved state",
                expected=f"fields {', '.join(sorted(scheduler.state_dict()))}",
                found=f"{', '.join(sorted(state))} ({type(error).__name__}: {error})",
                do="resume with the lr scheduler that was saved",
            )
        ) from error


def _collect_options(scheduler: Any, names: Mapping[int, str]) -> list[dict[str, Any]]:
    moved = _SET_WHEN_CYCLING if _cycles_momentum(scheduler) else _SET_BY_ALL
    return [
        {**{key: _plain(group[key]) for key in moved if key in group}, _NAMES: _parameter_names(group, names)}
        for group in _groups(scheduler)
    ]


def _parameter_names(group: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    """Return the names of a group's parameters, in an order that does not depend on the run."""
    return sorted(names[id(parameter)] for parameter in group.get("params", ()) if id(parameter) in names)


def _saved_indices(scheduler: Any, state: Mapping[str, Any], names: Mapping[int, str]) -> list[int]:
    """Return, for each group of this run, its index among the saved groups; its own index if names can't decide.

    A group without named parameters gets an index that no other group has. If the parameters are divided into groups in
    another way than at the save, all groups keep their own index.
    """
    saved = [set(options.get(_NAMES, ())) for options in state.get(_GROUP_OPTIONS) or []]
    own = [set(_parameter_names(group, names)) for group in _groups(scheduler)]
    places = list(range(len(own)))
    if len(own) != len(saved):
        return places
    found = {place: max(places, key=lambda other: len(mine & saved[other])) for place, mine in enumerate(own)}
    found = {place: other for place, other in found.items() if own[place] & saved[other]}
    if len(set(found.values())) < len(found):
        return places
    left = [other for other in places if other not in found.values()]
    # A group without names keeps its index if no other group has it.
    for place in [place for place in places if place not in found and place in left]:
        found[place] = place
        left.remove(place)
    return [found[place] if place in found else left.pop(0) for place in places]


def _reorder_groups(state: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """Return ``state`` with every per-group list reordered by ``places``, including those of inner schedulers."""
    result = dict(state)
    for key, value in state.items():
        if key in _PER_GROUP and isinstance(value, (list, tuple)) and len(value) == len(places):
            result[key] = [value[place] for place in places]
        elif key == _INNER_SCHEDULERS:
            result[key] = [_reorder_groups(part, places) for part in value]
    return result


def _with_names_in_order(state: dict[str, Any]) -> dict[str, Any]:
    """Sort the names of each group: earlier versions saved them in the group's order."""
    if not state.get(_GROUP_OPTIONS):
        return state
    options = [{**each, _NAMES: sorted(each[_NAMES])} if _NAMES in each else each for each in state[_GROUP_OPTIONS]]
    return {**state, _GROUP_OPTIONS: options}


def _apply_options(scheduler: Any, state: Mapping[str, Any]) -> None:
    _check_groups(scheduler, state)
    for group, options in zip(_groups(scheduler), _options_of(scheduler, state), strict=True):
        for key, value in options.items():
            if key == _NAMES:
                continue
            if isinstance(group.get(key), torch.Tensor):
                # Filled in place, because a compiled or captured step refers to this tensor object.
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
    """Return the options of each group at the save; a state that another tool saved has at most the learning rates."""
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
