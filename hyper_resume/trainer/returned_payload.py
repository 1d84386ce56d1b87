"""What the ``load`` of a storage backend returns: this rank's training state, or the whole payload as it was saved."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from hyper_resume.checkpoint.format.extra_state import PAYLOAD_KEY, no_training_state_error, refuse_missing_parts
from hyper_resume.checkpoint.tensors.flattening import flatten
from hyper_resume.config.schema import CheckpointingConfig
from hyper_resume.errors import CheckpointMismatchError, describe
from hyper_resume.state.names import first_names
from hyper_resume.trainer.payload import EXTRA_STATE_SKELETON

_STATE_BUCKETS = ("model", "optimizer")
_IDENTITY = ("rank", "world_size")


def split(returned: Any, config: CheckpointingConfig, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the payload's model and optimizer, empty where the backend has filled them in place, and the training state.

    Raises:
        CheckpointNotFoundError: the training state, or a part of it, is asked for and was not returned.
    """
    whole: Mapping[str, Any] = returned if isinstance(returned, Mapping) else {}
    if PAYLOAD_KEY not in whole and "model" not in whole:
        whole = {PAYLOAD_KEY: whole}
    extra_state = whole.get(PAYLOAD_KEY) or {}
    if not config.restore_train_state:
        extra_state = {}
    elif "global_step" not in extra_state:
        raise no_training_state_error(path, "no extra_state in what the storage backend has read")
    else:
        refuse_missing_parts(path, sorted({*EXTRA_STATE_SKELETON, *_IDENTITY} - set(extra_state)))
    # Copied: what is restored is changed by the training, and a backend may keep its objects.
    return {name: whole[name] for name in _STATE_BUCKETS if name in whole}, copy.deepcopy(dict(extra_state))


def entries_of(payload: Mapping[str, Any]) -> dict[str, torch.Tensor | None]:
    """Return the payload's flattened entry names, as ``CheckpointerBase.describe`` does."""
    flat, _ = flatten(payload)
    return {name: value if isinstance(value, torch.Tensor) else None for name, value in flat.items()}


def values_for(
    destination: Mapping[str, Any], payload: Mapping[str, Any], path: str, *, strict_model: bool
) -> dict[str, Any]:
    """Return copies of the payload's values under the names of ``destination``, which is unchanged.

    Raises:
        CheckpointMismatchError: a missing model key, or a model entry of another shape or dtype.
    """
    model, saved = destination["model"], payload["model"]
    missing = sorted(name for name in model if name not in saved)
    if missing and strict_model:
        raise CheckpointMismatchError(
            describe(
                f"missing model key: {first_names([f'model.{name}' for name in missing])}",
                where=path,
                expected=f"{len(model)} model entries",
                found=f"{len(model) - len(missing)} of them",
                do="resume with the model that was saved, or set checkpoint.is_peft for an adapter-only checkpoint",
            )
        )
    for name, live in model.items():
        forms = [
            f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else "no tensor"
            for value in (live, saved.get(name, live))
        ]
        if forms[0] != forms[1]:
            raise CheckpointMismatchError(
                describe(
                    f"model entry model.{name} does not fit",
                    where=path,
                    expected=f"{forms[0]} (the running model)",
                    found=f"{forms[1]} (the checkpoint)",
                    do="resume with the model configuration that was saved",
                )
            )
    return _taken(destination, payload)


def _taken(destination: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _taken(own, values[key])
        if key in values and isinstance(own, Mapping) and isinstance(values[key], Mapping)
        else _copied(values.get(key, own))
        for key, own in destination.items()
    }


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
