"""Checks on what a restore brought back: the position of training, and every entry of every bucket."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Literal

from conformance.checks.outcome import CHECKS, CheckOutcome, verdict
from conformance.records.comparison import Divergence
from conformance.records.evidence import Evidence, EvidenceError, LegEvidence

Bucket = Literal["model", "optimizer", "progress", "lr_scheduler", "train_dataloader", "rng_state", "stateful"]
Moment = Literal["built", "begin", "restored", "refused", "saved", "end"]
_EVENT_OF: Mapping[str, str] = {
    "built": "built",
    "begin": "begin",
    "restored": "restored",
    "refused": "refused",
    "saved": "saved",
    "end": "end",
}


@CHECKS.register(needs=("events.restored",))
def resumed_at(evidence: Evidence, *, leg: str, global_step: int) -> CheckOutcome:
    """Every rank restored this step, and its first record (if it trained at all) is the next one."""
    found = evidence.leg(leg)
    places = [event.data["global_step"] for event in found.events("restored", None)]
    if not places:
        return verdict(
            False, expected=f"global_step {global_step} restored", observed=_why_not(found), blames="storage"
        )
    firsts = [step for step in found.record.first_steps if step is not None]
    right = set(places) == {global_step} and len(places) == len(found.record.ranks)
    right = right and all(step == global_step + 1 for step in firsts)
    return verdict(
        right,
        expected=f"global_step {global_step}, then step {global_step + 1}",
        observed=f"restored {places}, first steps {firsts}",
        blames="progress",
    )


@CHECKS.register(needs=("events.restored",))
def starts_at(
    evidence: Evidence, *, leg: str, start_epoch: int, start_step: int, global_step: int | None = None
) -> CheckOutcome:
    """Training begins at this epoch and this optimizer step within it (and with this counter)."""
    begins = evidence.leg(leg).events("begin", None)
    if not begins:
        observed = _why_not(evidence.leg(leg))
        return verdict(False, expected="training begins", observed=observed, blames="progress")
    found = {(event.data["start_epoch"], event.data["start_step"], event.data["global_step"]) for event in begins}
    wanted = {(start_epoch, start_step, global_step if global_step is not None else item[2]) for item in found}
    return verdict(
        found == wanted,
        expected=f"start_epoch {start_epoch}, start_step {start_step}"
        + (f", global_step {global_step}" if global_step is not None else ""),
        observed="; ".join(f"start_epoch {e}, start_step {s}, global_step {g}" for e, s, g in sorted(found)),
        blames="progress",
    )


@CHECKS.register(needs=("events.begin",))
def not_restored(evidence: Evidence, *, leg: str) -> CheckOutcome:
    """Nothing was restored: training begins from scratch, at step 0."""
    found = evidence.leg(leg)
    begins = [event.data["global_step"] for event in found.events("begin", None)]
    restored = len(found.events("restored", None))
    return verdict(
        bool(begins) and set(begins) == {0} and restored == 0,
        expected="training begins at global_step 0, nothing restored",
        observed=f"begins at {begins}, {restored} restores" if begins else _why_not(found),
        blames="storage",
    )


@CHECKS.register(needs=("events.restored", "events.saved"))
def bucket_equals(
    evidence: Evidence,
    *,
    leg: str,
    saved_by: str,
    step: int,
    buckets: tuple[Bucket, ...],
    at: Moment = "restored",
    at_step: int | None = None,
    entries: str = "*",
    nonzero: tuple[str, ...] = (),
    may_be_as_built: tuple[Bucket, ...] = (),
) -> CheckOutcome:
    """Every entry of the buckets, right after the restore, is what ``saved_by`` held when it saved ``step``.

    Args:
        evidence: of the case.
        leg: the leg that restored.
        saved_by: the leg that saved.
        step: of the save.
        buckets: compared in this order; a failure is attributed to the first that differs.
        at: another moment of ``leg`` to compare: ``built`` (before the restore), ``begin``, ``saved`` (with
            ``at_step``), ``end``.
        at_step: which save, for ``at: saved``.
        entries: a glob over entry names; only those are compared.
        nonzero: globs; each must match an entry, and none of what it matches may be all zeros.
        may_be_as_built: buckets that may already be equal before the restore (otherwise that is an error).
    """
    if not evidence.leg(saved_by).events("saved"):
        raise EvidenceError(f"leg {saved_by} saved nothing")
    judged = evidence.leg(leg)
    if at == "restored" and not judged.events("restored"):
        return verdict(False, expected="a restore", observed=_why_not(judged), blames=buckets[0])
    compared = 0
    for rank in range(len(judged.record.ranks)):
        expected = snapshot(evidence.leg(saved_by), "saved", step, rank)
        found = snapshot(judged, at, at_step, rank)
        built = snapshot(judged, "built", None, rank)
        for bucket in buckets:
            wanted = _chosen(expected, bucket, entries)
            if bucket not in may_be_as_built and wanted == _chosen(built, bucket, entries):
                raise EvidenceError(f"{bucket} is the same before the restore, so the check could not have failed")
            _require_nonzero(expected, bucket, nonzero)
            compared += len(wanted)
            first = first_difference(wanted, _chosen(found, bucket, entries), bucket, step, rank)
            if first is not None:
                return verdict(
                    False,
                    expected=f"{bucket} as saved at step {step}: {first.column} {first.reference}",
                    observed=first.resumed,
                    blames=bucket,
                    divergence=first,
                )
    if compared == 0:
        raise EvidenceError(f"{', '.join(buckets)}: no entry to compare")
    unmatched = [pattern for pattern in nonzero if not _matched(evidence.leg(saved_by), step, buckets, pattern)]
    if unmatched:
        raise EvidenceError(f"nonzero: {unmatched[0]!r} matches no entry")
    return verdict(True, expected=f"{', '.join(buckets)} as saved", observed=f"{compared} entries equal", blames=None)


@CHECKS.register(needs=("events.saved",))
def bucket_differs(
    evidence: Evidence,
    *,
    leg: str,
    saved_by: str,
    step: int,
    buckets: tuple[Bucket, ...],
    at: Moment = "restored",
    at_step: int | None = None,
) -> CheckOutcome:
    """Each bucket is NOT what ``saved_by`` held at ``step`` (it was not restored, on purpose)."""
    expected = snapshot(evidence.leg(saved_by), "saved", step, 0)
    found = snapshot(evidence.leg(leg), at, at_step, 0)
    equal = [bucket for bucket in buckets if _chosen(expected, bucket, "*") == _chosen(found, bucket, "*")]
    return verdict(
        not equal,
        expected=f"{', '.join(buckets)}: another state than at the save",
        observed=f"the same: {', '.join(equal)}" if equal else "another",
        blames=equal[0] if equal else None,
    )


@CHECKS.register(needs=("events.restored",))
def bucket_as_built(
    evidence: Evidence,
    *,
    leg: str,
    buckets: tuple[Bucket, ...],
    entries: str = "*",
    at: Literal["begin", "refused"] = "begin",
) -> CheckOutcome:
    """The restore left each bucket as it was built, on every rank. ``at: refused``: after a restore that was refused."""
    judged = evidence.leg(leg)
    if at == "refused" and judged.events("begin", None):
        return verdict(False, expected="training does not begin", observed="it began", blames="storage")
    places = [(bucket, rank) for bucket in buckets for rank in range(len(judged.record.ranks))]
    for bucket, rank in places:
        built = _chosen(snapshot(judged, "built", None, rank), bucket, entries)
        found = _chosen(snapshot(judged, at, None, rank), bucket, entries)
        if not built and not found:
            raise EvidenceError(f"{bucket}: no entry {entries!r} to compare")
        first = first_difference(built, found, bucket, 0, rank)
        if first is not None:
            return verdict(
                False,
                expected=f"{bucket} as built: {first.column} {first.reference}",
                observed=first.resumed,
                blames=bucket,
                divergence=first,
            )
    return verdict(True, expected=f"{', '.join(buckets)} as built", observed="so it is", blames=None)


@CHECKS.register(needs=("events.restored", "events.saved"))
def dtype_kept(
    evidence: Evidence, *, leg: str, saved_by: str, step: int, entries: str = "*", dtype: str | None = None
) -> CheckOutcome:
    """Every optimizer entry has the dtype and shape that it was saved with (``dtype``: and at least one has this one)."""
    judged = evidence.leg(leg)
    if not judged.events("restored"):
        return verdict(False, expected="a restore", observed=_why_not(judged), blames="optimizer")
    expected = _types(_chosen(snapshot(evidence.leg(saved_by), "saved", step, 0), "optimizer", entries))
    found = _types(_chosen(snapshot(judged, "restored", None, 0), "optimizer", entries))
    if not expected:
        raise EvidenceError(f"no optimizer entry {entries!r} was saved")
    if dtype is not None and not any(text.startswith(f"{dtype}[") for text in expected.values()):
        raise EvidenceError(f"no saved entry is {dtype}")
    first = first_difference(expected, found, "optimizer", step, 0)
    return verdict(
        first is None,
        expected="types and shapes as saved" if first is None else f"{first.column}: {first.reference}",
        observed=f"{len(expected)} entries keep theirs" if first is None else first.resumed,
        blames="optimizer",
        divergence=first,
    )


def snapshot(leg: LegEvidence, at: str, step: int | None, rank: int) -> Mapping[str, Mapping[str, str]]:
    """The state of every bucket at a moment of a leg: bucket -> entry -> text (type, shape, digest; or a plain value).

    Raises:
        EvidenceError: the leg never reached that moment.
    """
    events = leg.events(_EVENT_OF[at], rank)
    if step is not None:
        events = tuple(event for event in events if event.data.get("global_step") == step)
    if not events or "buckets" not in events[-1].data:
        where = at if step is None else f"{at}, step {step}"
        raise EvidenceError(f"leg {leg.record.leg}, rank {rank}: no state at {where}; {_why_not(leg)}")
    buckets: Mapping[str, Mapping[str, str]] = events[-1].data["buckets"]
    return buckets


def first_difference(
    expected: Mapping[str, str], found: Mapping[str, str], bucket: str, step: int, rank: int
) -> Divergence | None:
    """The first entry, in the order of names, that differs or is on one side only."""
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            return Divergence(
                step=step,
                rank=rank,
                bucket=bucket,
                column=name,
                reference=expected.get(name, "absent"),
                resumed=found.get(name, "absent"),
            )
    return None


def _chosen(buckets: Mapping[str, Mapping[str, str]], bucket: str, entries: str) -> dict[str, str]:
    return {name: text for name, text in buckets.get(bucket, {}).items() if fnmatch.fnmatchcase(name, entries)}


def _types(entries: Mapping[str, str]) -> dict[str, str]:
    return {name: text.partition("]")[0] + "]" for name, text in entries.items() if "]" in text}


def _require_nonzero(buckets: Mapping[str, Mapping[str, str]], bucket: str, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        zeros = [name for name, text in _chosen(buckets, bucket, pattern).items() if text.endswith(" zero")]
        if zeros:
            raise EvidenceError(f"{zeros[0]} was all zeros when it was saved, so the check could not have failed")


def _matched(leg: LegEvidence, step: int, buckets: tuple[Bucket, ...], pattern: str) -> bool:
    found = snapshot(leg, "saved", step, 0)
    return any(_chosen(found, bucket, pattern) for bucket in buckets)


def _why_not(leg: LegEvidence) -> str:
    error = leg.error
    return f"no restore; {error.data['class']}: {error.data['message']}" if error else "no restore"
