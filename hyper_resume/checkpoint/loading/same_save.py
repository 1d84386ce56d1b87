"""Refuses a checkpoint whose files belong to different saves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyper_resume.checkpoint.format.save_id import SAVE_ID
from hyper_resume.errors import CheckpointMismatchError, describe


def check_same_save(state: Mapping[str, Any], save_id: str | None, directory: Path) -> None:
    """Refuse a training state of another save than the shards.

    Args:
        state: one rank's training state.
        save_id: the result of :func:`hyper_resume.checkpoint.loading.reading.read_save_id`; None skips the check.
        directory: the step directory, for the message.

    Raises:
        CheckpointMismatchError: the training state belongs to another save, or contains no save id.
    """
    if save_id is not None:
        refuse_mixed_saves(
            {"the shards": save_id, f"extra_state of rank {state['rank']}": state.get(SAVE_ID)}, directory
        )


def refuse_mixed_saves(found: Mapping[str, Any], directory: Path) -> None:
    """Refuse parts of different saves.

    Args:
        found: name of a part, for the message -> its save id.
        directory: the step directory, for the message.

    Raises:
        CheckpointMismatchError: the ids differ.
    """
    if len(set(found.values())) > 1:
        raise CheckpointMismatchError(
            describe(
                "the checkpoint mixes parts of different saves",
                where=str(directory),
                expected="metadata, shards and extra_state of one save",
                found=", ".join(f"{part}: {save_id}" for part, save_id in found.items()),
                do="restore the files that belong together, or resume from another checkpoint",
            )
        )
