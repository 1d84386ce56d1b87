"""The model bucket: a live module <-> its state dict under wrapper-free names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hyper_resume.errors import CheckpointMismatchError, describe
from hyper_resume.state.names import canonical_name


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


def apply_model(model: nn.Module, loaded: dict[str, Any], *, strict: bool) -> None:
    """Put ``loaded`` (canonical names) into ``model``.

    The tensors are usually the live ones, filled in place; the call then only runs the module's own load hooks.
    """
    live_names = {canonical_name(name): name for name in model.state_dict()}
    model.load_state_dict({live_names[name]: _unwrap(value) for name, value in loaded.items()}, strict=strict)


def _unwrap(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value
