"""Checks that a checkpoint has the entries of the running model, with the same shapes and dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hyper_resume.errors import CheckpointMismatchError, describe

MODEL_BUCKET = "model"
_NAMES_SHOWN = 5


def check_model_entries(wanted: dict[str, Any], metadata: Metadata, *, strict: bool, where: str) -> None:
    """Compare the running model's entries with the checkpoint's, before anything is read.

    Args:
        wanted: flattened entry name (``model.x.y``) -> the live value that will receive the entry.
        metadata: the checkpoint's DCP metadata.
        strict: a name that is missing in the checkpoint is an error.
        where: the path, for the message.

    Raises:
        CheckpointMismatchError: ``missing model key``; or shape or dtype differ; or only one of the two is a tensor.
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
    """True if live value and stored entry are tensors with the same shape and dtype, or if neither is a tensor."""
    if isinstance(value, torch.Tensor) and isinstance(entry, TensorStorageMetadata):
        return bool(value.shape == entry.size and value.dtype == entry.properties.dtype)
    return not isinstance(value, torch.Tensor) and not isinstance(entry, TensorStorageMetadata)


def describe_live(value: Any) -> str:
    """Return shape and dtype of a live value, for a message."""
    return f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else "no tensor"


def describe_stored(entry: Any) -> str:
    """Return shape and dtype of a stored entry, for a message."""
    if isinstance(entry, TensorStorageMetadata):
        return f"shape {tuple(entry.size)}, {entry.properties.dtype}"
    return "no tensor"


def _first(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
