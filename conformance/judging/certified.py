"""The certificate of every restore, compared with what the leg then trained: the check that no case has to name.

``exact`` means that the run goes on as the run that was saved. Where a case has that run uninterrupted (a reference leg), the
resumed leg's steps are compared with it, whatever the case's own checks say. It is that run only if

* two runs of the reference are equal bit for bit;
* the reference and the leg that saved have the same ``given``, but for what changes no step;
* the leg that saved was, at the saved step, where the reference was;
* no fault of the script edited what the checkpoint holds.

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
from conformance.records.trajectory import TrajectoryRecord

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
        for other in case.legs:
            if other.role != "reference" or _layout(case, other) != _layout(case, step):
                continue
            if _is_saved_run(case, other, saver, saved_step, evidence):
                yield from _compare(leg, evidence.legs[other.leg], saved_step, verdicts)
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


def _is_saved_run(case: Case, reference: LegStep, saver: LegStep, saved_step: int, evidence: Evidence) -> bool:
    """True when ``reference`` is, uninterrupted, the run that ``saver`` saved at ``saved_step``."""
    calibration = evidence.calibrations.get(reference.leg)
    if calibration is None or not calibration.equal:
        return False
    one, other = (replace(case.leg_given(leg), **_NO_MATTER) for leg in (reference, saver))
    # The trainer's own program plans its schedule up to the last step.
    is_planned_alike = one.config is None or reference.until_step == saver.until_step
    if one != other or not is_planned_alike:
        return False
    if saved_step == 0:
        return True
    expected, found = (_at_step(evidence.legs[leg.leg], saved_step) for leg in (reference, saver))
    return expected.keys() == found.keys() and not any(_differences(expected[rank], found[rank]) for rank in found)


def _layout(case: Case, leg: LegStep) -> tuple[object, ...]:
    """What decides which values the records of a step have, and in which order."""
    given = case.leg_given(leg)
    return given.world_size, given.optimizer.groups


def _steps(leg: LegEvidence) -> set[int]:
    return {record.global_step for own in leg.trajectory.records.values() for record in own}


def _at_step(leg: LegEvidence, step: int) -> dict[int, TrajectoryRecord]:
    records = leg.trajectory.records
    return {rank: record for rank, own in records.items() for record in own if record.global_step == step}


def _compare(
    leg: LegEvidence, reference: LegEvidence, saved_step: int, verdicts: Mapping[str, str]
) -> Iterator[CheckRecord]:
    """Compare the steps that both have; without one there is no record."""
    steps = sorted(_steps(leg) & _steps(reference))
    if not steps:
        return
    name, says = reference.record.leg, ", ".join(f"{bucket} {verdict}" for bucket, verdict in verdicts.items())
    inexact = {bucket for bucket, verdict in verdicts.items() if verdict == "not exact"}
    if steps[0] != saved_step + 1:
        first = None if "progress" in inexact else _misplaced(saved_step, steps[0])
    else:
        first = _first_unexplained(leg, reference, steps, inexact)
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


def _first_unexplained(
    leg: LegEvidence, reference: LegEvidence, steps: Sequence[int], inexact: Collection[str]
) -> Divergence | None:
    """The first difference, if no bucket of ``inexact`` can have caused it."""
    causes: Set[str] = set().union(*(_CAN_CHANGE.get(bucket, _ANY) for bucket in inexact))
    for step in steps:
        expected, found = _at_step(reference, step), _at_step(leg, step)
        differences = [
            (ALL_COLUMNS.index(column), rank, difference)
            for rank in sorted(expected.keys() & found.keys())
            for column, difference in _differences(expected[rank], found[rank]).items()
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
