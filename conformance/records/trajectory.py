"""Trajectory records: what a trainer records for each finished step, and their strict reader.

A leg writes ``trajectory_rank_{R}.jsonl`` into a directory of its own, one JSON line per finished optimizer step. The
reader accepts one defect only, a torn LAST line, which a rank that is killed while writing leaves behind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FILE_NAME = re.compile(r"trajectory_rank_(0|[1-9][0-9]*)\.jsonl")
_REQUIRED = frozenset(
    ("global_step", "epoch", "batch_index", "loss", "lr", "group_lrs", "grad_norm", "sample_ids", "seconds")
)
_OPTIONAL = frozenset(("digests",))


class RecordError(ValueError):
    """A record can't be trusted; the message names file and line."""


@dataclass(frozen=True, kw_only=True)
class Digests:
    """Digests of one rank's state after a step, as hex text. A stream the device lacks is None.

    ``extras`` is by name, for other stateful objects that the trainer holds; most trainers have none.
    """

    model: str
    optimizer: str
    rng: Mapping[str, str | None]
    extras: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrajectoryRecord:
    """One finished optimizer step on one rank.

    ``global_step`` counts finished optimizer steps (the first record holds 1); ``epoch`` and ``batch_index`` count
    from 0, ``batch_index`` being the last micro-batch of the step. ``sample_ids`` are the dataset indices of all
    micro-batches of the step on this rank, in order. ``grad_norm`` is None where the trainer measures none. Floats are
    unrounded.
    """

    rank: int
    global_step: int
    epoch: int
    batch_index: int
    loss: float
    lr: float
    group_lrs: tuple[float, ...]
    grad_norm: float | None
    sample_ids: tuple[int, ...]
    seconds: float
    digests: Digests | None


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """All records of one leg, by rank, in step order. ``torn_ranks`` ended in the middle of a line."""

    records: Mapping[int, tuple[TrajectoryRecord, ...]]
    torn_ranks: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have a file, ascending."""
        return tuple(sorted(self.records))

    def first_step(self, rank: int) -> int | None:
        """The rank's first recorded step; None when it finished none."""
        records = self.records[rank]
        return records[0].global_step if records else None

    def last_step(self, rank: int) -> int | None:
        """The rank's last recorded step; None when it finished none."""
        records = self.records[rank]
        return records[-1].global_step if records else None

    def last_common_step(self) -> int | None:
        """The last step that every rank has reached; None when some rank finished none."""
        steps = [self.last_step(rank) for rank in self.ranks]
        known = [step for step in steps if step is not None]
        return min(known) if known and len(known) == len(steps) else None


def trajectory_path(directory: Path, rank: int) -> Path:
    """Where ``rank``'s records of a leg are."""
    return directory / f"trajectory_rank_{rank}.jsonl"


def read_trajectory(directory: Path, *, ranks: int | None = None) -> Trajectory:
    """Read every rank's records of one leg.

    Args:
        directory: the leg's own trajectory directory.
        ranks: the world size, when it is known; then exactly the files of ranks 0 to ``ranks`` - 1 must be there.

    Raises:
        RecordError: a line other than a torn last one is malformed, a step is repeated or runs backwards, a rank's file
            is missing or one too many is there, or there is no file at all.
    """
    found: dict[int, Path] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _FILE_NAME.fullmatch(path.name)
        if match:
            found[int(match.group(1))] = path
    if not found:
        raise RecordError(f"{directory}: no trajectory_rank_R.jsonl here")
    expected = set(found) if ranks is None else set(range(ranks))
    for rank in sorted(expected ^ set(found)):
        problem = "is missing" if rank in expected else "is there, though"
        raise RecordError(f"{trajectory_path(directory, rank)}: rank {rank}'s file {problem} (world of {ranks} ranks)")
    records: dict[int, tuple[TrajectoryRecord, ...]] = {}
    torn: list[int] = []
    for rank, path in sorted(found.items()):
        records[rank], is_torn = read_rank_file(path, rank)
        if is_torn:
            torn.append(rank)
    return Trajectory(records=records, torn_ranks=tuple(torn))


