"""Whether a checkpoint has what is asked for: strict about the model, lenient about the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hyper_resume.errors import CheckpointMismatchError, describe

MODEL_BUCKET = "model"
_NAMES_SHOWN = 5


def check_model_entries(wanted: dict[str, Any], metadata: Metadata, *, strict: bool, where: str) -> None:
    """Hold the running model's entries against the checkpoint's, before anything is read.

    Args:
        wanted: flattened entry names (``model.x.y``) to the objects that will receive them.
        metadata: the checkpoint's own description.
        strict: a name that the checkpoint lacks is an error.
        where: the path, for the message.

    Raises:
        CheckpointMismatchError: ``missing model key``, or an entry of another shape or type, or a tensor on one side only.
    """
    stored = metadata.state_dict_metadata
    missing = [name for name in wanted if name not in stored]
    if strict and missing:
        raise CheckpointMismatchError(
            describe(
                f"missing model key: {_first(missing)}",
                where=where,
                expected=f"{len(wanted)} model entries",
                found=f"{len(wanted) - len(missing)} of them",
                do="resume with the model that was saved, or set checkpoint.is_peft for an adapter-only checkpoint",
            )
        )
    for name, value in wanted.items():
        if name in stored and not has_same_form(value, stored[name]):
            raise CheckpointMismatchError(
                describe(
                    f"model entry {name} does not fit",
                    where=where,
                    expected=f"{describe_live(value)} (the running model)",
                    found=f"{describe_stored(stored[name])} (the checkpoint)",
                    do="resume with the model configuration that was saved",
                )
            )


def has_same_form(value: Any, entry: Any) -> bool:
    """True when a live value and a stored entry are tensors of one shape and type, or no tensors both."""
    if isinstance(value, torch.Tensor) and isinstance(entry, TensorStorageMetadata):
        return bool(value.shape == entry.size and value.dtype == entry.properties.dtype)
    return not isinstance(value, torch.Tensor) and not isinstance(entry, TensorStorageMetadata)


def describe_live(value: Any) -> str:
    """Say what a live value is, for a message."""
    return f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else "no tensor"


def describe_stored(entry: Any) -> str:
    """Say what a stored entry is, for a message."""
    if isinstance(entry, TensorStorageMetadata):
        return f"shape {tuple(entry.size)}, {entry.properties.dtype}"
    return "no tensor"


def _first(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
