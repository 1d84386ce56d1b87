"""Checks on what was saved, when, and what is on disk."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Literal

from conformance.checks.outcome import CHECKS, CheckOutcome, verdict
from conformance.records.evidence import Evidence, EvidenceError

_STEP = re.compile(r"global_step_(0|[1-9][0-9]*)")
_POINTER = "latest_checkpoint_iteration.txt"
# What a run writes even when it saves nothing: its lock, and the certificate of its restore.
_LEFT_BY_RUNS = (".writer.lock", "certificates")
Listing = Mapping[str, tuple[int, str, int]]


@CHECKS.register(needs=("events.saved",))
def saved_steps(
    evidence: Evidence,
    *,
    leg: str,
    steps: tuple[int, ...],
    on_disk: bool = True,
    in_background: tuple[int, ...] | None = None,
) -> CheckOutcome:
    """The leg saved exactly these steps, in this order, none twice, and (``on_disk``) each is there and complete.

    ``in_background``: exactly these of them were asked for asynchronously.
    """
    found = evidence.leg(leg)
    events = found.events("saved")
    saved = [event.data["global_step"] for event in events]
    background = [event.data["global_step"] for event in events if event.data.get("save_async")]
    if in_background is not None and background != list(in_background):
        return verdict(
            False,
            expected=f"in the background {list(in_background)}",
            observed=f"in the background {background}",
            blames="policy",
        )
    complete = set(_complete_steps(found.disk_after, found.record.checkpoint_dir))
    lost = [step for step in steps if step not in complete] if on_disk else []
    observed = f"saved {saved}" + (f"; not complete on disk: {lost}" if lost else "")
    return verdict(
        saved == list(steps) and not lost,
        expected=f"saved {list(steps)}",
        observed=observed,
        blames="storage" if saved == list(steps) else "policy",
    )


@CHECKS.register(needs=("disk.dcp",))
def disk_steps(evidence: Evidence, *, leg: str, steps: tuple[int, ...], folder: str | None = None) -> CheckOutcome:
    """After the leg, exactly these step directories are there and complete. ``folder``: another than the leg's own."""
    found = evidence.leg(leg)
    complete = _complete_steps(found.disk_after, folder or found.record.checkpoint_dir)
    return verdict(
        complete == sorted(steps), expected=f"steps {sorted(steps)}", observed=f"steps {complete}", blames="storage"
    )


@CHECKS.register(needs=("disk.dcp",))
def pointer_is(evidence: Evidence, *, leg: str, step: int | None) -> CheckOutcome:
    """After the leg the pointer names this step (None: there is no pointer)."""
    found = evidence.leg(leg)
    record = found.record
    pointer = None
    if f"{record.checkpoint_dir}/{_POINTER}" in found.disk_after:
        pointer = (found.folder / "pointer_after.txt").read_text(encoding="utf-8").strip()
    wanted = None if step is None else str(step)
    return verdict(pointer == wanted, expected=f"pointer {wanted}", observed=f"pointer {pointer}", blames="storage")


@CHECKS.register(needs=("events.saved",))
def not_saved_again(evidence: Evidence, *, leg: str) -> CheckOutcome:
    """The leg saved nothing, and no file's bytes or time changed, except the lock and the certificates."""
    found = evidence.leg(leg)
    saved = [event.data["global_step"] for event in found.events("saved", None)]
    own = tuple(f"{found.record.checkpoint_dir}/{name}" for name in _LEFT_BY_RUNS)
    before, after = (
        {name: entry for name, entry in listing.items() if not name.startswith(own)}
        for listing in (found.disk_before, found.disk_after)
    )
    changed = _changes(before, after)
    return verdict(
        not saved and not changed,
        expected="nothing saved, nothing changed",
        observed=f"saved {saved}, changed {changed[:4]}",
        blames="policy",
    )


@CHECKS.register()
def nothing_changed_on_disk(evidence: Evidence, *, leg: str) -> CheckOutcome:
    """The leg created, removed or wrote no file below the case's disk folder."""
    found = evidence.leg(leg)
    changed = _changes(found.disk_before, found.disk_after)
    return verdict(
        not changed, expected="nothing changed", observed=", ".join(changed[:6]) or "nothing changed", blames="storage"
    )


