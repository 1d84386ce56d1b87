"""The model bucket: a live module <-> its state dict, under names without wrapper prefixes."""

from __future__ import annotations

import copy
import io
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from hyper_resume.errors import CheckpointMismatchError, describe
from hyper_resume.state.names import first_names, naming

_BUCKET = "model"
# torch's key suffix for the result of a module's get_extra_state.
_EXTRA_STATE = "_extra_state"
# Begins the tuple that stands for an ``io.BytesIO``; its bytes follow, a uint8 tensor.
_BYTES = "io.BytesIO"


def collect_model(model: nn.Module, *, trainable_only: bool = False) -> dict[str, Any]:
    """Return canonical name -> live tensor (not copied; a DTensor stays a DTensor).

    The result of a module's ``get_extra_state`` that is not a tensor is wrapped in a tuple, which a storage backend stores
    as one entry, whatever its content; an ``io.BytesIO`` is its bytes there.

    Args:
        model: any module; for FSDP2 and tensor parallelism, the state is sharded.
        trainable_only: return only parameters with ``requires_grad`` (adapters), and no buffers.

    Raises:
        CheckpointMismatchError: two entries have one canonical name.
    """
    state = model.state_dict()
    if trainable_only:
        trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        state = {name: value for name, value in state.items() if name in trainable}
    canonical = naming(model)
    result = {canonical(name): _wrap(value) for name, value in state.items()}
    if len(result) != len(state):
        raise CheckpointMismatchError(
            describe(
                "two model entries have the same name once wrapper prefixes are removed",
                found=f"{len(state)} entries, {len(result)} names",
                do="rename one of the modules",
            )
        )
    return result


def fit_extra_states(state: Mapping[str, Any], entries: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
    """Return ``state`` with a place for each extra state as the checkpoint has it: of another shape or type than the live one.

    Args:
        state: the result of :func:`collect_model`.
        entries: the checkpoint's flattened entry name -> meta tensor, or None for an entry that is not a tensor.
    """
    result = dict(state)
    for name, value in state.items():
        saved = entries.get(f"{_BUCKET}.{name}", value)
        if not _is_extra_state(name, value) or _same_layout(saved, value):
            continue
        result[name] = (None,) if saved is None else torch.empty(saved.shape, dtype=saved.dtype)
    return result


def _same_layout(saved: Any, live: Any) -> bool:
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
        return (saved.shape, saved.dtype) == (live.shape, live.dtype)
    return not isinstance(saved, torch.Tensor) and not isinstance(live, torch.Tensor)


def check_model(model: nn.Module, entries: Collection[str]) -> list[str]:
    """Return why the model would not be restored exactly: the checkpoint has entries that the model does not have.

    Args:
        model: the live model; it is not changed.
        entries: the checkpoint's flattened entry names.
    """
    canonical = naming(model)
    own = {f"{_BUCKET}.{canonical(name)}" for name in model.state_dict()}
    extra = sorted(name for name in entries if name.startswith(f"{_BUCKET}.") and name not in own)
    if not extra:
        return []
    return [f"the checkpoint holds model entries that this model does not have; not restored: {first_names(extra)}"]


def apply_model(model: nn.Module, loaded: dict[str, Any], *, strict: bool) -> None:
    """Load ``loaded`` (canonical name -> value) into ``model``.

    The tensors are usually the live ones, which the load has filled in place. Then this only runs the module's load hooks.
    """
    canonical = naming(model)
    live_names = {canonical(name): name for name in model.state_dict()}
    model.load_state_dict({live_names[name]: _unwrap(value) for name, value in loaded.items()}, strict=strict)


def apply_extra_states(model: nn.Module, loaded: Mapping[str, Any], undo: ExitStack) -> None:
    """Load only the modules' extra states (``get_extra_state``) into ``model``.

    It runs first, so that a module that refuses its extra state raises while the tensors are unchanged.

    Args:
        model: the live model; its parameters and buffers keep their values.
        loaded: canonical name -> value that was read.
        undo: receives a callback that restores the previous extra states.
    """
    canonical = naming(model)
    names = {canonical(name): name for name in model.state_dict()}
    extras = {name: value for name, value in loaded.items() if name in names and _is_extra_state(name, value)}
    if not extras:
        return
    live = collect_model(model)
    before = copy.deepcopy({name: live[name] for name in extras})

    def put(values: Mapping[str, Any]) -> None:
        state = {**collect_model(model), **values}
        model.load_state_dict({names[name]: _unwrap(value) for name, value in state.items()}, strict=False)

    undo.callback(put, before)
    put(extras)


def _is_extra_state(name: str, value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == _EXTRA_STATE


def _wrap(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, io.BytesIO):
        content = value.getvalue()
        return (_BYTES, torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else _no_bytes())
    return (value,)


def _unwrap(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and value[0] == _BYTES:
        return io.BytesIO(value[1].numpy().tobytes())
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def _no_bytes() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)
