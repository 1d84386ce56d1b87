"""The optimizer bucket: live optimizers <-> their state by parameter name.

State is stored by parameter name, not by position, so that a changed order of groups can't assign one parameter's moments to
another. The state is restored exactly as it was saved: a parameter without saved state has none afterwards, and every tensor
keeps its saved dtype (``Optimizer.load_state_dict`` would cast moments to the parameter's dtype).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hyper_resume.errors import CheckpointMismatchError, UnsupportedError, describe
from hyper_resume.state.held_optimizers import OptimizerList, find_optimizers, is_per_rank, names_of, per_rank
from hyper_resume.state.names import first_names

logger = logging.getLogger(__name__)

CheckpointEntries = Mapping[str, torch.Tensor | None]
UNNAMED = "unnamed/"
"""Begins the name of a parameter that has none: its position follows."""
_GROUPS = "param_groups"
_NAMES = "params"
# In each saved group: parameter name -> the keys of its state, so that a load notices a missing entry.
_STATE_KEYS = "state_keys"
_BUCKET = "optimizer"


def flatten_optimizers(optimizer: Any) -> OptimizerList:
    """Return every optimizer that ``optimizer`` is or holds; see :func:`find_optimizers`.

    Raises:
        UnsupportedError: an object in which no optimizer is found.
    """
    return find_optimizers(optimizer)


def collect_optimizers(optimizers: Sequence[Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Return ``{name: {"state": {parameter name: {...}}, "param_groups": (...)}}``, without side effects.

    Args:
        optimizers: plain optimizers, the result of :func:`flatten_optimizers`.
        names: id(parameter) -> name.

    Raises:
        UnsupportedError: the state of a sharded parameter is not sharded like it (see :func:`_check_layout`).
    """
    return {
        name: _collect_one(optimizer, names) for name, optimizer in zip(names_of(optimizers), optimizers, strict=True)
    }


def _collect_one(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {}
    for name, parameter in named_parameters(optimizer, names):
        entries = optimizer.state.get(parameter)
        if entries:
            _check_layout(name, parameter, entries)
            state[name] = {key: _wrap(value) for key, value in entries.items()}
    groups = [_group_options(group, names, i) for i, group in enumerate(optimizer.param_groups)]
    for group in groups:
        group[_STATE_KEYS] = {name: sorted(state[name]) for name in group[_NAMES] if name in state}
    # A tuple, because DCP would split a list of dicts into one entry per option.
    return {"state": state, _GROUPS: tuple(groups)}


def named_parameters(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of each parameter in the groups, and the parameter."""
    for index, group in enumerate(optimizer.param_groups):
        yield from zip(_parameter_names(group, names, index), group[_NAMES], strict=True)


def _parameter_names(group: Mapping[str, Any], names: Mapping[int, str], index: int) -> list[str]:
    """Return the names of a group's parameters; one without a name is named by its position."""
    return [names.get(id(parameter), f"{UNNAMED}{index}/{place}") for place, parameter in enumerate(group[_NAMES])]


def _group_options(group: Mapping[str, Any], names: Mapping[int, str], index: int) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in (_NAMES, "param_names")}
    return {**options, _NAMES: _parameter_names(group, names, index)}


def _check_layout(name: str, parameter: torch.Tensor, entries: Mapping[str, Any]) -> None:
    """Refuse state that can't be restored for a sharded parameter.

    A plain per-rank tensor has the same name on all ranks, so DCP would keep that of one rank and drop the others. For a
    DTensor with another shape than the parameter, a new optimizer can't tell how it was sharded.
    """
    if not isinstance(parameter, DTensor):
        return
    for key, value in entries.items():
        follows = isinstance(value, DTensor) and value.shape == parameter.shape
        scalar = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() == 1
        if not (follows or scalar or isinstance(value, (int, float, str, type(None)))):
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else "no shape"
            raise UnsupportedError(
                describe(
                    f"optimizer state {key} of {name} is not sharded like the parameter",
                    expected=f"a DTensor of shape {tuple(parameter.shape)}, or a scalar",
                    found=f"{type(value).__name__} of shape {shape}",
                    do="use an optimizer whose state is sharded like its parameters, or set checkpoint.save_optimizer=false",
                )
            )


def _wrap(value: Any) -> Any:
    """Wrap a container (L-BFGS has lists of tensors) in a 1-tuple, which DCP keeps as one entry."""
    return (value,) if isinstance(value, (dict, list, tuple)) else value


def _unwrap(value: Any, device: torch.device) -> Any:
    return _to_device(value[0], device) if isinstance(value, tuple) else value


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _to_device(item, device) for key, item in value.items()}
    return type(value)(_to_device(item, device) for item in value) if isinstance(value, (list, tuple)) else value