@CHECKS.register()
def on_disk(
    evidence: Evidence,
    *,
    leg: str,
    paths: tuple[str, ...] = (),
    absent: tuple[str, ...] = (),
    moment: Literal["before", "after"] = "after",
) -> CheckOutcome:
    """Each glob of ``paths`` matches something in the checkpoint directory, and none of ``absent`` does."""
    found = evidence.leg(leg)
    listing = found.disk_before if moment == "before" else found.disk_after
    names = [
        name.removeprefix(f"{found.record.checkpoint_dir}/")
        for name in listing
        if name.startswith(f"{found.record.checkpoint_dir}/")
    ]
    if not paths and not absent:
        raise EvidenceError("neither paths nor absent is given, so the check could not have failed")
    missing = [pattern for pattern in paths if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]
    strange = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in absent)]
    return verdict(
        not missing and not strange,
        expected=f"there: {list(paths)}; not there: {list(absent)}",
        observed=f"missing {missing}, there though {strange[:4]}",
        blames="storage",
    )


@CHECKS.register(needs=("fault.file_operation",))
def operations_in_order(
    evidence: Evidence, *, leg: str, save: int, order: tuple[str, ...], rank: int = 0
) -> CheckOutcome:
    """The changes on disk of a save come in this order: each of ``order`` (``fsync .staging/*/manifest.json``) before the next.

    Of several that match, the last one before the next of ``order`` counts. No ``create`` or ``write`` of ``order`` may come
    again later. The leg needs ``given.tell_operations``.
    """
    operations = [event.data for event in evidence.leg(leg).events("operation", rank) if event.data["save"] == save]
    if not operations or len(order) < 2:
        raise EvidenceError("no operation was recorded" if not operations else "an order has two or more")
    done = [f"{item['what']} {item['where']}" for item in operations]
    end, wrong = len(done), ""
    for pattern in reversed(order):
        matching = [place for place, operation in enumerate(done) if fnmatch.fnmatchcase(operation, pattern)]
        before = [place for place in matching if place < end]
        writes = pattern.partition(" ")[0] in ("create", "write")
        if not before or (writes and before != matching):
            wrong = f"no {pattern} where it has to be" if not before else f"{pattern} comes again, too late"
            break
        end = before[-1]
    return verdict(
        not wrong,
        expected=", then ".join(order),
        observed=wrong or f"{len(done)} operations, in order",
        blames="storage",
    )


@CHECKS.register(needs=("disk.look",))
def buckets_on_disk(
    evidence: Evidence, *, look: str, present: tuple[str, ...] = (), absent: tuple[str, ...] = ()
) -> CheckOutcome:
    """The step directory of a look holds at least one entry of each of ``present``, and none of ``absent``.

    Each is a bucket (``optimizer``) or ``bucket/glob over its entries`` (``model/hidden.*``).
    """
    record = evidence.looks.get(look)
    if record is None or record.problem:
        raise EvidenceError(f"look {look}: {record.problem if record else 'was not taken'}")
    if not present and not absent:
        raise EvidenceError("neither present nor absent is given, so the check could not have failed")
    missing = [name for name in present if not _entries(record.found, name)]
    strange = [name for name in absent if _entries(record.found, name)]
    blamed = (missing or strange or ["storage"])[0].partition("/")[0]
    return verdict(
        not missing and not strange,
        expected=f"there: {list(present)}; not there: {list(absent)}",
        observed=f"missing {missing}, there though {strange}; buckets {sorted(record.found)}",
        blames=blamed,
    )


def _entries(found: Mapping[str, Mapping[str, str]], name: str) -> list[str]:
    bucket, _, pattern = name.partition("/")
    return [entry for entry in found.get(bucket, {}) if not pattern or fnmatch.fnmatchcase(entry, pattern)]


def _complete_steps(listing: Listing, checkpoint_dir: str) -> list[int]:
    steps = []
    for name, (size, _, _) in listing.items():
        if not name.startswith(f"{checkpoint_dir}/"):
            continue
        directory, _, rest = name.removeprefix(f"{checkpoint_dir}/").partition("/")
        match = _STEP.fullmatch(directory)
        if match and rest == ".metadata" and size > 0:
            steps.append(int(match.group(1)))
    return sorted(steps)


def _changes(before: Listing, after: Listing) -> list[str]:
    names = sorted({*before, *after})
    return [
        f"{'made' if name not in before else 'removed' if name not in after else 'changed'} {name}"
        for name in names
        if before.get(name) != after.get(name)
    ]
