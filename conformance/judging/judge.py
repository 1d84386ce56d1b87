"""Turns the evidence of a case into its outcome. Pure, so a run can be judged again from its records alone.

1. Harness trouble (a leg whose own code is broken, a fault on disk that did nothing) is ``error``: nothing was shown.
2. Each leg ends as the script says: by its fault, or by itself with exit code 0 unless a check says otherwise.
3. The case's own checks. If one failed, the case is ``fail``; otherwise, if one could not judge, it is ``error``.
4. Each restore's certificate (:mod:`conformance.judging.certified`). One that says exact where training diverges makes the case
   ``false_exact``, whatever its checks, level and known failures say.
"""

from __future__ import annotations

from dataclasses import dataclass

from conformance.checks import run_check
from conformance.judging.certified import certified_checks
from conformance.matrix.case import Case
from conformance.matrix.script import LegStep
from conformance.records.evidence import Evidence, LegEvidence, unexpected_ends
from conformance.records.results import CheckRecord, Outcome

_ENDS = "ends_as_scripted"
# Checks that state how a leg has to end.
_ENDING_CHECKS = ("exits", "fails_with", "ends_at")
_FAULT_SIGNALS = {"kill": "SIGKILL", "terminate": "SIGTERM"}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a case, with its reason and checks. ``blamed`` is the bucket of the first failed check that names one."""

    outcome: Outcome
    reason: str
    checks: tuple[CheckRecord, ...]
    blamed: str | None


def judge(case: Case, evidence: Evidence) -> Verdict:
    """Judge one case by its evidence."""
    trouble = _trouble(case, evidence)
    if trouble is not None:
        return Verdict(outcome="error", reason=trouble, checks=(), blamed=None)
    checks = [check for leg in case.legs if (check := _ending(case, leg, evidence)) is not None]
    checks += [run_check(row.check, row.parameters, evidence, blames=row.blames) for row in case.expect]
    certified = certified_checks(case, evidence)
    checks += certified
    failed = [check for check in checks if check.status == "failed"]
    broken = [check for check in checks if check.status == "error"]
    blamed = next((check.blames for check in failed if check.blames), None)
    false = [check for check in certified if check.status == "failed"]
    if false:
        outcome: Outcome = "false_exact"
        reason = f"expected: {false[0].expected}; found {false[0].observed}"
    elif failed:
        outcome = "fail"
        reason = f"{failed[0].check}: expected {failed[0].expected}; found {failed[0].observed}"
    elif broken:
        outcome, reason = "error", f"{broken[0].check}: {broken[0].observed}"
    else:
        outcome, reason = "pass", ""
    return Verdict(outcome=_leveled(case, outcome), reason=reason, checks=tuple(checks), blamed=blamed)


def _leveled(case: Case, outcome: Outcome) -> Outcome:
    if outcome in ("error", "false_exact"):
        return outcome
    if case.level == "note":
        return "note"
    if case.known_fail:
        return "known_fail" if outcome == "fail" else "unexpected_pass"
    return outcome


def _trouble(case: Case, evidence: Evidence) -> str | None:
    for fault in evidence.faults:
        if not fault.fired:
            return f"the fault {fault.asked.get('fault')} did not fire: {'; '.join(fault.observed)}"
    for look in evidence.looks.values():
        if look.problem:
            return f"look {look.name}: {look.problem}"
    for step in case.legs:
        leg = evidence.legs.get(step.leg)
        if leg is None:
            return f"leg {step.leg} was not run"
        if leg.record.trouble is not None:
            return f"leg {step.leg}: {leg.record.trouble}"
        if step.role == "reference" and not _ended_well(leg):
            return f"reference leg {step.leg}: {_how(leg)}"
        if step.fault is not None and not _reached(leg) and _ended_well(leg):
            return f"the fault of leg {step.leg} did not fire: it ended by itself before that"
    sabotaged = [leg for leg in evidence.legs.values() if leg.record.sabotage]
    if sabotaged and not any(leg.events("sabotage_fired", None) for leg in sabotaged):
        return f"the sabotage {sabotaged[0].record.sabotage} did not fire"
    return None


def _reached(leg: LegEvidence) -> bool:
    return leg.record.fault is not None and leg.record.fault.reached_by == leg.record.fault.awaited


def _ending(case: Case, step: LegStep, evidence: Evidence) -> CheckRecord | None:
    """The implicit expectation on how a leg ends, as a failed check; None where it holds."""
    leg = evidence.legs[step.leg]
    has_ending_check = any(row.check in _ENDING_CHECKS and row.parameters.get("leg") == step.leg for row in case.expect)
    if leg.record.timed_out:
        return _broken_ending(step, "it ends", f"it hung and was killed after {leg.record.seconds:.0f} s")
    if step.fault is None:
        if has_ending_check or _ended_well(leg):
            return None
        return _broken_ending(step, "exit code 0", _how(leg))
    wanted = _FAULT_SIGNALS.get(step.fault.kind)
    if not _reached(leg):
        return _broken_ending(step, f"it comes to its fault after step {step.fault.after_step}", _how(leg))
    if wanted and not has_ending_check and (found := unexpected_ends(leg.record, wanted)):
        return _broken_ending(step, f"every victim dies of {wanted}, and the others end with an error", found)
    return None


def _broken_ending(step: LegStep, expected: str, observed: str) -> CheckRecord:
    return CheckRecord(
        check=_ENDS,
        parameters={"leg": step.leg},
        status="failed",
        expected=f"leg {step.leg}: {expected}",
        observed=observed,
        divergence=None,
        blames=None,
    )


def _ended_well(leg: LegEvidence) -> bool:
    return not leg.record.timed_out and all(end.exit_code == 0 for end in leg.record.ranks)


def _how(leg: LegEvidence) -> str:
    ends = [end.signal or f"exit code {end.exit_code}" for end in leg.record.ranks]
    error = f"; {leg.error.data['class']}: {leg.error.data['message']}" if leg.error else ""
    hung = "hung; " if leg.record.timed_out else ""
    return f"{hung}{', '.join(sorted(set(ends)))}{error}"
