"""Results folders, found and read strictly: incomplete records are refused, because a page of them would look complete."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from benchmarks.reporting.records import Report as Benchmarks
from conformance.plain_data import serial
from conformance.records.evidence import Event, EvidenceError, read_events
from conformance.records.results import (
    FILE_NAME,
    CaseRecord,
    LegRecord,
    Record,
    ResultRecord,
    Results,
    SabotageRecord,
)
from conformance.records.trajectory import RecordError, Trajectory, TrajectoryRecord, trajectory_path
from conformance.storage.records import STORAGE_NAME, Storage, read_storage
from reports.reading.costs import read_costs
from reports.reading.fast_trajectory import read_rank_quickly
from reports.reading.old_results import read_any_results
from reports.reading.unit_tests import RANK_SIDE_NAME, UNIT_TESTS_NAME, UnitTests, read_unit_tests

R = TypeVar("R")
# Suites whose results have no case: what was done is in their kill records.
_WITHOUT_CASE = ("soak", "sweep")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One results folder of an acceptance run.

    ``name`` is its path below the folder that was asked for (or its run id). ``trajectories`` and ``events`` are by the
    folder of their leg. Legs of sabotaged cases that a sabotage record summarises are not read: that record holds the outcome.
    """

    name: str
    folder: Path
    results: Results
    trajectories: Mapping[str, Trajectory] = field(default_factory=dict)
    events: Mapping[str, tuple[Event, ...]] = field(default_factory=dict)

    @functools.cached_property
    def _by_key(self) -> Mapping[str, tuple[Record, ...]]:
        found: dict[str, list[Record]] = {}
        for record in self.results.records:
            if hasattr(record, "key"):
                found.setdefault(record.key, []).append(record)
        return {key: tuple(records) for key, records in found.items()}

    def of(self, kind: type[R], key: str) -> tuple[R, ...]:
        """The records of one kind that belong to one case's run, in order."""
        return tuple(record for record in self._by_key.get(key, ()) if isinstance(record, kind))

    @functools.cached_property
    def summed_up(self) -> frozenset[tuple[str, str]]:
        """(sabotage, case) of the results that a sabotage record of this part summarises."""
        return frozenset((one.id, case) for one in self.results.of(SabotageRecord) for case in one.outcomes)

    def is_judged(self, result: ResultRecord) -> bool:
        """True when the result is about the trainer, and not about whether the suite notices a defect."""
        return (result.sabotage or "", result.case) not in self.summed_up


@dataclass(frozen=True, kw_only=True)
class Run:
    """All parts of one acceptance run, by name, and where there are any: counts of other tests, by file name, records of the
    storage proofs, and runs of benchmarks, by name.
    """

    parts: tuple[Part, ...]
    tests: Mapping[str, UnitTests]
    storage: Storage
    costs: Mapping[str, Benchmarks] = field(default_factory=dict)


def read_run(folders: Sequence[Path]) -> Run:
    """Read everything below ``folders``.

    Raises:
        RecordError: a folder holds no results; a part is torn, unfinished or malformed; a leg's evidence is missing or does
            not agree with its record; two parts have one name; records of benchmarks are incomplete.
    """
    parts: dict[str, Part] = {}
    tests: dict[str, UnitTests] = {}
    storage = Storage()
    costs: dict[str, Benchmarks] = {}
    for folder in folders:
        found = find_parts(folder)
        if not found:
            raise RecordError(f"{folder}: no {FILE_NAME} here or below; this is no results folder")
        for path in found:
            part = read_part(path, name=None if path == folder else path.relative_to(folder).as_posix())
            if part.name in parts:
                raise RecordError(f"{path}: a part called {part.name!r} is there twice")
            parts[part.name] = part
        for name in (UNIT_TESTS_NAME, RANK_SIDE_NAME):
            if (folder / name).is_file():
                tests[name] = read_unit_tests(folder / name)
        # The storage proofs write into a folder of their own, which holds no other results.
        for place in dict.fromkeys(
            [folder, *found, *(path.parent for path in sorted(folder.glob(f"*/{STORAGE_NAME}")))]
        ):
            if (place / STORAGE_NAME).is_file():
                storage += read_storage(place / STORAGE_NAME)
        for name, report in read_costs(folder).items():
            if name in costs:
                raise RecordError(f"{folder}: a run of benchmarks called {name!r} is there twice")
            costs[name] = report
    return Run(parts=tuple(parts[name] for name in sorted(parts)), tests=tests, storage=storage, costs=costs)


