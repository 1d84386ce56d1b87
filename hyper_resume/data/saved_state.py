"""Checks of a saved data position: its keys and their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_resume.errors import CheckpointMismatchError, describe

_REQUIRED_KEYS = ("epoch", "batches_consumed", "dp_world_size", "batch_size")
_KEY_TYPES: dict[str, str] = {
    "epoch": "count",
    "batches_consumed": "count",
    "dp_world_size": "count",
    "batch_size": "count",
    "num_samples": "count",
    "shuffle": "bool",
    "seed": "int",
    "drop_last": "bool",
    "fingerprint": "text or None",
    "shuffle_method": "text",
}


def is_non_negative_int(value: object) -> bool:
    """Whether ``value`` is an integer of 0 or more, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _has_type(value: object, kind: str) -> bool:
    if kind == "count":
        return is_non_negative_int(value)
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str) or (kind == "text or None" and value is None)


def check_saved_state(state: Mapping[str, Any]) -> None:
    """Refuse a state in which a required key is missing or a known key has the wrong type.

    Raises:
        CheckpointMismatchError: names every key that is missing or wrong.
    """
    if not isinstance(state, Mapping):
        found = type(state).__name__
        raise CheckpointMismatchError(describe("the saved data position isn't a mapping", found=found))
    missing = [key for key in _REQUIRED_KEYS if key not in state]
    wrong = [
        f"{key}={state[key]!r} (expected: {kind})"
        for key, kind in _KEY_TYPES.items()
        if key in state and not _has_type(state[key], kind)
    ]
    if missing or wrong:
        found = "; ".join([f"no {key}" for key in missing] + wrong)
        message = describe(
            "the saved data position can't be read",
            where="train_dataloader",
            expected=f"keys {', '.join(_REQUIRED_KEYS)}",
            found=found,
        )
        raise CheckpointMismatchError(message)
