"""Checks on how a leg ended and what it reported: faults, exit codes, errors, log lines, callbacks."""

from __future__ import annotations

from typing import Any, Literal

from conformance.checks.outcome import CHECKS, CheckOutcome, verdict
from conformance.records.evidence import Evidence, EvidenceError, LegEvidence, unexpected_ends
from conformance.records.results import RankEnd


@CHECKS.register(needs=("fault.pause",))
def fault_fired(evidence: Evidence, *, leg: str, signal: str | None = "SIGKILL") -> CheckOutcome:
    """The fault fired: the ranks that had to reach it did, and each victim died of this signal (None: of a raised error).

    The launcher of a node whose ranks were all killed died of it too; ranks that were not struck ended with an error.
    """
    found = evidence.leg(leg)
    fault = found.record.fault
    if fault is None:
        raise EvidenceError(f"leg {leg} has no fault")
    ends = [_end(end) for end in found.record.ranks]
    if fault.reached_by != fault.awaited:
        raise EvidenceError(f"the fault did not fire: reached by ranks {list(fault.reached_by)}, ended with {ends}")
    raised = all(end.exit_code for end in found.record.ranks)
    right = not unexpected_ends(found.record, signal) if signal else raised
    others_live = len(fault.struck) < len(ends)
    wanted = f"ranks {list(fault.struck)}: {signal or 'a non-zero exit'}" + (
        "; the others an error" if others_live else ""
    )
    agents = "".join(f"; launcher {_end(end)}" for end in found.record.agents)
    return verdict(right, expected=wanted, observed=", ".join(ends) + agents, blames=None)


def _end(end: RankEnd) -> str:
    return end.signal or ("unknown" if end.exit_code is None else f"exit code {end.exit_code}")


@CHECKS.register()
def exits(evidence: Evidence, *, leg: str, code: int | Literal["nonzero"] = 0) -> CheckOutcome:
    """Every rank ends with this exit code."""
    found = evidence.leg(leg)
    ends = [end.exit_code for end in found.record.ranks]
    right = all(end not in (0, None) for end in ends) if code == "nonzero" else all(end == code for end in ends)
    observed = f"exit codes {ends}" + (f"; {_error_text(found)}" if found.error else "")
    return verdict(right, expected=f"exit code {code}", observed=observed, blames="policy")


@CHECKS.register(needs=("events.error",))
def fails_with(
    evidence: Evidence, *, leg: str, error: str, contains: tuple[str, ...] = (), within_seconds: float = 20.0
) -> CheckOutcome:
    """Every rank ends with an error of this class (or derived from it) that contains these words, within the time."""
    found = evidence.leg(leg)
    if found.record.timed_out:
        raise EvidenceError(f"leg {leg} hung and was killed")
    events = [found.events("error", rank) for rank in range(len(found.record.ranks))]
    problems = []
    for rank, own in enumerate(events):
        if not own:
            problems.append(f"rank {rank}: no error")
            continue
        data = own[0].data
        lacking = [words for words in contains if words not in data["message"]]
        if error not in (data["class"], *data["bases"]) or lacking:
            problems.append(f"rank {rank}: {data['class']}: {data['message']}")
        if own[0].at > within_seconds:
            problems.append(f"rank {rank}: only after {own[0].at:.1f} s")
    if any(end.exit_code == 0 for end in found.record.ranks):
        problems.append("exit code 0")
    wanted = f"{error} with {', '.join(map(repr, contains))}" if contains else error
    return verdict(not problems, expected=wanted, observed="; ".join(problems) or "so it is", blames="storage")


@CHECKS.register(needs=("events.log",))
def logs(
    evidence: Evidence,
    *,
    leg: str,
    contains: str,
    level: Literal["INFO", "WARNING", "ERROR"] | None = None,
    count: int | None = None,
    rank: int = 0,
) -> CheckOutcome:
    """There are ``count`` log lines of this level with these words (None: at least one; 0: none)."""
    lines = [
        event.data["message"]
        for event in evidence.leg(leg).events("log", rank)
        if contains in event.data["message"] and level in (None, event.data["level"])
    ]
    right = bool(lines) if count is None else len(lines) == count
    wanted = "at least one" if count is None else str(count)
    return verdict(
        right,
        expected=f"{wanted} line(s) {level or ''} with {contains!r}",
        observed=f"{len(lines)}: {lines[:2]}",
        blames="policy",
    )


@CHECKS.register(needs=("events.log",))
def warns(evidence: Evidence, *, leg: str, contains: str, count: int | None = None) -> CheckOutcome:
    """There are ``count`` warnings with these words (None: at least one; 0: none)."""
    return logs(evidence, leg=leg, contains=contains, level="WARNING", count=count)


@CHECKS.register(needs=("events.callbacks",))
def callback_registered(
    evidence: Evidence, *, leg: str, registered: bool, name: str = "CheckpointerCallback"
) -> CheckOutcome:
    """The trainer has (or has not) a callback of this class."""
    names = evidence.leg(leg).one_event("callbacks").data["names"]
    return verdict(
        (name in names) is registered,
        expected=f"{name} {'is' if registered else 'is not'} registered",
        observed=f"callbacks {names}",
        blames="policy",
    )


@CHECKS.register(needs=("events.end",))
def ends_at(evidence: Evidence, *, leg: str, global_step: int, epoch: int | None = None) -> CheckOutcome:
    """Training ends by itself, with exit code 0, at this step (and epoch)."""
    found = evidence.leg(leg)
    ends = [(event.data["global_step"], event.data["epoch"]) for event in found.events("end", None)]
    wanted = (global_step, epoch)
    right = len(ends) == len(found.record.ranks) and all(
        step == wanted[0] and wanted[1] in (None, at) for step, at in ends
    )
    right = right and all(end.exit_code == 0 for end in found.record.ranks)
    return verdict(
        right,
        expected=f"global_step {global_step}" + (f", epoch {epoch}" if epoch is not None else ""),
        observed=f"(global_step, epoch) {ends}" if ends else _error_text(found),
        blames="progress",
    )


@CHECKS.register(needs=("events.value",))
def value_is(
    evidence: Evidence, *, leg: str, name: str, equals: int | float | str | bool, rank: int = 0
) -> CheckOutcome:
    """The last value that the leg reported under this name (``dataset_reads``, ``open_file_handles``...) is this."""
    values: list[Any] = [
        event.data["value"] for event in evidence.leg(leg).events("value", rank) if event.data["name"] == name
    ]
    if not values:
        raise EvidenceError(f"leg {leg} reported no value {name!r}")
    return verdict(values[-1] == equals, expected=f"{name} = {equals}", observed=f"{values[-1]}", blames="policy")


def _error_text(leg: LegEvidence) -> str:
    error = leg.error
    return f"{error.data['class']}: {error.data['message']}" if error else "it reported no error"
