"""Checks on the records of steps: equal to the reference, complete epochs, a learning rate that continues."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Literal

from conformance.checks.compare import ALL_COLUMNS, bits, cells, compare_trajectories, show
from conformance.checks.outcome import CHECKS, CheckOutcome, verdict
from conformance.records.comparison import Comparison, Divergence
from conformance.records.evidence import JOB_NAME, Evidence, EvidenceError, LegEvidence
from conformance.records.trajectory import TrajectoryRecord

Column = Literal["samples", "lr", "rng", "extras", "loss", "grad_norm", "optimizer", "model"]
_ALWAYS: tuple[Column, ...] = ("samples", "lr", "rng", "loss", "grad_norm", "optimizer", "model")
_NUMBERS = ("lr", "loss", "grad_norm")
# A calibrated bound is this multiple of the difference between two clean reference legs.
_SLACK = 4.0


@CHECKS.register(needs=("trajectory.loss",))
def trajectory_equals(
    evidence: Evidence,
    *,
    leg: str,
    against: str,
    steps: tuple[int, int],
    columns: tuple[Column, ...] = _ALWAYS,
    tolerance: Literal["exact", "calibrated", "device"] | float = "exact",
    constant: tuple[Column, ...] = (),
    still: tuple[str, ...] = (),
) -> CheckOutcome:
    """Every column of every step from ``steps[0]`` to ``steps[1]`` equals the reference's, on every rank.

    ``constant`` are columns that need not vary in the reference; ``still`` random streams that need not move
    (``torch_cpu``, ``python``, ``numpy``). ``exact`` needs two reference legs that agree bit for bit. With a number, or
    ``calibrated``, only lr, loss and grad_norm may be compared, by relative difference. ``device`` is ``exact`` where the
    device is reproducible (a CPU must be), otherwise ``calibrated`` on the columns that allow it.
    """
    reference, judged = evidence.leg(against), evidence.leg(leg)
    calibration = evidence.calibrations.get(against)
    if tolerance == "device":
        repeats = _device(reference) == "cpu" or (calibration is not None and calibration.equal)
        tolerance = "exact" if repeats else "calibrated"
        columns = columns if repeats else tuple(column for column in columns if column in (*_NUMBERS, "samples"))
    if tolerance != "exact":
        return _within(evidence, judged, reference, steps, columns, tolerance, constant)
    if calibration is None or not calibration.equal:
        found = "was not calibrated" if calibration is None else calibration.problem or str(calibration.divergence)
        raise EvidenceError(f"reference not reproducible: {found}")
    comparison = compare_trajectories(
        reference.trajectory, judged.trajectory, *steps, may_be_constant=constant, columns=columns
    )
    unmoved = [name for name in comparison.unmoved_streams if name.removeprefix("rng.") not in still]
    if unmoved:
        raise EvidenceError(f"{', '.join(unmoved)} never moves in {against}: so the check could not have failed")
    return _of_comparison(comparison, against)


def _of_comparison(comparison: Comparison, against: str) -> CheckOutcome:
    names = ", ".join(column.name for column in comparison.columns)
    span = f"steps {comparison.first_step}..{comparison.last_step}, {comparison.ranks} rank(s): {names}"
    first = comparison.divergence
    if first is None:
        return verdict(True, expected=f"{span} as in {against}", observed="identical", blames=None)
    different = sum(column.different for column in comparison.columns)
    observed = (
        f"{different} cells differ, first at step {first.step}, rank {first.rank}, {first.column}: "
        f"{first.resumed} instead of {first.reference}"
    )
    return verdict(False, expected=f"{span} as in {against}", observed=observed, blames=first.bucket, divergence=first)


def _within(
    evidence: Evidence,
    judged: LegEvidence,
    reference: LegEvidence,
    steps: tuple[int, int],
    columns: tuple[Column, ...],
    tolerance: str | float,
    constant: tuple[Column, ...],
) -> CheckOutcome:
    digested = [column for column in columns if column not in (*_NUMBERS, "samples")]
    if digested:
        raise EvidenceError(f"{', '.join(digested)} can only be compared exactly")
    calibration = evidence.calibrations.get(reference.record.leg)
    if isinstance(tolerance, str) and (calibration is None or calibration.problem):
        raise EvidenceError(f"reference {reference.record.leg} was not calibrated")
    _require_movement(reference, [column for column in columns if column not in constant])
    chosen = [column for column in ALL_COLUMNS if column in columns]
    bounds = {
        column: tolerance if isinstance(tolerance, float) else _SLACK * calibration.spread.get(column, 0.0)  # type: ignore[union-attr]
        for column in chosen
    }
    for rank in reference.trajectory.ranks:
        expected = {record.global_step: record for record in reference.trajectory.records[rank]}
        found = {record.global_step: record for record in judged.trajectory.records.get(rank, ())}
        for step in range(steps[0], steps[1] + 1):
            if step not in expected or step not in found:
                raise EvidenceError(f"rank {rank}, step {step}: no record on one side")
            for column in chosen:
                first = _first_apart(expected[step], found[step], column, bounds[column])
                if first is not None:
                    return verdict(
                        False,
                        expected=f"{column} within {bounds[column]:g}",
                        observed=f"{first.resumed} instead of {first.reference}, step {step}, rank {rank}",
                        blames=first.bucket,
                        divergence=first,
                    )
    limits = ", ".join(f"{column} {bound:g}" for column, bound in bounds.items())
    return verdict(True, expected=f"steps {steps[0]}..{steps[1]} within {limits}", observed="they are", blames=None)


def _device(leg: LegEvidence) -> str:
    """The device that the leg trained on, from its job."""
    job = json.loads((leg.folder / JOB_NAME).read_text(encoding="utf-8"))
    return str(job["given"]["device"])


def _require_movement(reference: LegEvidence, columns: Sequence[str]) -> None:
    """A column that never moves could not have differed.

    Raises:
        EvidenceError: one of them does not.
    """
    for column in columns:
        seen = {bits(value) for records in reference.trajectory.records.values() for record in records
                for value in cells(record, column).values()}  # fmt: skip
        if len(seen) < 2:
            raise EvidenceError(f"{column} never moves in {reference.record.leg}: so the check could not have failed")


def _first_apart(expected: TrajectoryRecord, found: TrajectoryRecord, column: str, bound: float) -> Divergence | None:
    for name, wanted in cells(expected, column).items():
        value = cells(found, column).get(name)
        if bits(wanted) == bits(value):
            continue
        if isinstance(wanted, float) and isinstance(value, float) and _apart(wanted, value) <= bound:
            continue
        bucket = {"samples": "train_dataloader", "lr": "lr_scheduler"}.get(column, "model")
        return Divergence(
            step=expected.global_step,
            rank=expected.rank,
            bucket=bucket,
            column=name,
            reference=show(wanted),
            resumed=show(value),
        )
    return None


def _apart(left: float, right: float) -> float:
    scale = max(abs(left), abs(right))
    return 0.0 if scale == 0.0 else abs(left - right) / scale


@CHECKS.register(needs=("trajectory.loss",))
def varies(evidence: Evidence, *, leg: str, column: Column, at_least: int = 2) -> CheckOutcome:
    """A column takes at least so many different values over the leg's steps, on every rank."""
    counts = [
        len({tuple(bits(value) for value in cells(record, column).values()) for record in records})
        for records in evidence.leg(leg).trajectory.records.values()
    ]
    return verdict(
        min(counts) >= at_least,
        expected=f"{column} takes {at_least} values or more",
        observed=f"{min(counts)} values",
        blames=None,
    )


