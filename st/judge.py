"""The judge: a proof's legs, held against its reference leg. Pure; can be run again on stored trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conformance.check import VERDICT_COLUMNS, ComparisonError, compare_trajectories
from conformance.proof_record import Comparison, Divergence, LegComparison, LegRecord
from conformance.record import Trajectory
from st.proof import Proof


class NotJudgedError(RuntimeError):
    """The legs ran, but what they left can't be judged: the result is unknown, which is neither pass nor fail."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The outcome of a proof whose legs all went as scripted."""

    verdict: str
    divergence: Divergence | None
    comparisons: tuple[LegComparison, ...]


def judge(proof: Proof, trajectories: Mapping[str, Trajectory]) -> Judgement:
    """Hold every leg against the reference.

    Args:
        proof: the proof.
        trajectories: each leg's records by its label.

    Raises:
        NotJudgedError: the reference is incomplete or does not repeat (the interrupted leg, which nothing was restored
            into, differs from it), or a comparison could not have failed.
    """
    reference = trajectories["reference"]
    last_step = _reference_end(reference)
    comparisons: list[LegComparison] = []
    divergences: list[Divergence] = []
    for script in proof.script[1:]:
        trajectory = trajectories[script.label]
        first_step = 1 if script.resumes_at is None else script.resumes_at + 1
        found = _wrong_start(trajectory, first_step)
        if found is None:
            upto = min(trajectory.last_common_step() or 0, last_step)
            comparison = _compare(reference, trajectory, first_step, upto, proof, script.label)
            comparisons.append(LegComparison(label=script.label, comparison=comparison))
            found = comparison.divergence
            if script.fault is None:
                found = found or _wrong_end(trajectory, last_step)
        if found is not None and script.leg == "interrupted":
            raise NotJudgedError(
                f"reference not reproducible: the interrupted leg differs {where(found, 'interrupted')}"
            )
        divergences += [found] if found is not None else []
    divergence = min(divergences, key=lambda item: item.step, default=None)
    first_resumed = next(script.resumes_at for script in proof.script if script.resumes_at is not None) + 1
    columns = ", ".join(VERDICT_COLUMNS)
    verdict = f"identical, steps {first_resumed}..{last_step}, {proof.ranks} ranks: {columns}"
    if divergence is not None:
        verdict = f"DIFFERENT: first {where(divergence, 'resumed')}"
    return Judgement(verdict=verdict, divergence=divergence, comparisons=tuple(comparisons))


def require_pointer(killed: LegRecord, resumes_at: int) -> None:
    """A leg can resume where the proof says only if the leg before it left the pointer there.

    Raises:
        NotJudgedError: it did not.
    """
    pointer = killed.fault.observed_pointer if killed.fault is not None else None
    if pointer != resumes_at:
        raise NotJudgedError(
            f"when leg {killed.label} was dead, the pointer said {pointer}, but the proof resumes at {resumes_at}: "
            "the save was not committed by then, or the kill came late"
        )


def where(divergence: Divergence, name: str) -> str:
    """A divergence as one clause; ``name`` says whose value stands beside the reference's."""
    return (
        f"at step {divergence.step}, rank {divergence.rank}, bucket {divergence.bucket} (column {divergence.column}): "
        f"reference {divergence.reference}, {name} {divergence.resumed}"
    )


def _reference_end(reference: Trajectory) -> int:
    """The reference's last step, which all its ranks share."""
    firsts = {reference.first_step(rank) for rank in reference.ranks}
    lasts = {reference.last_step(rank) for rank in reference.ranks}
    if firsts != {1} or len(lasts) != 1:
        raise NotJudgedError(f"the reference leg is incomplete: first steps {firsts}, last steps {lasts} of its ranks")
    last = lasts.pop()
    assert last is not None  # it has a first step
    return last


def _wrong_start(trajectory: Trajectory, first_step: int) -> Divergence | None:
    """A leg that does not start with the step after the one it was to resume at."""
    for rank in trajectory.ranks:
        found = trajectory.first_step(rank)
        if found is None:
            raise NotJudgedError(f"rank {rank} has finished no step")
        if found != first_step:
            return _step_divergence(min(found, first_step), rank, str(first_step), str(found))
    return None


def _wrong_end(trajectory: Trajectory, last_step: int) -> Divergence | None:
    """A last leg that stops before, or goes on after, the reference's last step."""
    for rank in trajectory.ranks:
        found = trajectory.last_step(rank)
        assert found is not None  # _wrong_start has seen its first step
        if found < last_step:
            return _step_divergence(found + 1, rank, str(found + 1), "absent")
        if found > last_step:
            return _step_divergence(last_step + 1, rank, "absent", str(last_step + 1))
    return None


def _step_divergence(step: int, rank: int, reference: str, resumed: str) -> Divergence:
    return Divergence(
        step=step, rank=rank, bucket="progress", column="global_step", reference=reference, resumed=resumed
    )


def _compare(
    reference: Trajectory, trajectory: Trajectory, first_step: int, last_step: int, proof: Proof, label: str
) -> Comparison:
    try:
        return compare_trajectories(reference, trajectory, first_step, last_step, may_be_constant=proof.may_be_constant)
    except ComparisonError as error:
        raise NotJudgedError(f"leg {label} can't be compared: {error}") from error
