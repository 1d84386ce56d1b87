"""The model bucket: a live module <-> its state dict under wrapper-free names."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from hyper_resume.errors import CheckpointMismatchError, describe
from hyper_resume.state.names import canonical_name, first_names

_BUCKET = "model"
# torch's own suffix of what a module's get_extra_state returned.
_EXTRA_STATE = "_extra_state"


def collect_model(model: nn.Module, *, trainable_only: bool = False) -> dict[str, Any]:
    """Return canonical name -> live tensor (no copy; a DTensor stays one).

    What a module's ``get_extra_state`` returned, if it is no tensor, stands in a 1-tuple, which a storage backend keeps as
    one entry whatever is inside.

    Args:
        model: any module; FSDP2 and tensor-parallel ones give their sharded state.
        trainable_only: only parameters with ``requires_grad`` (adapters); no buffers.

    Raises:
        CheckpointMismatchError: two entries have one canonical name.
    """
    state = model.state_dict()
    if trainable_only:
        trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        state = {name: value for name, value in state.items() if name in trainable}
    result = {
        canonical_name(name): value if isinstance(value, torch.Tensor) else (value,) for name, value in state.items()
    }
    if len(result) != len(state):
        raise CheckpointMismatchError(
            describe(
                "two model entries have the same name once wrapper prefixes are removed",
                found=f"{len(state)} entries, {len(result)} names",
                do="rename one of the modules",
            )
        )
    return result


def check_model(model: nn.Module, entries: Collection[str]) -> list[str]:
    """Return why the model would not come back as it was saved: entries of the checkpoint that have no place in it.

    Args:
        model: the live one; nothing is changed.
        entries: the checkpoint's flattened entry names.
    """
    own = {f"{_BUCKET}.{canonical_name(name)}" for name in model.state_dict()}
    extra = sorted(name for name in entries if name.startswith(f"{_BUCKET}.") and name not in own)
    if not extra:
        return []
    return [f"the checkpoint holds model entries that this model does not have; not restored: {first_names(extra)}"]


def apply_model(model: nn.Module, loaded: dict[str, Any], *, strict: bool) -> None:
    """Put ``loaded`` (canonical names) into ``model``.

    The tensors are usually the live ones, filled in place; the call then only runs the module's own load hooks.
    """
    live_names = {canonical_name(name): name for name in model.state_dict()}
    model.load_state_dict({live_names[name]: _unwrap(value) for name, value in loaded.items()}, strict=strict)


def apply_extra_states(model: nn.Module, loaded: Mapping[str, Any], undo: ExitStack) -> None:
    """Put only what modules keep beside their tensors (``get_extra_state``) into ``model``.

    So that a module that can't take its state says so while the tensors are untouched.

    Args:
        model: the live one; its parameters and buffers keep their values.
        loaded: what was read, by canonical name.
        undo: gets what brings back the extra states before this call.
    """
    names = {canonical_name(name): name for name in model.state_dict()}
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


def _unwrap(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value