def optimizer_template(
    optimizers: Sequence[Any], names: Mapping[int, str], entries: CheckpointEntries
) -> dict[str, Any]:
    """Return empty tensors for a load to fill: the state that the checkpoint has, sharded like this run's parameters.

    Args:
        optimizers: plain optimizers of this run.
        names: id(parameter) -> name.
        entries: the checkpoint's flattened entry name -> meta tensor, or None for an entry that is not a tensor.

    Raises:
        CheckpointMismatchError: the checkpoint has state for an optimizer, but under none of its parameters' names.
    """
    template: dict[str, Any] = {}
    for own, optimizer in zip(names_of(optimizers), optimizers, strict=True):
        prefix = f"{_BUCKET}.{own}."
        if f"{prefix}{_GROUPS}" not in entries:
            continue
        template[own] = {"state": _state_template(optimizer, names, entries, f"{prefix}state."), _GROUPS: None}
    return template


def saved_optimizer_count(entries: CheckpointEntries) -> int:
    """Return the number of optimizers in the checkpoint."""
    return len(_saved_names(entries))


def _saved_names(entries: CheckpointEntries) -> set[str]:
    """Return the names of the optimizers in the checkpoint; no name of an optimizer has a dot."""
    parts = [entry.split(".") for entry in entries if entry.endswith(f".{_GROUPS}")]
    return {part[1] for part in parts if len(part) == 3 and part[0] == _BUCKET and not _is_of_other_rank(part[1])}


def _is_of_other_rank(name: str) -> bool:
    return is_per_rank(name) and not name.endswith(per_rank(""))


def check_optimizer_count(optimizers: Sequence[Any], entries: CheckpointEntries, where: str) -> list[str]:
    """Return a reason if the checkpoint at ``where`` has other optimizers than this run; otherwise []."""
    saved, own = _saved_names(entries), set(names_of(optimizers))
    if not saved:
        return [f"{where} holds no optimizer state: the optimizer starts fresh"]
    if len(saved) != len(own):
        return [
            f"the checkpoint holds {len(saved)} optimizers and this run has {len(own)}: "
            f"pairing the first {len(saved & own)}, the others keep their state"
        ]
    if saved == own:
        return []
    return [
        f"the checkpoint holds the optimizers {first_names(sorted(saved - own))} and this run has "
        f"{first_names(sorted(own - saved))} instead: they keep their state"
    ]


def check_optimizer_entries(
    optimizers: Sequence[Any], names: Mapping[int, str], entries: CheckpointEntries
) -> list[str]:
    """Return which saved state this run has no parameters for, by the names of the checkpoint's entries; changes nothing.

    Args:
        optimizers: plain optimizers of this run.
        names: id(parameter) -> name.
        entries: the checkpoint's flattened entry names.
    """
    prefixes = [f"{_BUCKET}.{name}." for name in names_of(optimizers)]
    unread = [
        _unread_names(optimizer, names, entries, f"{prefix}state.")
        for optimizer, prefix in zip(optimizers, prefixes, strict=True)
    ]
    return [_UNREAD.format(first_names(of_one)) for of_one in unread if of_one]


