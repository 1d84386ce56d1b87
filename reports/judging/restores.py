"""What each restore did: the restored state compared with the saved one, entry by entry, from the legs' events."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from conformance.records.evidence import Event
from conformance.records.results import BUCKETS, CheckRecord, LegRecord
from reports.contents.document import BucketCell, Certificate, Resume
from reports.judging.rule_of_four import compared_with, four_answers
from reports.reading.read import Part
from reports.reading.redact import redact

Snapshot = Mapping[str, Mapping[str, str]]
# A message of torch in every single-process run; it says nothing about a restore.
_NOISE = "torch.distributed is disabled"
_MOST_DIFFERENT = 40


def certificates(part: Part, legs: Sequence[LegRecord], checks: Sequence[CheckRecord]) -> tuple[Certificate, ...]:
    """One for each leg that restored something, in order. ``checks`` are the case's."""
    found = []
    for place, leg in enumerate(legs):
        before = [other for other in legs[:place] if other.checkpoint_dir == leg.checkpoint_dir]
        restored = {event.rank: event for event in part.events.get(leg.folder, ()) if event.kind == "restored"}
        if restored:
            found.append(_certificate(part, before, leg, restored, checks))
    return tuple(found)


def _certificate(
    part: Part,
    before: Sequence[LegRecord],
    leg: LegRecord,
    restored: Mapping[int, Event],
    checks: Sequence[CheckRecord],
) -> Certificate:
    step = min(restored.values(), key=lambda event: event.rank).data.get("global_step")
    cells = []
    for rank, event in sorted(restored.items()):
        saved = _saved(part, before, step, rank)
        found: Snapshot = event.data.get("buckets") or {}
        # A bucket that is empty on both sides (a trainer without other stateful objects) is left out.
        names = [
            name
            for name in (*BUCKETS, *sorted(set(found) - set(BUCKETS)))
            if found.get(name) or (saved or {}).get(name)
        ]
        cells += [_cell(name, rank, saved, found) for name in names]
    return Certificate(
        leg=leg.leg,
        step=step if isinstance(step, int) else None,
        cells=tuple(cells),
        warnings=_warnings(part.events.get(leg.folder, ())),
        four=four_answers(part.events.get(leg.folder, ()), leg.leg, checks),
        compared_with=compared_with(leg.leg, checks),
    )


def _saved(part: Part, legs: Sequence[LegRecord], step: Any, rank: int) -> Snapshot | None:
    """The rank's state when the newest save of that step before was made; None where no leg of the case made it."""
    for leg in reversed(legs):
        for event in reversed(part.events.get(leg.folder, ())):
            if event.kind == "saved" and event.rank == rank and event.data.get("global_step") == step:
                buckets: Snapshot = event.data.get("buckets") or {}
                return buckets
    return None


def _cell(name: str, rank: int, saved: Snapshot | None, found: Snapshot) -> BucketCell:
    own, other = found.get(name, {}), (saved or {}).get(name, {})
    different = [
        (entry, other.get(entry, "-"), own.get(entry, "-"))
        for entry in dict.fromkeys([*other, *own])
        if own.get(entry) != other.get(entry)
    ]
    if saved is None or not other:
        state: Any = "no_counterpart"
        different = []
    elif not own:
        state = "absent"
    else:
        state = "differs" if different else "exact"
    return BucketCell(
        bucket=name, rank=rank, state=state, entries=len(own), different=tuple(different[:_MOST_DIFFERENT])
    )


def _warnings(events: Sequence[Event]) -> tuple[str, ...]:
    """The trainer's warnings before its first step, each once, without paths."""
    found: dict[str, None] = {}
    begun: set[int] = set()
    for event in events:
        if event.kind == "begin":
            begun.add(event.rank)
        if event.kind == "log" and event.data.get("level") == "WARNING" and event.rank not in begun:
            message = str(event.data.get("message", "")).strip()
            if _NOISE not in message:
                found.setdefault(redact(message))
    return tuple(found)


def resumes(part: Part, legs: Sequence[LegRecord]) -> tuple[Resume, ...]:
    """Each leg that was ended by a fault, with the leg that resumed after it."""
    found = []
    for leg, following in itertools.pairwise(legs):
        if leg.fault is None or following.restore_from is None:
            continue
        lasts = [step for step in leg.last_steps if step is not None]
        begun = [event for event in part.events.get(following.folder, ()) if event.kind == "begin"]
        resumed_at = begun[0].data.get("global_step") if begun else None
        killed_after = min(lasts) if lasts else None
        outage = _outage(leg, following)
        ready = max((event.at for event in begun), default=None)
        found.append(
            Resume(
                interrupted=leg.leg,
                resumed=following.leg,
                killed_after=killed_after,
                resumed_at=resumed_at,
                lost_steps=None if killed_after is None or resumed_at is None else max(0, killed_after - resumed_at),
                seconds=None if ready is None else ready + (outage or 0.0),
                measured="restart" if outage is None else "outage",
            )
        )
    return tuple(found)


def _outage(leg: LegRecord, following: LegRecord) -> float | None:
    """Seconds from a leg's end to the next one's start; None where the records do not hold when legs began."""
    first, second = leg.started_at, following.started_at
    if not first or not second:
        return None
    return max(0.0, (datetime.fromisoformat(second) - datetime.fromisoformat(first)).total_seconds() - leg.seconds)
