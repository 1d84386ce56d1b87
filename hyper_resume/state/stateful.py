"""The stateful bucket: any other object with a state_dict (gradient scaler, moving averages, callbacks, generators).

The objects are found among the trainer's attributes and callbacks, and saved by name. Of a sharded tensor only this rank's part
is saved, because the training state is stored per rank, with its place in the whole tensor: on another mesh the backend puts
each rank's part together from the saved ones.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hyper_resume.errors import CheckpointMismatchError, describe
from hyper_resume.state.names import first_names

logger = logging.getLogger(__name__)


def find_stateful(owner: Any, callbacks: Iterable[Any], known: Iterable[Any]) -> dict[str, Any]:
    """Return name -> object for every attribute of ``owner`` and every callback that can save and restore its state.

    Args:
        owner: the trainer; an attribute's name is its name here.
        callbacks: named ``callback.<class name>``, with a number if a class occurs more than once.
        known: objects that other buckets save. They are left out, and so are modules that consist of their parameters and
            buffers (a compiled alias of the model).
    """
    known = list(known)
    tensors = {id(tensor) for item in known if isinstance(item, nn.Module) for tensor in _tensors(item)}
    excluded = {id(item) for item in known}
    found: dict[str, Any] = {}
    for name, value in vars(owner).items():
        if id(value) in excluded or not _is_stateful(value):
            continue
        if isinstance(value, nn.Module) and _is_alias(value, tensors):
            continue
        found[name] = value
    for callback in callbacks:
        if not _is_stateful(callback):
            continue
        base = f"callback.{type(callback).__name__}"
        name, number = base, 1
        while name in found:
            number += 1
            name = f"{base}.{number}"
        found[name] = callback
    return found


def _is_alias(module: nn.Module, known: set[int]) -> bool:
    """True if all tensors of ``module`` are known; without tensors, if it has no state (such as an extra state)."""
    own = _tensors(module)
    return all(id(tensor) in known for tensor in own) if own else not module.state_dict()


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _is_stateful(value: Any) -> bool:
    return isinstance(value, torch.Generator) or (
        callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    )


def collect_stateful(found: Mapping[str, Any], *, copied: bool = True) -> dict[str, Any]:
    """Return name -> state of each object; of a DTensor, this rank's local tensor. With ``copied``, tensors go to the CPU."""
    return local_states(live_states(found), copied=copied)


