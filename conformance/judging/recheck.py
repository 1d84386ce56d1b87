"""Judge a run again from its records alone: nothing is started, nothing is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from conformance.judging.judge import judge
from conformance.matrix.case import CaseError, parse_case
from conformance.records.evidence import Evidence, LegEvidence
from conformance.records.results import (
    CalibrationRecord,
    CaseRecord,
    FaultRecord,
    LegRecord,
    LookRecord,
    ResultRecord,
    Results,
    read_results,
)


@dataclass(frozen=True, kw_only=True)
class Rejudged:
    """One case: the outcome in the records, and the outcome that judging them again gives."""

    key: str
    then: str
    now: str
    reason: str
    blamed_then: str | None
    blamed_now: str | None

    @property
    def agrees(self) -> bool:
        """True when both have the same outcome and the same bucket."""
        return (self.then, self.blamed_then) == (self.now, self.blamed_now)


def recheck(folder: Path) -> list[Rejudged]:
    """Judge every case of the run in ``folder`` again.

    Raises:
        RecordError: ``folder`` holds no whole report.
    """
    results = read_results(folder)
    return [_again(results, folder, result) for result in results.of(ResultRecord)]


def _again(results: Results, folder: Path, result: ResultRecord) -> Rejudged:
    now, reason, blamed = result.outcome, result.reason, result.blamed
    if result.outcome not in ("unsupported", "skipped"):
        (stored,) = results.of(CaseRecord, result.key)
        try:
            verdict = judge(parse_case(stored.case, file=result.key), stored_evidence(results, folder, result.key))
        except CaseError as error:
            now, reason, blamed = "error", f"the case can't be read any more: {error}", None
        else:
            now, reason, blamed = verdict.outcome, verdict.reason, verdict.blamed
    return Rejudged(
        key=result.key, then=result.outcome, now=now, reason=reason, blamed_then=result.blamed, blamed_now=blamed
    )


def stored_evidence(results: Results, folder: Path, key: str) -> Evidence:
    """The evidence of one case, from a run's records."""
    legs = {leg.leg: LegEvidence(record=leg, folder=folder / leg.folder) for leg in results.of(LegRecord, key)}
    calibrations = {
        name: calibration
        for name, leg in legs.items()
        for calibration in results.of(CalibrationRecord)
        if leg.record.folder in calibration.folders
    }
    return Evidence(
        legs=legs,
        faults=results.of(FaultRecord, key),
        looks={look.name: look for look in results.of(LookRecord, key)},
        calibrations=calibrations,
    )
