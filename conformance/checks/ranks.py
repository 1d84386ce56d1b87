"""Checks across ranks: which ranks have the same samples and random streams, which share none, and whose copies are equal."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from itertools import combinations
from typing import Literal

from conformance.checks.compare import bits, cells
from conformance.checks.outcome import CHECKS, CheckOutcome, verdict
from conformance.records.evidence import Evidence, EvidenceError, LegEvidence
from conformance.records.trajectory import TrajectoryRecord

_COPIED = ("model", "optimizer", "stateful")
_BUCKET_OF_COLUMN = {"samples": "train_dataloader", "rng": "rng_state"}


@CHECKS.register(needs=("trajectory.samples", "ranks.many"))
def ranks_share(
    evidence: Evidence, *, leg: str, column: Literal["samples", "rng"], groups: tuple[tuple[int, ...], ...]
) -> CheckOutcome:
    """At every step the ranks of a group have the same samples (or streams), and ranks of two groups never have.

    ``groups`` are all ranks of the leg, each once: ``[[0, 1], [2, 3]]`` are two tensor-parallel pairs, ``[[0], [1]]`` two ranks
    that share nothing. With ``samples`` no id of one group's step is in another group's; with ``rng`` each of torch's,
    Python's and NumPy's streams stands elsewhere.
    """
    records = evidence.leg(leg).trajectory.records
    if sorted(rank for group in groups for rank in group) != sorted(records):
        raise EvidenceError(
            f"groups {[list(group) for group in groups]} are not the ranks {sorted(records)}, each once"
        )
    if len(groups) < 2 and len(groups[0]) < 2:
        raise EvidenceError("a single rank shares with no other, so the check could not have failed")
    steps = {rank: [record.global_step for record in own] for rank, own in records.items()}
    if not steps[0] or any(own != steps[0] for own in steps.values()):
        raise EvidenceError(f"leg {leg}: the ranks trained different steps, or none: {steps}")
    by_step = [{rank: own[place] for rank, own in records.items()} for place in range(len(steps[0]))]
    problem = next(filter(None, (_first_problem(step, column, groups) for step in by_step)), "")
    return verdict(
        not problem,
        expected=f"{column} of steps {steps[0][0]}..{steps[0][-1]} shared within {[list(group) for group in groups]} only",
        observed=problem or "so it is",
        blames=_BUCKET_OF_COLUMN[column],
    )


@CHECKS.register(needs=("events.saved", "ranks.many"))
def copies_agree(evidence: Evidence, *, leg: str, groups: tuple[tuple[int, ...], ...], entries: str) -> CheckOutcome:
    """At every save and at the end, the ranks of a group hold equal copies of model, optimizer and other objects.

    ``entries`` is a glob over their entries.

    What is compared is each rank's own part: ranks of two groups hold other parts, or the check could not have failed.
    """
    found = evidence.leg(leg)
    moments = [(kind, place) for kind in ("saved", "end") for place in range(len(found.events(kind, 0)))]
    compared = 0
    for kind, place in moments:
        states = [_entries(found, kind, place, rank, entries) for rank in range(len(found.record.ranks))]
        compared += len(states[0])
        for one, other in combinations((group[0] for group in groups), 2):
            if states[one] == states[other]:
                raise EvidenceError(
                    f"ranks {one} and {other} hold the same {entries}, so the check could not have failed"
                )
        for group in groups:
            for rank in group[1:]:
                different = [name for name, text in states[group[0]].items() if states[rank].get(name) != text]
                if different:
                    return verdict(
                        False,
                        expected=f"equal copies of {entries} within {[list(group) for group in groups]}",
                        observed=f"{kind}: ranks {group[0]} and {rank} hold different {different[0]}",
                        blames=different[0].partition("/")[0],
                    )
    if not compared:
        raise EvidenceError(f"leg {leg}: no save with an entry {entries!r}")
    return verdict(True, expected=f"equal copies of {entries}", observed=f"{compared} entries equal", blames=None)


def _entries(leg: LegEvidence, kind: str, place: int, rank: int, entries: str) -> dict[str, str]:
    buckets = leg.events(kind, rank)[place].data["buckets"]
    return {
        f"{bucket}/{name}": text
        for bucket in _COPIED
        for name, text in buckets.get(bucket, {}).items()
        if fnmatch.fnmatchcase(name, entries)
    }


def _first_problem(step: dict[int, TrajectoryRecord], column: str, groups: Sequence[Sequence[int]]) -> str:
    number = step[groups[0][0]].global_step
    for group in groups:
        for rank in group[1:]:
            if _values(step[group[0]], column) != _values(step[rank], column):
                return f"step {number}: ranks {group[0]} and {rank} have different {column}"
    for one, other in combinations((group[0] for group in groups), 2):
        common = _values(step[one], column) & _values(step[other], column)
        if common:
            names = ", ".join(sorted(str(name) for name, _ in common))
            return f"step {number}: ranks {one} and {other} share {column} {names}"
    return ""


def _values(record: TrajectoryRecord, column: str) -> set[tuple[object, object]]:
    """What one rank must not have in common with another: (name, value) of each stream, or of each sample id."""
    if column == "samples":
        return {(number, number) for number in record.sample_ids}
    if record.digests is None:
        raise EvidenceError(f"rank {record.rank}, step {record.global_step}: no digest of the streams")
    return {(name, bits(value)) for name, value in cells(record, "rng").items() if value is not None}