def live_states(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> state of each object, as the object returns it."""
    return {
        name: value.get_state() if isinstance(value, torch.Generator) else value.state_dict()
        for name, value in found.items()
    }


def local_states(states: Mapping[str, Any], *, copied: bool = True) -> dict[str, Any]:
    """Return the states with tensors copied to the CPU, if ``copied``; of a DTensor, this rank's local tensor."""
    return {name: _to_local(state, copied=copied) for name, state in states.items()}


def check_stateful(found: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return why these objects would not be restored exactly: the names that only the checkpoint or only the trainer has."""
    return [
        *(
            f"the checkpoint holds state of {name}, which this trainer does not have; it is not restored"
            for name in sorted(set(saved) - set(found))
        ),
        *(
            f"the checkpoint holds no state of {name}; it keeps its initial state"
            for name in sorted(set(found) - set(saved))
        ),
    ]


def refuse_sharded_parts(found: Mapping[str, Any], what: str, resharded: Iterable[str] = ()) -> None:
    """Refuse objects whose state has sharded tensors: each rank saved its part, and these are the parts of another mesh.

    Args:
        found: name -> object.
        what: what has changed, for the message.
        resharded: paths of the tensors of which this rank's part was put together.

    Raises:
        CheckpointMismatchError: names the object.
    """
    known = frozenset(resharded)
    for name, value in found.items():
        tensors = _tensors_in(value.state_dict(), name) if hasattr(value, "state_dict") else ()
        if any(path not in known and tensor.to_local().shape != tensor.shape for path, tensor in _sharded(tensors)):
            raise CheckpointMismatchError(
                describe(
                    f"the saved part of {name} does not fit this rank",
                    expected="the parts of its sharded tensors as this mesh divides them",
                    found=f"those of another mesh ({what})",
                    do="resume with the number of ranks and the parallel sizes that were saved",
                )
            )


def sharded_parts(states: Mapping[str, Any]) -> dict[str, list[list[int]]]:
    """Return path -> [shape, offsets, sizes] of this rank's part, for each sharded tensor in ``states``, by name of object."""
    parts = tensor_parts(states)
    return {path: parts[path] for path, _ in sorted(_sharded(_all_tensors(states)), key=lambda item: item[0])}


def tensor_parts(states: Mapping[str, Any]) -> dict[str, list[list[int]]]:
    """As :func:`sharded_parts`, for each tensor: of one that is not sharded, a rank has all."""
    found = {}
    for path, tensor in _all_tensors(states):
        sizes, offsets = tuple(tensor.shape), (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        found[path] = [list(tensor.shape), list(offsets), list(sizes)]
    return found


def _all_tensors(states: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, state in states.items():
        yield from _tensors_in(state, name)


def _sharded(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, DTensor]]:
    return ((path, tensor) for path, tensor in tensors if isinstance(tensor, DTensor))


def _tensors_in(state: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, item in state.items():
            yield from _tensors_in(item, f"{path}.{key}")
    elif isinstance(state, (list, tuple)):
        for place, item in enumerate(state):
            yield from _tensors_in(item, f"{path}.{place}")


def check_sharding(found: Mapping[str, Any], sharded: Iterable[str], resharded: Iterable[str] = ()) -> list[str]:
    """Return a reason if tensors that were sharded at the save have no sharded counterpart: only local parts come back.

    An object with ``restores_sharding`` is left out: it shards its tensors itself.

    Args:
        found: name -> live object.
        sharded: the paths of :func:`sharded_parts` at the save.
        resharded: those of which this rank's part, or all, was put together.
    """
    own = tuple(f"{name}." for name, value in found.items() if not getattr(value, "restores_sharding", False))
    wanted = {path for path in sharded if path.startswith(own)} - set(resharded)
    lost = sorted(wanted - set(dict(_sharded(_all_tensors(live_states(found)))))) if wanted else []
    if not lost:
        return []
    return [
        f"tensors that were sharded are not made in this run yet, so their local parts come back: {first_names(lost)}"
    ]


def apply_stateful(found: Mapping[str, Any], saved: Mapping[str, Any], *, undo: ExitStack | None = None) -> None:
    """Restore every object that has a saved state; a warning lists the names that only one side has.

    ``undo`` receives callbacks that restore each object's previous state.

    Raises:
        CheckpointMismatchError: a sharded tensor was saved with another local shape (the world size or the mesh has changed,
            and the backend has not put this rank's part together).
    """
    for reason in check_stateful(found, saved):
        logger.warning("%s", reason)
    for name in sorted(set(found) & set(saved)):
        value = found[name]
        if undo is not None:
            # Copied, because a state_dict may contain the object's own containers, which the load then changes.
            undo.callback(_apply_one, value, copy.deepcopy(collect_stateful({name: value})[name]), name)
        _apply_one(value, saved[name], name)


def _apply_one(value: Any, saved: Any, name: str) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(saved)
    else:
        value.load_state_dict(_to_global(saved, value.state_dict(), name))


def _to_local(value: Any, *, copied: bool) -> Any:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if copied else value.detach()
    if isinstance(value, Mapping):
        return {key: _to_local(item, copied=copied) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_to_local(item, copied=copied) for item in value)
    return value


def _to_global(saved: Any, live: Any, where: str) -> Any:
    """Return the saved state with local tensors converted to DTensors, sharded as in ``live``."""
    if isinstance(live, DTensor) and isinstance(saved, torch.Tensor):
        local = live.to_local()
        if local.shape != saved.shape:
            raise CheckpointMismatchError(
                describe(
                    f"the saved part of {where} does not fit this rank",
                    expected=f"local shape {tuple(local.shape)}",
                    found=f"{tuple(saved.shape)}",
                    do="resume with the number of ranks and the parallel sizes that were saved",
                )
            )
        return DTensor.from_local(
            saved.to(local.device), live.device_mesh, live.placements, shape=live.shape, stride=live.stride()
        )
    if isinstance(saved, Mapping):
        return {
            key: _to_global(item, live.get(key) if isinstance(live, Mapping) else None, f"{where}.{key}")
            for key, item in saved.items()
        }
    if type(saved) in (list, tuple):
        return _sequence_to_global(saved, live if isinstance(live, (list, tuple)) else (), where)
    return saved


def _sequence_to_global(saved: Any, live: Any, where: str) -> Any:
    if len(saved) != len(live) and any(isinstance(item, DTensor) for item in live):
        raise CheckpointMismatchError(
            describe(
                f"the saved list {where} of sharded tensors does not fit this run",
                expected=f"{len(live)} tensors",
                found=f"{len(saved)}",
                do="build the object as it was when it was saved, before the callback restores it",
            )
        )
    pairs = [(item, live[place] if place < len(live) else None) for place, item in enumerate(saved)]
    return type(saved)(_to_global(item, own, f"{where}.{place}") for place, (item, own) in enumerate(pairs))