def find_parts(folder: Path) -> list[Path]:
    """Every results folder at or below ``folder`` that is not inside another one."""
    found = []
    for root, directories, files in os.walk(folder):
        directories.sort()
        if FILE_NAME in files:
            found.append(Path(root))
            directories.clear()
    return found


def read_part(folder: Path, name: str | None = None) -> Part:
    """Read one results folder with the evidence of its legs.

    Raises:
        RecordError: see :func:`read_run`.
    """
    results = read_any_results(folder)
    bare = Part(name=name or results.header.run_id, folder=folder, results=results)
    _require_whole(bare)
    keys = {result.key for result in results.of(ResultRecord) if bare.is_judged(result)}
    trajectories: dict[str, Trajectory] = {}
    events: dict[str, tuple[Event, ...]] = {}
    for leg in results.of(LegRecord):
        if leg.key in keys and leg.folder not in events:
            trajectories[leg.folder] = _trajectory(folder, leg)
            events[leg.folder] = _events(folder, leg)
    return Part(name=bare.name, folder=folder, results=results, trajectories=trajectories, events=events)


def plain(record: Any) -> dict[str, Any]:
    """A record as a row, without the fields that its version does not have."""
    row: dict[str, Any] = serial.to_plain(record)
    return row


def _require_whole(part: Part) -> None:
    """Every result is there once, with the case that it judged; every leg that a check names is there."""
    where = part.folder / FILE_NAME
    keys = Counter(result.key for result in part.results.of(ResultRecord))
    for key, count in keys.items():
        if count > 1:
            raise RecordError(f"{where}: two results are called {key}")
        if len(part.of(CaseRecord, key)) != 1 and part.results.header.suite not in _WITHOUT_CASE:
            raise RecordError(f"{where}: result {key} has {len(part.of(CaseRecord, key))} case records, expected one")
    for result in part.results.of(ResultRecord):
        legs = {leg.leg for leg in part.of(LegRecord, result.key)}
        for check in result.checks:
            for parameter in ("leg", "against", "saved_by", "other"):
                name = check.parameters.get(parameter)
                if isinstance(name, str) and name not in legs:
                    raise RecordError(f"{where}: result {result.key} judges leg {name}, which has no record")


def _leg_folder(folder: Path, leg: LegRecord) -> Path:
    inside = PurePosixPath(leg.folder)
    if inside.is_absolute() or ".." in inside.parts:
        raise RecordError(
            f"{folder / FILE_NAME}: leg {leg.leg} of {leg.key}: folder {leg.folder!r} lies outside of the run"
        )
    path = folder / inside
    if not path.is_dir():
        raise RecordError(f"{path}: leg {leg.leg} of {leg.key} is missing; copy the results folder whole")
    return path


def _trajectory(folder: Path, leg: LegRecord) -> Trajectory:
    """What the leg's ranks recorded, after a check that it agrees with the leg's record."""
    path = _leg_folder(folder, leg)
    records: dict[int, tuple[TrajectoryRecord, ...]] = {}
    torn = []
    for rank, (first, last) in enumerate(zip(leg.first_steps, leg.last_steps, strict=True)):
        file = trajectory_path(path, rank)
        if not file.is_file():
            if first is not None:
                raise RecordError(f"{file}: missing, though the rank finished steps {first}..{last}")
            continue
        records[rank], is_torn = read_rank_quickly(file, rank)
        if is_torn:
            torn.append(rank)
        own = records[rank]
        found = (own[0].global_step, own[-1].global_step) if own else (None, None)
        # Where one file can't be read the runner records None for all ranks.
        if found != (first, last) and (first, last) != (None, None):
            raise RecordError(f"{file}: steps {found[0]}..{found[1]}, the leg's record says {first}..{last}")
    return Trajectory(records=records, torn_ranks=tuple(torn))


def _events(folder: Path, leg: LegRecord) -> tuple[Event, ...]:
    path = _leg_folder(folder, leg)
    events: list[Event] = []
    for rank in range(len(leg.ranks)):
        file = path / f"events_rank_{rank}.jsonl"
        if not file.is_file() and leg.trouble is not None:
            continue  # it was never started, and its record says so
        try:
            events += read_events(file, rank)
        except EvidenceError as error:
            raise RecordError(f"{path}: leg {leg.leg} of {leg.key}: {error}") from error
    return tuple(events)
