"""The sample ledger: the samples of each rank in the steps that count in the end, compared with the uninterrupted run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from conformance.records.trajectory import Trajectory, TrajectoryRecord
from reports.contents.document import Epoch


def surviving(legs: Sequence[Trajectory], rank: int) -> list[TrajectoryRecord]:
    """The steps that count in the end: where a leg went back to an earlier step, the later steps before it are lost."""
    history: list[TrajectoryRecord] = []
    for leg in legs:
        records = leg.records.get(rank, ())
        if records:
            history = [record for record in history if record.global_step < records[0].global_step]
            history += records
    return history


def ledger(history: str, reference: Trajectory | None, legs: Sequence[Trajectory]) -> tuple[Epoch, ...]:
    """One row per epoch and rank. Without a reference only samples that came twice in an epoch can be found."""
    rows = []
    for rank in sorted({rank for leg in legs for rank in leg.ranks}):
        records = surviving(legs, rank)
        steps = {record.global_step for record in records}
        wanted = None
        if reference is not None:
            wanted = _by_epoch([record for record in reference.records.get(rank, ()) if record.global_step in steps])
        seen = _by_epoch(records)
        for epoch in sorted({*seen, *(wanted or {})}):
            expected = wanted.get(epoch, []) if wanted is not None else None
            rows.append(_row(history, epoch, rank, seen.get(epoch, []), expected))
    return tuple(rows)


def _by_epoch(records: Sequence[TrajectoryRecord]) -> dict[int, list[int]]:
    epochs: dict[int, list[int]] = {}
    for record in records:
        epochs.setdefault(record.epoch, []).extend(record.sample_ids)
    return epochs


def _row(history: str, epoch: int, rank: int, seen: list[int], expected: list[int] | None) -> Epoch:
    counts = Counter(seen)
    if expected is None:
        duplicated = [sample for sample, count in counts.items() if count > 1]
        skipped: list[int] = []
        misplaced = None
    else:
        duplicated = list((counts - Counter(expected)).keys())
        skipped = list((Counter(expected) - counts).keys())
        misplaced = next(
            (place for place, pair in enumerate(zip(seen, expected, strict=False)) if pair[0] != pair[1]), None
        )
    return Epoch(
        history=history,
        epoch=epoch,
        rank=rank,
        seen=len(seen),
        expected=None if expected is None else len(expected),
        duplicated=tuple(sorted(duplicated)),
        skipped=tuple(sorted(skipped)),
        out_of_order_at=misplaced,
    )
