"""The certificate of every restore, compared with what the leg then trained: the check that no case has to name.

``exact`` means that the run goes on as the run that was saved. Where a case has that run uninterrupted (a reference leg), the
resumed leg's steps are compared with it, whatever the case's own checks say. It is that run only if

* two runs of the reference are equal bit for bit;
* the reference and the leg that saved have the same ``given``, but for what changes no step;
* the leg that saved was, at the saved step, where the reference was;
* no fault of the script edited what the checkpoint holds.

Where the leg that saved was elsewhere (it had resumed on another mesh), it is itself the uninterrupted run: the steps that it
trained after the save are compared. A reference of its ``given`` must then show that such a training repeats bit for bit.

The leg that resumed may be given something else (another lr, a base model): then its certificate must not say ``exact``, unless
the difference is declared as wanted and the certificate names it (``exact (overridden: ...)``, which promises no bits). It is
left out only where records can't be compared: another world size, or the parameter groups in another order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from conformance.checks.certificates import certified_buckets
from conformance.checks.compare import ALL_COLUMNS, DIGESTED_COLUMNS, first_difference
from conformance.matrix.case import Case
from conformance.matrix.faults import FAULTS
from conformance.matrix.given import CheckpointGiven
from conformance.matrix.script import FaultStep, LegStep
from conformance.records.comparison import Divergence
from conformance.records.evidence import Evidence, EvidenceError, LegEvidence
from conformance.records.results import CheckRecord
from conformance.records.trajectory import Trajectory, TrajectoryRecord

CERTIFIED = "certified_exact"
# What of `given` changes no step: when and where it is saved, and what the harness does meanwhile.
_NO_MATTER: Mapping[str, Any] = {
    "checkpoint": CheckpointGiven(),
    "folder": "",
    "save_at_step_zero": False,
    "hold_saves": 0,
    "second_writer": False,
    "tell_operations": False,
}
_ANY = frozenset(ALL_COLUMNS)
# Bucket -> the columns that can differ in the first step after a restore because this bucket is not exact. In later steps any
# column can: each step computes with the results of the one before.
_CAN_CHANGE: Mapping[str, frozenset[str]] = {
    "model": frozenset({"loss", "grad_norm", "extras", "optimizer", "model"}),
    "optimizer": frozenset({"lr", "extras", "optimizer", "model"}),
    "lr_scheduler": frozenset({"lr", "extras", "optimizer", "model"}),
    "rng_state": _ANY - {"lr"},
    "progress": _ANY,
    "train_dataloader": _ANY,
    "stateful": _ANY,
}


def certified_checks(case: Case, evidence: Evidence) -> list[CheckRecord]:
    """One record for each leg that was compared by its certificate; a failed one is a false ``exact``.

    A leg that can't be compared has no record: it restored nothing, certified nothing, trained nothing, or is another run.
    """
    found: list[CheckRecord] = []
    for place, step in enumerate(case.script):
        if isinstance(step, LegStep) and step.role != "reference":
            found += _checks_of(case, place, step, evidence)
    return found


def _checks_of(case: Case, place: int, step: LegStep, evidence: Evidence) -> Iterator[CheckRecord]:
    leg = evidence.legs[step.leg]
    verdicts = certified_buckets(leg)
    if not verdicts or "exact" not in verdicts.values():
        return
    try:
        source = _saved_by(case, place, leg, evidence)
        if source is None:
            return
        saver, saved_step = source
        for run in _saved_runs(case, step, saver, saved_step, evidence):
            yield from _compare(leg, run, saved_step, verdicts)
    except EvidenceError:
        return  # a leg without records of steps


def _saved_by(case: Case, place: int, leg: LegEvidence, evidence: Evidence) -> tuple[LegStep, int] | None:
    """The leg that saved what ``leg`` restored, and the step; None where it can't be known, or a fault edited it."""
    restored = leg.events("restored")
    if not restored or not restored[-1].data["path"]:
        return None
    name = PurePath(restored[-1].data["path"]).name
    for earlier in reversed(case.script[:place]):
        if isinstance(earlier, FaultStep) and FAULTS.entries[earlier.fault].marks.get("edits"):
            return None
        if isinstance(earlier, LegStep) and earlier.role != "reference":
            saves = [event for event in evidence.legs[earlier.leg].events("saved") if event.data["directory"] == name]
            if saves:
                return earlier, int(saves[-1].data["global_step"])
    return None


def _saved_runs(
    case: Case, step: LegStep, saver: LegStep, saved_step: int, evidence: Evidence
) -> Iterator[LegEvidence]:
    """Yield the legs that are, uninterrupted, the run that ``saver`` saved, and whose records ``step`` can be compared with."""
    repeating = [leg for leg in case.legs if _repeats(leg, evidence) and _is_alike(case, leg, saver)]
    references = [leg for leg in repeating if _is_at(evidence, leg, saver, saved_step)]
    found = references or ([saver] if repeating else [])
    for leg in found:
        if _layout(case, leg) == _layout(case, step):
            yield evidence.legs[leg.leg]