_BY_PLACE = (
    "{} parameters of the optimizer belong to no attribute of the trainer, so they have no name: their state is assigned by "
    "their position in the groups"
)
_UNREAD = "optimizer state of parameters that this optimizer does not have is not restored: {}"


def _state_template(
    optimizer: Any, names: Mapping[int, str], entries: CheckpointEntries, prefix: str
) -> dict[str, Any]:
    live = dict(named_parameters(optimizer, names))
    state: dict[str, dict[str, Any]] = {}
    for entry, meta in entries.items():
        if not entry.startswith(prefix):
            continue
        name, _, key = entry.removeprefix(prefix).rpartition(".")
        if name in live:
            state.setdefault(name, {})[key] = _destination(live[name], key, meta)
    unread = _unread_names(optimizer, names, entries, prefix)
    if unread and not state:
        raise CheckpointMismatchError(
            describe(
                "the checkpoint's optimizer state belongs to none of this optimizer's parameters",
                expected="state under this run's parameter names",
                found=f"state of {first_names(unread)}",
                do="resume with the optimizer that was saved, or set checkpoint.restore_optimizer=false",
            )
        )
    if unread:
        logger.warning("%s", _UNREAD.format(first_names(unread)))
    return state


def _unread_names(optimizer: Any, names: Mapping[int, str], entries: CheckpointEntries, prefix: str) -> list[str]:
    """Return the names with saved state that are not names of this optimizer's parameters."""
    live = dict(named_parameters(optimizer, names))
    saved = {entry.removeprefix(prefix).rpartition(".")[0] for entry in entries if entry.startswith(prefix)}
    return sorted(saved - live.keys())


def _destination(parameter: torch.Tensor, key: str, meta: torch.Tensor | None) -> Any:
    if meta is None:
        return None
    if key == "step":
        return torch.empty(meta.shape, dtype=meta.dtype, device="cpu")
    if isinstance(parameter, DTensor) and meta.shape == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=meta.dtype)
    return torch.empty(meta.shape, dtype=meta.dtype, device=parameter.device)


def check_optimizers(optimizers: Sequence[Any], names: Mapping[int, str], loaded: Mapping[str, Any]) -> list[str]:
    """Return why the optimizers would not be restored exactly; changes nothing.

    A parameter that had no state at the save (it never had a gradient) has none afterwards; that is exact.

    Raises:
        CheckpointMismatchError: a parameter's saved state is incomplete.
    """
    reasons: list[str] = []
    for own, optimizer in zip(names_of(optimizers), optimizers, strict=True):
        part = loaded.get(own)
        if part is None:
            continue
        saved_groups, state = part[_GROUPS], part["state"]
        _check_complete(saved_groups, state)
        reasons += _unmatched_groups(optimizer, names, saved_groups)
        known = {name for group in saved_groups for name in group[_NAMES]}
        had_state = {name for group in saved_groups for name in group.get(_STATE_KEYS, ())}
        live = [name for name, _ in named_parameters(optimizer, names)]
        lacking = [name for name in live if name not in state and (name not in known or name in had_state)]
        by_place = [name for name in live if name in state and name.startswith(UNNAMED)]
        if by_place:
            reasons.append(_BY_PLACE.format(len(by_place)))
        if lacking:
            reasons.append(f"the checkpoint holds no optimizer state of {first_names(lacking)}: it starts fresh")
    return reasons