@CHECKS.register(needs=("trajectory.samples",))
def data_order(
    evidence: Evidence,
    *,
    legs: tuple[str, ...],
    samples: int,
    epochs: tuple[int, ...],
    first_id: int = 0,
    complete: bool = True,
) -> CheckOutcome:
    """Over the joined legs, each epoch hands out every id once (``complete: false``: none twice), over all ranks.

    ``legs`` come in the order of their lives: where a later one has trained a step again, its record counts.
    """
    seen: dict[int, list[int]] = {}
    for record in joined(evidence, legs):
        seen.setdefault(record.epoch, []).extend(record.sample_ids)
    wanted = set(range(first_id, first_id + samples))
    problems = []
    for epoch in epochs:
        ids = seen.get(epoch, [])
        if not seen:
            raise EvidenceError(f"legs {', '.join(legs)}: no sample at all")
        repeated = sorted({number for number in ids if ids.count(number) > 1})
        strange, missing = sorted(set(ids) - wanted), sorted(wanted - set(ids)) if complete else []
        if not ids:
            problems.append(f"epoch {epoch}: not one sample")
            continue
        for word, found in (("repeated", repeated), ("missing", missing), ("strange", strange)):
            if found:
                problems.append(f"epoch {epoch}: {word} {found[:8]}")
    return verdict(
        not problems,
        expected=f"epochs {list(epochs)}: {'each' if complete else 'none twice'} of {samples} ids",
        observed="; ".join(problems) or "so it is",
        blames="train_dataloader",
    )


def joined(evidence: Evidence, legs: tuple[str, ...]) -> Iterator[TrajectoryRecord]:
    """The records of a run over its ``legs``, rank by rank; a step that a later leg trained again counts as that one's."""
    by_step: dict[tuple[int, int], TrajectoryRecord] = {}
    for name in legs:
        for rank, records in evidence.leg(name).trajectory.records.items():
            if records:
                start = records[0].global_step
                by_step = {key: item for key, item in by_step.items() if key[0] != rank or key[1] < start}
            by_step.update({(rank, record.global_step): record for record in records})
    for _, record in sorted(by_step.items()):
        yield record


@CHECKS.register(needs=("trajectory.lr",))
def lr_continues(evidence: Evidence, *, leg: str, against: str) -> CheckOutcome:
    """The lr of the leg's first step, of every group, is what ``against`` had at that step, and not the initial one."""
    records = evidence.leg(leg).trajectory.records[0]
    other = {record.global_step: record for record in evidence.leg(against).trajectory.records[0]}
    if not records or records[0].global_step not in other or 1 not in other:
        raise EvidenceError(f"{leg} and {against} have no step in common, or {against} does not begin at step 1")
    first, expected = records[0], other[records[0].global_step]
    if bits(expected.group_lrs) == bits(other[1].group_lrs):
        raise EvidenceError(f"step {first.global_step} has the lr of step 1: a restart could not have been seen")
    return verdict(
        bits(first.group_lrs) == bits(expected.group_lrs),
        expected=f"step {first.global_step}: {show(expected.group_lrs)}",
        observed=show(first.group_lrs),
        blames="lr_scheduler",
    )
