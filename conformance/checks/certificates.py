"""Checks on the restore certificate: what a trainer reports of its own restore, bucket by bucket."""

from __future__ import annotations

from collections.abc import Mapping

from conformance.checks.outcome import CHECKS, CheckOutcome, verdict
from conformance.checks.restoring import Bucket
from conformance.records.certificate_text import certificate_lines, certified_lines
from conformance.records.evidence import Evidence, EvidenceError, LegEvidence

# An absent bucket that no run of this trainer has lost: neither side has any.
_NOTHING_THERE = "neither "
# An exact bucket of another run: what differs was declared as wanted.
_OVERRIDDEN = "overridden: "


@CHECKS.register(needs=("events.log",))
def certifies(
    evidence: Evidence,
    *,
    leg: str,
    exact: tuple[Bucket, ...] = (),
    degraded: tuple[Bucket, ...] = (),
    absent: tuple[Bucket, ...] = (),
    reasons: tuple[str, ...] = (),
) -> CheckOutcome:
    """The certificate that rank 0 logs has these verdicts, one per bucket, and no other bucket.

    Args:
        evidence: of the case.
        leg: the leg that restored.
        exact: buckets restored as they were saved.
        degraded: buckets restored differently.
        absent: buckets that were not requested, or that neither side has.
        reasons: texts, each of which must be in some line.
    """
    wanted = {
        bucket: word
        for word, buckets in (("exact", exact), ("degraded", degraded), ("absent", absent))
        for bucket in buckets
    }
    if not wanted:
        raise EvidenceError("no bucket is named, so the check could not have failed")
    events = evidence.leg(leg).all_events
    lines = certificate_lines(events)
    found = [(line.bucket, line.verdict) for line in certified_lines(events)]
    wrong = [bucket for bucket, word in wanted.items() if [word] != [text for name, text in found if name == bucket]]
    strange = [bucket for bucket, _ in found if bucket not in wanted]
    unsaid = [words for words in reasons if not any(words in line for line in lines)]
    return verdict(
        not wrong and not strange and not unsaid,
        expected=f"{_listed(wanted)}; saying {list(reasons)}",
        observed="; ".join(line.strip() for line in lines) or "no certificate",
        blames=(wrong or strange or ["policy"])[0],
    )


def certified_buckets(leg: LegEvidence) -> dict[str, str]:
    """Bucket -> ``exact``, ``nothing`` (neither side has any) or ``not exact``, in rank 0's last certificate.

    A bucket with differences that are declared as wanted is not exact: training goes on differently, on purpose. Empty without
    a certificate. A bucket is as good as its worst rank.
    """
    found: dict[str, str] = {}
    for line in certified_lines(leg.all_events):
        word = line.verdict
        if word == "absent":
            word = "nothing" if line.text.startswith(_NOTHING_THERE) else "not exact"
        is_other = word == "degraded" or line.text.startswith(_OVERRIDDEN)
        verdict = "not exact" if is_other else word
        found[line.bucket] = verdict if found.get(line.bucket) in (None, verdict) else "not exact"
    return found


def _listed(wanted: Mapping[Bucket, str]) -> str:
    return ", ".join(f"{bucket} {word}" for bucket, word in wanted.items())
