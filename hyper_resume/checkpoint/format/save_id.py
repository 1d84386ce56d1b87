"""Which save a part of a checkpoint is of: all parts must be of one and the same.

A shard or a rank's training state that was copied in from another step, or from another attempt at the same step, has the
right name, shapes and sizes. So every save has an id, and every file carries it: ``.metadata`` (DCP writes down where it
saved to, which is the staging directory), each rank's shards by an entry ``save_id.rank_{R}``, and each rank's training
state under ``save_id``. A checkpoint that stock DCP wrote has no id, and none is asked for.
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
    """Add to ``payload`` what will say, inside this rank's shard file, which save it is of."""
    payload[SAVE_ID] = {f"rank_{rank}": save_id}


def check_same_save(state: Mapping[str, Any], save_id: str | None, directory: Path) -> None:
    """Refuse training state of another save than the shards beside it.

    Args:
        state: one rank's training state.
        save_id: what :func:`hyper_resume.checkpoint.loading.reading.read_save_id` returned; with None nothing is asked.
        directory: for the message.

    Raises:
        CheckpointMismatchError: it is of another save, or does not say.
    """
    if save_id is not None:
        refuse_mixed_saves(
            {"the shards": save_id, f"extra_state of rank {state['rank']}": state.get(SAVE_ID)}, directory
        )


def refuse_mixed_saves(found: Mapping[str, Any], directory: Path) -> None:
    """Refuse parts of different saves.

    Args:
        found: part, for the message -> the id of its save.
        directory: the step directory, for the message.

    Raises:
        CheckpointMismatchError: the ids differ.
    """
    if len(set(found.values())) > 1:
        raise CheckpointMismatchError(
            describe(
                "the checkpoint is put together from parts of different saves",
                where=str(directory),
                expected="metadata, shards and extra_state of one save",
                found=", ".join(f"{part}: {save_id}" for part, save_id in found.items()),
                do="restore the files that belong together, or resume from another checkpoint",
            )
        )
