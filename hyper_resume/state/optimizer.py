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
from hyper_resume.state.names import first_names

logger = logging.getLogger(__name__)

CheckpointEntries = Mapping[str, torch.Tensor | None]
_GROUPS = "param_groups"
_NAMES = "params"
# In each saved group: parameter name -> the keys of its state, so that a load notices a missing entry.
_STATE_KEYS = "state_keys"
_BUCKET = "optimizer"


def flatten_optimizers(optimizer: Any) -> list[Any]:
    """Return the plain optimizers inside an optimizer, a list of optimizers, or wrappers of either.

    A wrapper must have the attribute ``chained_optimizers`` (a list) or ``optimizer``.

    Raises:
        UnsupportedError: an object that is neither an optimizer nor a wrapper of these kinds.
    """
    if optimizer is None:
        return []
    if isinstance(optimizer, (list, tuple)):
        return [leaf for item in optimizer for leaf in flatten_optimizers(item)]
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained:
        return flatten_optimizers(list(chained))
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    inner = getattr(optimizer, "optimizer", None)
    if inner is not None:
        return flatten_optimizers(inner)
    if hasattr(optimizer, "state") and hasattr(optimizer, _GROUPS):
        return [optimizer]
    raise UnsupportedError(
        describe(
            f"unknown optimizer wrapper {type(optimizer).__module__}.{type(optimizer).__qualname__}",
            expected="a torch Optimizer, or an object with chained_optimizers, optimizer, or state and param_groups",
            found="none of these attributes",
            do="give the wrapper a chained_optimizers list, or set checkpoint.save_optimizer and "
            "checkpoint.restore_optimizer to false",
        )
    )


def collect_optimizers(optimizers: Sequence[Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Return ``{index: {"state": {parameter name: {...}}, "param_groups": (...)}}``, without side effects.

    Args:
        optimizers: plain optimizers, the result of :func:`flatten_optimizers`.
        names: id(parameter) -> name.

    Raises:
        UnsupportedError: the state of a sharded parameter is not sharded like it (see :func:`_check_layout`).
    """
    return {str(index): _collect_one(optimizer, names) for index, optimizer in enumerate(optimizers)}


def _collect_one(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {}
    for name, parameter in _named_parameters(optimizer, names):
        entries = optimizer.state.get(parameter)
        if entries:
            _check_layout(name, parameter, entries)
            state[name] = {key: _wrap(value) for key, value in entries.items()}
    groups = [_group_options(group, names, i) for i, group in enumerate(optimizer.param_groups)]
    for group in groups:
        group[_STATE_KEYS] = {name: sorted(state[name]) for name in group[_NAMES] if name in state}
    # A tuple, because DCP would split a list of dicts into one entry per option.
    return {"state": state, _GROUPS: tuple(groups)}


def _named_parameters(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, group in enumerate(optimizer.param_groups):
        yield from zip(_parameter_names(group, names, index), group[_NAMES], strict=True)


def _parameter_names(group: Mapping[str, Any], names: Mapping[int, str], index: int) -> list[str]:
    """Return the names of a group's parameters; one that does not belong to the model is named by its position."""
    return [names.get(id(parameter), f"unnamed/{index}/{place}") for place, parameter in enumerate(group[_NAMES])]


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
    for index, optimizer in enumerate(optimizers):
        prefix = f"{_BUCKET}.{index}."
        if f"{prefix}{_GROUPS}" not in entries:
            continue
        template[str(index)] = {"state": _state_template(optimizer, names, entries, f"{prefix}state."), _GROUPS: None}
    return template


def saved_optimizer_count(entries: CheckpointEntries) -> int:
    """Return the number of optimizers in the checkpoint."""
    count = 0
    while f"{_BUCKET}.{count}.{_GROUPS}" in entries:
        count += 1
    return count


def check_optimizer_count(optimizers: Sequence[Any], entries: CheckpointEntries, where: str) -> list[str]:
    """Return a reason if the checkpoint at ``where`` has another number of optimizers than this run; otherwise []."""
    saved = saved_optimizer_count(entries)
    if saved == 0:
        return [f"{where} holds no optimizer state: the optimizer starts fresh"]
    if saved == len(optimizers):
        return []
    return [
        f"the checkpoint holds {saved} optimizers and this run has {len(optimizers)}: "
        f"pairing the first {min(saved, len(optimizers))}, the others keep their state"
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
    prefixes = [f"{_BUCKET}.{index}." for index in range(len(optimizers))]
    unread = [
        _unread_names(optimizer, names, entries, f"{prefix}state.")
        for optimizer, prefix in zip(optimizers, prefixes, strict=True)
    ]
    return [_UNREAD.format(first_names(of_one)) for of_one in unread if of_one]


_UNREAD = "optimizer state of parameters that this optimizer does not have is not restored: {}"


def _state_template(
    optimizer: Any, names: Mapping[int, str], entries: CheckpointEntries, prefix: str
) -> dict[str, Any]:
    live = dict(_named_parameters(optimizer, names))
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
    live = dict(_named_parameters(optimizer, names))
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
    for index, optimizer in enumerate(optimizers):
        part = loaded.get(str(index))
        if part is None:
            continue
        saved_groups, state = part[_GROUPS], part["state"]
        _check_complete(saved_groups, state)
        reasons += _unmatched_groups(optimizer, names, saved_groups)
        known = {name for group in saved_groups for name in group[_NAMES]}
        had_state = {name for group in saved_groups for name in group.get(_STATE_KEYS, ())}
        own = [name for name, _ in _named_parameters(optimizer, names)]
        lacking = [name for name in own if name not in state and (name not in known or name in had_state)]
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
    for index, optimizer in enumerate(optimizers):
        part = loaded.get(str(index))
        if part is None:
            continue
        saved_groups = part[_GROUPS]
        _check_complete(saved_groups, part["state"])
        for reason in _unmatched_groups(optimizer, names, saved_groups):
            logger.warning("%s", reason)
        live = dict(_named_parameters(optimizer, names))
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