def apply_optimizers(optimizers: Sequence[Any], names: Mapping[int, str], loaded: Mapping[str, Any]) -> None:
    """Set the loaded state and group options of each optimizer; an optimizer that is not in ``loaded`` keeps its own.

    Args:
        optimizers: plain optimizers.
        names: id(parameter) -> name.
        loaded: the result of :func:`optimizer_template`, filled by a load.

    Raises:
        CheckpointMismatchError: a parameter's saved state is incomplete.
    """
    for own, optimizer in zip(names_of(optimizers), optimizers, strict=True):
        part = loaded.get(own)
        if part is None:
            continue
        saved_groups = part[_GROUPS]
        _check_complete(saved_groups, part["state"])
        for reason in _unmatched_groups(optimizer, names, saved_groups):
            logger.warning("%s", reason)
        live = dict(named_parameters(optimizer, names))
        optimizer.state.clear()
        for name, entries in part["state"].items():
            parameter = live[name]
            optimizer.state[parameter] = {key: _unwrap(value, parameter.device) for key, value in entries.items()}
        for place, group in enumerate(optimizer.param_groups):
            saved = _matching_group(_parameter_names(group, names, place), saved_groups, place)
            if saved is not None:
                _apply_options(group, saved)
            _move_step_counters(optimizer, group)


def register_optimizer_undo(optimizer: Any, undo: ExitStack) -> None:
    """Register a callback in ``undo`` that restores the optimizer's current state objects and group options."""
    state = dict(optimizer.state)
    groups = [{key: _copy_tensor(value) for key, value in group.items()} for group in optimizer.param_groups]

    def restore() -> None:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            for key in [key for key in group if key not in before]:
                del group[key]
            for key, value in before.items():
                # Filled in place, because a compiled or captured step refers to this tensor object.
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    undo.callback(restore)


def _copy_tensor(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _move_step_counters(optimizer: Any, group: Mapping[str, Any]) -> None:
    """Move the step counters to the device where torch expects them: the CPU, unless the group is capturable or fused.

    On the accelerator they would slow down every step of a plain optimizer; on the CPU, a fused optimizer fails.
    """
    on_device = bool(group.get("capturable") or group.get("fused"))
    for parameter in group[_NAMES]:
        entries = optimizer.state.get(parameter) or {}
        if isinstance(entries.get("step"), torch.Tensor):
            entries["step"] = entries["step"].to(parameter.device if on_device else "cpu")


def _check_complete(saved_groups: Sequence[Mapping[str, Any]], state: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse incomplete state of a parameter. No state at all is allowed: the parameter never had a gradient."""
    for group in saved_groups:
        for name, keys in group.get(_STATE_KEYS, {}).items():
            if name in state and set(state[name]) != set(keys):
                raise CheckpointMismatchError(
                    describe(
                        f"optimizer state of {name} is incomplete",
                        expected=", ".join(keys),
                        found=", ".join(sorted(state[name])),
                        do="resume from another checkpoint, or set checkpoint.restore_optimizer=false",
                    )
                )


def _unmatched_groups(optimizer: Any, names: Mapping[int, str], saved_groups: Sequence[Mapping[str, Any]]) -> list[str]:
    groups = [_parameter_names(group, names, place) for place, group in enumerate(optimizer.param_groups)]
    return [
        f"no saved parameter group contains {own[0]}; this group keeps its configured options"
        for place, own in enumerate(groups)
        if own and _matching_group(own, saved_groups, place) is None
    ]


def _matching_group(own: list[str], saved_groups: Sequence[Mapping[str, Any]], place: int) -> Mapping[str, Any] | None:
    """Return the saved group that contains most of these parameters; an empty group is matched by its position."""
    if not own:
        return saved_groups[place] if place < len(saved_groups) and not saved_groups[place][_NAMES] else None
    wanted = set(own)
    best = max(saved_groups, key=lambda group: len(wanted.intersection(group[_NAMES])), default=None)
    if best is None or not wanted.intersection(best[_NAMES]):
        return None
    return best


def _apply_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        if key in (_NAMES, _STATE_KEYS):
            continue
        current = group.get(key)
        if isinstance(current, torch.Tensor):
            # Filled in place, because a compiled or captured step refers to this tensor object.
            current.fill_(value)
        elif isinstance(value, torch.Tensor) and isinstance(current, (int, float)):
            group[key] = value.item()
        else:
            group[key] = value