def _repeats(leg: LegStep, evidence: Evidence) -> bool:
    """True for a reference of which two runs are equal bit for bit."""
    calibration = evidence.calibrations.get(leg.leg)
    return leg.role == "reference" and calibration is not None and calibration.equal


def _is_alike(case: Case, reference: LegStep, saver: LegStep) -> bool:
    """True when both legs are given the same training."""
    one, other = (replace(case.leg_given(leg), **_NO_MATTER) for leg in (reference, saver))
    # The trainer's own program plans its schedule up to the last step.
    return one == other and (one.config is None or reference.until_step == saver.until_step)


def _is_at(evidence: Evidence, reference: LegStep, saver: LegStep, step: int) -> bool:
    """True when both legs are at the same point after ``step``."""
    if step == 0:
        return True
    expected, found = (_at_step(evidence.legs[leg.leg].trajectory, step) for leg in (reference, saver))
    return expected.keys() == found.keys() and not any(_differences(expected[rank], found[rank]) for rank in found)


def _layout(case: Case, leg: LegStep) -> tuple[object, ...]:
    """What decides which values the records of a step have, and in which order."""
    given = case.leg_given(leg)
    return given.world_size, given.optimizer.groups


def _steps(trajectory: Trajectory) -> set[int]:
    return {record.global_step for own in trajectory.records.values() for record in own}


def _at_step(trajectory: Trajectory, step: int) -> dict[int, TrajectoryRecord]:
    records = trajectory.records
    return {rank: record for rank, own in records.items() for record in own if record.global_step == step}


def _compare(
    leg: LegEvidence, reference: LegEvidence, saved_step: int, verdicts: Mapping[str, str]
) -> Iterator[CheckRecord]:
    """Compare the steps that both have; without one there is no record."""
    if not _steps(leg.trajectory) & _steps(reference.trajectory):
        return
    name, says = reference.record.leg, ", ".join(f"{bucket} {verdict}" for bucket, verdict in verdicts.items())
    first = false_exact(reference.trajectory, leg.trajectory, saved_step, verdicts)
    observed = "identical, or explained by what is not exact"
    if first is not None:
        where = f"step {first.step}, rank {first.rank}, {first.column}"
        observed = f"{where}: {first.resumed} instead of {first.reference}"
    yield CheckRecord(
        check=CERTIFIED,
        parameters={"leg": leg.record.leg, "against": name},
        status="passed" if first is None else "failed",
        expected=f"leg {leg.record.leg} trains as {name} after step {saved_step}, because its certificate says: {says}",
        observed=observed,
        divergence=first,
        blames=None if first is None else first.bucket,
    )


def false_exact(
    reference: Trajectory, found: Trajectory, saved_step: int, verdicts: Mapping[str, str]
) -> Divergence | None:
    """The first difference from the uninterrupted run that the certificate of a restore denies.

    Args:
        reference: the uninterrupted run.
        found: what was trained after the restore.
        saved_step: the step that was restored.
        verdicts: what :func:`~conformance.checks.certificates.certified_buckets` returns.

    Returns:
        None where nothing is certified as exact, no step is in both, or a bucket that is not exact explains the difference.
    """
    steps = sorted(_steps(found) & _steps(reference))
    if not steps or "exact" not in verdicts.values():
        return None
    inexact = {bucket for bucket, verdict in verdicts.items() if verdict == "not exact"}
    if steps[0] != saved_step + 1:
        return None if "progress" in inexact else _misplaced(saved_step, steps[0])
    return _first_unexplained(found, reference, steps, inexact)


def _first_unexplained(
    found: Trajectory, reference: Trajectory, steps: Sequence[int], inexact: Collection[str]
) -> Divergence | None:
    """The first difference, if no bucket of ``inexact`` can have caused it."""
    causes: Set[str] = set().union(*(_CAN_CHANGE.get(bucket, _ANY) for bucket in inexact))
    for step in steps:
        expected, own = _at_step(reference, step), _at_step(found, step)
        differences = [
            (ALL_COLUMNS.index(column), rank, difference)
            for rank in sorted(expected.keys() & own.keys())
            for column, difference in _differences(expected[rank], own[rank]).items()
        ]
        unexplained = [item for item in differences if ALL_COLUMNS[item[0]] not in causes]
        if unexplained:
            return min(unexplained, key=lambda item: item[:2])[2]
        if differences:
            return None  # from here on the two are different runs
    return None


def _misplaced(saved_step: int, first_step: int) -> Divergence:
    return Divergence(
        step=saved_step + 1,
        rank=0,
        bucket="progress",
        column="global_step",
        reference=str(saved_step + 1),
        resumed=str(first_step),
    )


def _differences(expected: TrajectoryRecord, found: TrajectoryRecord) -> dict[str, Divergence]:
    """Column -> its first difference, of the columns that both records have."""
    has_digests = expected.digests is not None and found.digests is not None
    compared = {
        column: first_difference(expected, found, column)
        for column in ALL_COLUMNS
        if has_digests or column not in DIGESTED_COLUMNS
    }
    return {column: difference for column, difference in compared.items() if difference is not None}
