"""The save id: every file of a step directory contains it, and all files must have the same.

A shard or a training state that was copied from another save has the right name, shapes and sizes. So every save has an id,
and every file contains it: ``.metadata`` (where DCP records the staging directory, whose name is the id), each rank's shard as
an entry ``save_id.rank_{R}``, and each rank's training state under the key ``save_id``. A checkpoint of stock DCP has no id,
and none is required.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyper_resume.errors import CheckpointMismatchError, describe

SAVE_ID = "save_id"
SHARD_ENTRY_PATTERN = re.compile(r"save_id\.(rank_[0-9]+)")


def add_save_id(payload: dict[str, Any], save_id: str, rank: int) -> None:
    """Add the entry to ``payload`` that stores the save id in this rank's shard file."""
    payload[SAVE_ID] = {f"rank_{rank}": save_id}


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
