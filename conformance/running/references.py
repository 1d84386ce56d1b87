"""Reference legs: run once per signature (everything a leg is made from), and twice where a case compares exactly with it."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.checks.compare import ALL_COLUMNS, bits, cells, show
from conformance.plain_data.serial import to_plain
from conformance.processes.launching import Launcher
from conformance.records.comparison import Divergence
from conformance.records.results import CalibrationRecord, LegRecord
from conformance.records.trajectory import RecordError, Trajectory, TrajectoryRecord, read_trajectory
from conformance.running.adapter import Adapter, Job
from conformance.running.legs import LegPlan, run_leg

_NUMBERS = ("loss", "lr", "grad_norm")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A reference leg, and its calibration, if one was requested."""

    record: LegRecord
    calibration: CalibrationRecord | None
    new: bool


class References:
    """The reference legs of one run, by what they are made from. Safe to use from several threads."""

    def __init__(self, run: Path, *, keeps_disk: bool = True) -> None:
        """``run`` is the run's folder. Without ``keeps_disk`` what the legs saved is neither listed nor kept."""
        self._run = run
        self._keeps_disk = keeps_disk
        self._lock = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}
        self._known: dict[str, Reference] = {}

    def get(
        self, job: Job, adapter: Adapter, launcher: Launcher, *, calibrate: bool, limit_seconds: float
    ) -> Reference:
        """Return the reference leg of ``job``, run now if it was not before; ``new`` is true for the first caller."""
        signature = signature_of(job)
        with self._lock:
            busy = self._busy.setdefault(signature, threading.Lock())
        with busy:
            known = self._known.get(signature)
            if known is not None and (known.calibration is not None or not calibrate):
                return known
            record = (
                known.record
                if known is not None
                else self._run_leg(signature, "a", job, adapter, launcher, limit_seconds)
            )
            calibration = None
            if calibrate:
                second = self._run_leg(signature, "b", job, adapter, launcher, limit_seconds)
                calibration = self._compare(signature, record, second)
            reference = Reference(record=record, calibration=calibration, new=False)
            self._known[signature] = reference
            return replace(reference, new=True)

    def _run_leg(
        self, signature: str, which: str, job: Job, adapter: Adapter, launcher: Launcher, limit_seconds: float
    ) -> LegRecord:
        folder = self._run / "references" / signature / which
        plan = LegPlan(
            key=f"reference {signature}",
            job=job,
            folder=folder / "legs" / "reference",
            run=self._run,
            disk=folder / "disk",
            limit_seconds=limit_seconds,
            shared=True,
            listed=self._keeps_disk,
        )
        record = run_leg(plan, adapter, launcher)
        if not self._keeps_disk:
            shutil.rmtree(plan.disk)
        return record

    def _compare(self, signature: str, first: LegRecord, second: LegRecord) -> CalibrationRecord:
        folders = (first.folder, second.folder)
        try:
            left, right = (read_trajectory(self._run / folder, ranks=len(first.ranks)) for folder in folders)
        except RecordError as error:
            return _uncalibrated(signature, folders, str(error))
        for record in (first, second):
            if record.trouble or any(end.exit_code != 0 for end in record.ranks):
                return _uncalibrated(
                    signature, folders, f"{record.folder} did not end well: {record.trouble or record.ranks}"
                )
        return compare_references(signature, folders, left, right)


def signature_of(job: Job) -> str:
    """A short digest of all that a reference leg is made from."""
    made_from = json.dumps([to_plain(job.given), job.until_step, job.world_size], sort_keys=True)
    return hashlib.blake2b(made_from.encode(), digest_size=6).hexdigest()


def compare_references(
    signature: str, folders: tuple[str, ...], left: Trajectory, right: Trajectory
) -> CalibrationRecord:
    """Compare two reference legs: every value of every step and rank."""
    counts = {rank: len(records) for rank, records in left.records.items()}
    if counts != {rank: len(records) for rank, records in right.records.items()} or not sum(counts.values()):
        return _uncalibrated(signature, folders, "the two reference legs have different steps, or none")
    divergence: Divergence | None = None
    spread = dict.fromkeys(_NUMBERS, 0.0)
    for rank in left.ranks:
        for one, other in zip(left.records[rank], right.records[rank], strict=True):
            divergence = divergence or _difference(one, other)
            for name in _NUMBERS:
                spread[name] = max(spread[name], _apart(getattr(one, name), getattr(other, name)))
    return CalibrationRecord(
        signature=signature,
        folders=folders,
        steps=max(counts.values()),
        equal=divergence is None,
        divergence=divergence,
        spread=spread,
        problem=None,
    )


def _difference(one: TrajectoryRecord, other: TrajectoryRecord) -> Divergence | None:
    if (one.digests is None) != (other.digests is None) or one.global_step != other.global_step:
        raise RecordError("the two reference legs recorded different things")
    columns = [column for column in ALL_COLUMNS if one.digests or column in ("samples", *_NUMBERS)]
    for column in columns:
        found = cells(other, column)
        for name, wanted in cells(one, column).items():
            if bits(wanted) != bits(found.get(name)):
                return Divergence(
                    step=one.global_step,
                    rank=one.rank,
                    bucket="model",
                    column=name,
                    reference=show(wanted),
                    resumed=show(found.get(name)),
                )
    return None


def _apart(left: float | None, right: float | None) -> float:
    if left is None or right is None or bits(left) == bits(right):
        return 0.0
    scale = max(abs(left), abs(right))
    return abs(left - right) / scale if scale else 0.0


def _uncalibrated(signature: str, folders: tuple[str, ...], problem: str) -> CalibrationRecord:
    return CalibrationRecord(
        signature=signature, folders=folders, steps=0, equal=False, divergence=None, spread={}, problem=problem
    )
