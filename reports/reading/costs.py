"""What saving, loading and skipping cost, as ``python -m benchmarks run`` recorded it.

Costs do not decide whether a run is accepted: a goal that was missed is shown and refuses nothing. Each figure is computed
again from the measurements in the same file, and records with another figure are refused.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.protocol import Figure
from benchmarks.reporting import ratios
from benchmarks.reporting.records import (
    FILE_NAME,
    AbsenceRecord,
    FailureRecord,
    FigureRecord,
    GrowthRecord,
    MeasurementRecord,
    RecordsError,
    Report,
    read_records,
)
from conformance.records.results import FILE_NAME as RESULTS_NAME
from conformance.records.trajectory import RecordError
from reports.reading.redact import redact, redact_command, redact_environment

# Of what a figure holds; another version of Python may round the last bit otherwise.
_NUMBERS = ("median", "least", "most", "lower_quartile", "upper_quartile")
_PLACES = 1e-9


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One benchmark. ``places`` holds the position of each point on ``axis``; both are empty where nothing was measured."""

    name: str
    title: str
    axis: str
    places: Mapping[str, float]
    figures: tuple[FigureRecord, ...]
    growths: tuple[GrowthRecord, ...]
    absences: tuple[AbsenceRecord, ...]
    failures: tuple[FailureRecord, ...]


@dataclass(frozen=True, kw_only=True)
class CostRun:
    """One run of benchmarks with its provenance; ``name`` is its folder's path below the one that was asked for.

    ``is_other_commit``: it was measured at another commit than the results were made of, as far as these record one.
    ``is_smoke``: at sizes that only show that everything runs.
    """

    name: str
    run_id: str
    schema: str
    is_smoke: bool
    rounds: int
    commit: str
    is_dirty: bool
    is_other_commit: bool
    versions: Mapping[str, str]
    system: str
    machine: Mapping[str, str]
    threads: int
    packages_digest: str
    environment: Mapping[str, str]
    command: str
    started_at: str
    seconds: float
    benchmarks: tuple[Cost, ...]

    @property
    def goals(self) -> tuple[FigureRecord, ...]:
        """Every figure that has a goal."""
        return tuple(one for cost in self.benchmarks for one in cost.figures if one.status != "no goal")

    @property
    def met(self) -> int:
        """How many goals are met."""
        return sum(one.status == "met" for one in self.goals)


# ---- reading ----------------------------------------------------------------------------------------------------------


def read_costs(folder: Path) -> dict[str, Report]:
    """Every run of benchmarks at or below ``folder``, by name, without those inside results folders below it.

    Raises:
        RecordError: a file is torn, without its footer, of another version, malformed, or its figures do not
            follow from its measurements.
    """
    found: dict[str, Report] = {}
    for root, directories, files in os.walk(folder):
        directories.sort()
        path = Path(root)
        if FILE_NAME in files:
            report = _read(path / FILE_NAME)
            found[report.header.run_id if path == folder else path.relative_to(folder).as_posix()] = report
        if RESULTS_NAME in files and path != folder:
            directories.clear()
    return found


def _read(path: Path) -> Report:
    try:
        report = read_records(path)
    except (RecordsError, UnicodeDecodeError) as error:
        raise RecordError(str(error) if isinstance(error, RecordsError) else f"{path}: {error}") from error
    _require_measured(report, path)
    return report


def _require_measured(report: Report, path: Path) -> None:
    """Every figure is what its measurements give, and the footer counts what is there."""
    measured: dict[tuple[str, str], dict[str, MeasurementRecord]] = {}
    for one in report.of(MeasurementRecord):
        measured.setdefault((one.benchmark, one.point), {})[one.contender] = one
    for figure in report.of(FigureRecord):
        where = f"{path}: {figure.benchmark}, {figure.point}: {figure.text!r}"
        try:
            again = _again(figure, measured.get((figure.benchmark, figure.point), {}))
        except ValueError as error:
            raise RecordError(f"{where} can't be made from its measurements: {error}") from error
        if not _is_same(figure, again):
            raise RecordError(
                f"{where} is {figure.median} ({figure.status}), its measurements give {again.median} ({again.status})"
            )
    for name in {record.benchmark for record in report.records if hasattr(record, "benchmark")}:
        if name not in report.header.benchmarks:
            raise RecordError(f"{path}: a record of {name!r}, of which the header knows nothing")
    counts = Counter(figure.status for figure in report.of(FigureRecord))
    for status in ("met", "not met", "not measured"):
        if report.footer.counts.get(status, 0) != counts[status]:
            counted = report.footer.counts.get(status, 0)
            raise RecordError(f"{path}: the footer counts {counted} goals {status}, there are {counts[status]}")


def _again(record: FigureRecord, measured: Mapping[str, MeasurementRecord]) -> FigureRecord:
    figure = Figure(
        text=record.text,
        above=record.above,
        below=record.below,
        quantity=record.quantity,
        relation=record.relation,
        bound=record.bound,
    )
    return ratios.judge(figure, measured, benchmark=record.benchmark, point=record.point)


def _is_same(one: FigureRecord, other: FigureRecord) -> bool:
    if (one.status, one.samples) != (other.status, other.samples):
        return False
    for name in _NUMBERS:
        left, right = getattr(one, name), getattr(other, name)
        if (left is None) != (right is None):
            return False
        if left is not None and not math.isclose(left, right, rel_tol=_PLACES):
            return False
    return True


# ---- for the report ---------------------------------------------------------------------------------------------------


def make_costs(found: Mapping[str, Report], commits: Collection[str]) -> tuple[CostRun, ...]:
    """What the report says of each run; ``commits`` are those of the results, without their marks of local changes."""
    return tuple(_run(name, report, commits) for name, report in sorted(found.items()))


def commit_of(source: str) -> str:
    """The commit of a header's ``source``, as short as the page shows it; empty where there is none."""
    return source.removesuffix("+")[:12]


def _run(name: str, report: Report, commits: Collection[str]) -> CostRun:
    header = report.header
    commit = commit_of(header.source)
    return CostRun(
        name=name,
        run_id=header.run_id,
        schema=header.schema,
        is_smoke=header.smoke,
        rounds=header.repeat,
        commit=commit,
        is_dirty=header.source.endswith("+"),
        is_other_commit=bool(commits) and set(commits) != {commit},
        versions=header.versions,
        system=header.system,
        machine={name: redact(text) for name, text in header.machine.items()},
        threads=header.threads,
        packages_digest=header.packages_digest,
        environment=redact_environment(header.environment),
        command=redact_command(header.argv),
        started_at=header.started_at,
        seconds=report.footer.seconds,
        benchmarks=tuple(_cost(name, title, report) for name, title in header.benchmarks.items()),
    )


def _cost(name: str, title: str, report: Report) -> Cost:
    measured = [one for one in report.of(MeasurementRecord) if one.benchmark == name]
    figures = [replace(one, reason=redact(one.reason)) for one in report.of(FigureRecord) if one.benchmark == name]
    return Cost(
        name=name,
        title=title,
        axis=measured[0].axis if measured else "",
        places={one.point: one.place for one in measured},
        # Figures with a goal come first.
        figures=tuple(sorted(figures, key=lambda one: one.status == "no goal")),
        growths=tuple(one for one in report.of(GrowthRecord) if one.benchmark == name),
        absences=tuple(
            replace(one, reason=redact(one.reason)) for one in report.of(AbsenceRecord) if one.benchmark == name
        ),
        failures=tuple(
            replace(one, reason=redact(one.reason)) for one in report.of(FailureRecord) if one.benchmark == name
        ),
    )
