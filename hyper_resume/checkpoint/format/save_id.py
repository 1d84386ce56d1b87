"""The save id: every file of a step directory contains it, and all files must have the same.

A shard or a training state that was copied from another save has the right name, shapes and sizes. So every save has an id,
and every file contains it: ``.metadata`` (where DCP records the staging directory, whose name is the id), each rank's shard as
an entry ``save_id.rank_{R}``, and each rank's training state under the key ``save_id``. A checkpoint of stock DCP has no id,
and none is required.
"""

from __future__ import annotations

import re
from typing import Any

SAVE_ID = "save_id"
SHARD_ENTRY_PATTERN = re.compile(r"save_id\.(rank_[0-9]+)")


def add_save_id(payload: dict[str, Any], save_id: str, rank: int) -> None:
    """Add the entry to ``payload`` that stores the save id in this rank's shard file."""
    payload[SAVE_ID] = {f"rank_{rank}": save_id}
