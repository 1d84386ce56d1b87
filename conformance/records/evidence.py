"""The evidence of a case, read back for its checks: legs with their events, trajectory and disk; faults; looks."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.records.results import CalibrationRecord, FaultRecord, LegRecord, LookRecord
from conformance.records.trajectory import RecordError, Trajectory, read_trajectory

EVENT_KINDS = (
    "start",
    "configuration",
    "built",
    "callbacks",
    "log",
    "begin",
    "restored",
    "refused",
    "saved",
    "paused",
    "fault",
    "operation",
    "sabotage_fired",
    "error",
    "trouble",
    "end",
    "value",
)
JOB_NAME = "job.json"
# The environment variable in which a rank finds the path of its job.
JOB_VARIABLE = "CONFORMANCE_JOB"
DISK_BEFORE, DISK_AFTER = "disk_before.json", "disk_after.json"


class EvidenceError(ValueError):
    """What a check needs is missing, or could not have failed; the check is then an error, not a verdict."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event that a rank recorded. ``at`` counts seconds from the leg's start; ``data`` holds its other fields."""

    kind: str
    rank: int
    at: float
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LegEvidence:
    """One leg. ``folder`` is absolute; the disk listings are path -> (size in bytes, digest, mtime in nanoseconds)."""

    record: LegRecord
    folder: Path

    @functools.cached_property
    def trajectory(self) -> Trajectory:
        """The records of all its ranks.

        Raises:
            EvidenceError: there are none, or one of them is malformed.
        """
        try:
            return read_trajectory(self.folder, ranks=len(self.record.ranks))
        except RecordError as error:
            raise EvidenceError(f"leg {self.record.leg}: {error}") from error

    @functools.cached_property
    def all_events(self) -> tuple[Event, ...]:
        """Every event, rank by rank.

        Raises:
            EvidenceError: a line is malformed.
        """
        events = []
        for rank in range(len(self.record.ranks)):
            events += read_events(self.folder / f"events_rank_{rank}.jsonl", rank)
        return tuple(events)

    def events(self, kind: str, rank: int | None = 0) -> tuple[Event, ...]:
        """The events of one kind, in order, of one rank (None: all)."""
        assert kind in EVENT_KINDS, kind
        return tuple(event for event in self.all_events if event.kind == kind and rank in (None, event.rank))

    def one_event(self, kind: str, rank: int = 0) -> Event:
        """The only event of its kind.

        Raises:
            EvidenceError: there are none, or several.
        """
        found = self.events(kind, rank)
        if len(found) != 1:
            raise EvidenceError(f"leg {self.record.leg}, rank {rank}: {len(found)} events {kind!r}, expected one")
        return found[0]

    @property
    def disk_before(self) -> Mapping[str, tuple[int, str, int]]:
        """The case's disk folder when the leg began."""
        return read_listing(self.folder / DISK_BEFORE)

    @property
    def disk_after(self) -> Mapping[str, tuple[int, str, int]]:
        """The case's disk folder when all its processes were dead."""
        return read_listing(self.folder / DISK_AFTER)

    @property
    def error(self) -> Event | None:
        """The first error event of the lowest rank that has one."""
        found = self.events("error", None)
        return min(found, key=lambda event: event.rank) if found else None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All of one case. ``calibrations`` is by reference leg."""

    legs: Mapping[str, LegEvidence]
    faults: tuple[FaultRecord, ...]
    looks: Mapping[str, LookRecord]
    calibrations: Mapping[str, CalibrationRecord]

    def leg(self, name: str) -> LegEvidence:
        """One leg.

        Raises:
            EvidenceError: it was not run.
        """
        if name not in self.legs:
            raise EvidenceError(f"leg {name} was not run")
        return self.legs[name]


def unexpected_ends(record: LegRecord, wanted: str) -> str:
    """The processes that did not end as the fault of a leg demands, as text; empty when all did.

    A victim must have died of the signal ``wanted``. Any other rank must have ended with an error: exit code 0 and an unknown
    end are both wrong. The launcher of a node whose ranks were all killed must have been killed by the same signal; after a
    SIGTERM it ends its ranks and then itself with an error.
    """
    fault = record.fault
    assert fault is not None
    ends = [(f"rank {rank}", end, rank in fault.struck) for rank, end in enumerate(record.ranks)]
    size = len(record.ranks) // max(1, len(record.agents))
    for node, end in enumerate(record.agents):
        own = range(node * size, (node + 1) * size)
        is_struck = wanted == "SIGKILL" and all(rank in fault.struck for rank in own)
        ends.append((f"launcher {node}", end, is_struck))
    wrong = [
        f"{name}: {end.signal or ('unknown' if end.exit_code is None else f'exit code {end.exit_code}')}"
        for name, end, is_struck in ends
        if (end.signal != wanted if is_struck else end.signal is None and end.exit_code in (0, None))
    ]
    return ", ".join(wrong)


def rank_log(folder: Path, rank: int) -> Path:
    """The path of a rank's log in its leg's folder."""
    return folder / f"log_rank_{rank}.txt"


def read_events(path: Path, rank: int) -> list[Event]:
    """Read one rank's events; a torn last line (killed while writing) is left out.

    Raises:
        EvidenceError: the file is missing, or a line is malformed.
    """
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise EvidenceError(f"{path.name}: rank {rank} recorded no event") from error
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            data = json.loads(line)
            kind, at = data.pop("kind"), float(data.pop("at"))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise EvidenceError(f"{path.name}:{number}: no event: {error!r}") from error
        if kind not in EVENT_KINDS:
            raise EvidenceError(f"{path.name}:{number}: no event is called {kind!r}")
        events.append(Event(kind=kind, rank=rank, at=at, data=data))
    return events


def take_listing(folder: Path) -> dict[str, tuple[int, str, int]]:
    """Every path below ``folder`` -> (size in bytes, digest of the content, mtime in nanoseconds); links are not followed."""
    listing: dict[str, tuple[int, str, int]] = {}
    for root, directories, files in os.walk(folder):
        for name in sorted(directories + files):
            path = Path(root) / name
            status = path.lstat()
            if path.is_symlink():
                entry = (0, f"link to {path.readlink()}", 0)
            elif path.is_dir():
                entry = (0, "directory", 0)
            else:
                digest = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
                entry = (status.st_size, digest, status.st_mtime_ns)
            listing[str(path.relative_to(folder))] = entry
    return dict(sorted(listing.items()))


def read_listing(path: Path) -> Mapping[str, tuple[int, str, int]]:
    """Read a stored listing.

    Raises:
        EvidenceError: it is missing or malformed.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return {name: (int(item[0]), str(item[1]), int(item[2])) for name, item in raw.items()}
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise EvidenceError(f"{path.name}: {error}") from error