def read_rank_file(path: Path, rank: int) -> tuple[tuple[TrajectoryRecord, ...], bool]:
    """Read one rank's records and say whether the file ends in a torn line.

    Raises:
        RecordError: see :func:`read_trajectory`.
    """
    # Split at newlines only: splitlines() also cuts elsewhere, and a torn line is one without its newline.
    *lines, rest = path.read_bytes().split(b"\n")
    records: list[TrajectoryRecord] = []
    for number, line in enumerate(lines, start=1):
        record = parse_line(line, rank=rank, where=f"{path}:{number}")
        if records and record.global_step <= records[-1].global_step:
            raise RecordError(
                f"{path}:{number}: global_step {record.global_step} after {records[-1].global_step}; "
                "steps of one leg neither repeat nor run backwards"
            )
        records.append(record)
    return tuple(records), bool(rest)


def parse_line(line: bytes, *, rank: int, where: str) -> TrajectoryRecord:
    """Turn one complete line into a record.

    Args:
        line: the line without its newline.
        rank: the rank whose file it is from.
        where: ``file:line`` for the message.

    Raises:
        RecordError: not a JSON object, an unknown or missing or repeated key, or a value of the wrong type.
    """
    try:
        data = _DECODER.decode(line.decode())
    except ValueError as error:
        raise RecordError(f"{where}: not a JSON record: {error}") from error
    if not isinstance(data, dict):
        raise RecordError(f"{where}: not a JSON object")
    unknown = set(data) - _REQUIRED - _OPTIONAL
    missing = _REQUIRED - set(data)
    if unknown or missing:
        raise RecordError(f"{where}: missing keys {sorted(missing)}, unknown keys {sorted(unknown)}")
    try:
        return TrajectoryRecord(
            rank=rank,
            global_step=_whole(data, "global_step", minimum=1),
            epoch=_whole(data, "epoch"),
            batch_index=_whole(data, "batch_index"),
            loss=_real(data["loss"], "loss"),
            lr=_real(data["lr"], "lr"),
            group_lrs=tuple(_real(value, "group_lrs") for value in _list(data, "group_lrs")),
            grad_norm=None if data["grad_norm"] is None else _real(data["grad_norm"], "grad_norm"),
            sample_ids=tuple(_id(value) for value in _list(data, "sample_ids")),
            seconds=_real(data["seconds"], "seconds"),
            digests=_digests(data["digests"]) if data.get("digests") is not None else None,
        )
    except TypeError as error:
        raise RecordError(f"{where}: {error}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


# One for all lines: json.loads would make one a line.
_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)


def _whole(data: dict[str, Any], key: str, minimum: int = 0) -> int:
    value = data[key]
    if type(value) is not int or value < minimum:
        raise TypeError(f"{key} must be a whole number from {minimum}, not {value!r}")
    return value


def _real(value: Any, key: str) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{key} must be a number, not {value!r}")
    return float(value)


def _list(data: dict[str, Any], key: str) -> list[Any]:
    value = data[key]
    if not isinstance(value, list):
        raise TypeError(f"{key} must be a list, not {value!r}")
    return value


def _id(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"sample_ids must be whole numbers, not {value!r}")
    return value


def _digests(data: Any) -> Digests:
    known = {"model", "optimizer", "rng"}
    if not isinstance(data, dict) or set(data) - {"extras"} != known or not isinstance(data["rng"], dict):
        raise TypeError(f"digests must hold model, optimizer and rng, not {data!r}")
    for name, value in (("model", data["model"]), ("optimizer", data["optimizer"])):
        if not isinstance(value, str) or not value:
            raise TypeError(f"digests.{name} must be hex text, not {value!r}")
    for name, value in data["rng"].items():
        if value is not None and (not isinstance(value, str) or not value):
            raise TypeError(f"digests.rng.{name} must be hex text or null, not {value!r}")
    extras = data.get("extras", {})
    if not isinstance(extras, dict) or not all(isinstance(value, str) and value for value in extras.values()):
        raise TypeError(f"digests.extras must hold hex text by name, not {extras!r}")
    return Digests(model=data["model"], optimizer=data["optimizer"], rng=dict(data["rng"]), extras=extras)
