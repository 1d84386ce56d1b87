"""A rank's trajectory read fast: the common form of a line is read here, every other one by the strict reader.

A report reads a hundred thousand lines that nearly all have the same form. Whatever is accepted here, the strict reader accepts
with the same result. Everything else is left to the strict reader, which also words the errors.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from conformance.records.trajectory import Digests, TrajectoryRecord, read_rank_file

_BARE = frozenset(
    ("global_step", "epoch", "batch_index", "loss", "lr", "group_lrs", "grad_norm", "sample_ids", "seconds")
)
_WITH_DIGESTS = _BARE | {"digests"}
_DIGESTS = frozenset(("model", "optimizer", "rng"))
_FLOAT, _INT = {float}, {int}


class _UnsureError(Exception):
    """This line is not of the common form."""


def read_rank_quickly(path: Path, rank: int) -> tuple[tuple[TrajectoryRecord, ...], bool]:
    """As :func:`conformance.records.trajectory.read_rank_file`.

    Raises:
        RecordError: see there.
    """
    *lines, rest = path.read_bytes().split(b"\n")
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
        if len(rows) != len(lines):
            raise _UnsureError
        records = [_record(row, rank, line) for row, line in zip(rows, lines, strict=True)]
        if any(one.global_step >= other.global_step for one, other in itertools.pairwise(records)):
            raise _UnsureError
    except (ValueError, _UnsureError):
        return read_rank_file(path, rank)
    return tuple(records), bool(rest)


def _record(row: Any, rank: int, line: bytes) -> TrajectoryRecord:
    if type(row) is not dict:
        raise _UnsureError
    keys, digests = len(row), None
    if row.keys() == _WITH_DIGESTS and row["digests"] is not None:
        digests = _digests(row["digests"])
        keys += 3 + len(digests.rng)
    elif row.keys() != _BARE and row.keys() != _WITH_DIGESTS:
        raise _UnsureError
    step, epoch, batch, norm = row["global_step"], row["epoch"], row["batch_index"], row["grad_norm"]
    is_common = (
        # A repeated key is visible in the text only.
        line.count(b'":') == keys
        and type(step) is type(epoch) is type(batch) is int
        and step >= 1
        and epoch >= 0
        and batch >= 0
        and type(row["loss"]) is type(row["lr"]) is type(row["seconds"]) is float
        and (norm is None or type(norm) is float)
        and type(row["group_lrs"]) is type(row["sample_ids"]) is list
        and set(map(type, row["group_lrs"])) <= _FLOAT
        and set(map(type, row["sample_ids"])) <= _INT
    )
    if not is_common:
        raise _UnsureError
    return TrajectoryRecord(
        rank=rank,
        global_step=step,
        epoch=epoch,
        batch_index=batch,
        loss=row["loss"],
        lr=row["lr"],
        group_lrs=tuple(row["group_lrs"]),
        grad_norm=norm,
        sample_ids=tuple(row["sample_ids"]),
        seconds=row["seconds"],
        digests=digests,
    )


def _digests(data: Any) -> Digests:
    if type(data) is not dict or data.keys() != _DIGESTS or type(data["rng"]) is not dict:
        raise _UnsureError
    rng = data["rng"]
    texts = [data["model"], data["optimizer"], *(value for value in rng.values() if value is not None)]
    if not all(type(text) is str and text for text in texts):
        raise _UnsureError
    return Digests(model=data["model"], optimizer=data["optimizer"], rng=rng)
