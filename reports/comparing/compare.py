"""Two runs side by side (two commits, two machines, CPU and NPU): outcomes that changed, and where uninterrupted legs differ.

A resume is judged within one run. Here the uninterrupted legs of both runs are compared value by value, which shows whether the
training itself is the same. On other devices it rarely is to the bit, so the largest relative distance is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conformance.records.trajectory import Trajectory
from reports.comparing.compare_costs import Worse, goals_in_common, worse_costs
from reports.contents.document import CaseEntry, PartEntry
from reports.contents.text import Text
from reports.judging.acceptance import sort_key
from reports.judging.assemble import Assembled
from reports.judging.differences import grid
from reports.reading.frames import METRICS


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two runs, judged by ``profile``; ``commit`` is empty where the records hold none."""

    run: str
    profile: str
    platforms: str
    commit: str
    state: str
    required: str
    versions: Mapping[str, str]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CaseFlip:
    """A case with different outcomes; None where it is not in one of the runs."""

    key: str
    title: Text
    before: str | None
    after: str | None


@dataclass(frozen=True, kw_only=True)
class LegRow:
    """The uninterrupted leg of one case in both runs. ``largest`` is by metric, relative; ``first`` what differs first."""

    key: str
    title: Text
    steps: int
    first: str
    first_step: int | None
    largest: Mapping[str, float]
    seconds: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class CurvePair:
    """One metric of one case in both runs, on rank 0, at the steps that both have."""

    key: str
    metric: str
    steps: tuple[int, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs side by side; ``goals`` counts the cost goals that both measured, ``worse`` are those of them that got worse."""

    before: Side
    after: Side
    flips: tuple[CaseFlip, ...]
    same_outcomes: int
    legs: tuple[LegRow, ...]
    curves: tuple[CurvePair, ...]
    goals: int
    worse: tuple[Worse, ...]


def compare(before: Assembled, after: Assembled) -> Comparison:
    """Compare two runs; cases are matched by their key, on whatever platform they ran."""
    old, new = _by_key(before), _by_key(after)
    keys = sorted({*old, *new}, key=lambda key: (sort_key(key.partition("@")[0].partition("#")[0]), key))
    flips, legs = [], []
    for key in keys:
        one, other = old.get(key), new.get(key)
        if one is None or other is None or one.outcome != other.outcome:
            shown = one or other
            assert shown is not None  # the key is of one of them
            flips.append(
                CaseFlip(
                    key=key,
                    title=shown.title,
                    before=one.outcome if one else None,
                    after=other.outcome if other else None,
                )
            )
        if one is not None and other is not None:
            row = _leg_row(before, one, after, other)
            if row is not None:
                legs.append(row)
    return Comparison(
        before=_side(before),
        after=_side(after),
        flips=tuple(flips),
        same_outcomes=len(keys) - len(flips),
        legs=tuple(legs),
        curves=_curves(before, old, after, new, legs),
        goals=goals_in_common(before.report.costs, after.report.costs),
        worse=worse_costs(before.report.costs, after.report.costs),
    )


def _by_key(assembled: Assembled) -> dict[str, CaseEntry]:
    found: dict[str, CaseEntry] = {}
    for case in assembled.report.cases:
        found.setdefault(case.key, case)
    return found


def _side(assembled: Assembled) -> Side:
    report = assembled.report
    parts: Sequence[PartEntry] = report.parts
    return Side(
        run=" + ".join(part.run_id for part in parts),
        profile=report.profile,
        platforms=", ".join(sorted({part.platform for part in parts})),
        commit=", ".join(dict.fromkeys(part.facts["commit"] for part in parts if "commit" in part.facts)),
        state=report.verdict.state,
        required=f"{report.verdict.required_passed} / {report.verdict.required}",
        versions={name: version for part in parts for name, version in part.versions.items()},
        seconds=sum(part.seconds for part in parts),
    )


def _reference(assembled: Assembled, case: CaseEntry) -> Trajectory | None:
    part = next(part for part in assembled.run.parts if part.name == case.part)
    return part.trajectories.get(case.reference) if case.reference else None


def _leg_row(before: Assembled, one: CaseEntry, after: Assembled, other: CaseEntry) -> LegRow | None:
    left, right = _reference(before, one), _reference(after, other)
    if left is None or right is None:
        return None
    firsts = [
        (cell.first_step, cell.part, cell.rank)
        for row in grid(left, right)
        for cell in row.cells
        if cell.first_step is not None
    ]
    step, column, rank = min(firsts, key=lambda first: first[0], default=(None, "", 0))
    pairs = _pairs(left, right)
    return LegRow(
        key=one.key,
        title=one.title,
        steps=len({pair[0] for pair in pairs}),
        first=f"{column}, rank {rank}" if column else "",
        first_step=step,
        largest={name: _largest(pairs, place) for place, name in enumerate(METRICS)},
        seconds=(one.seconds, other.seconds),
    )


def _pairs(left: Trajectory, right: Trajectory) -> list[tuple[int, tuple[float | None, ...], tuple[float | None, ...]]]:
    found = []
    for rank in sorted(set(left.ranks) & set(right.ranks)):
        other = {record.global_step: record for record in right.records[rank]}
        for record in left.records[rank]:
            if record.global_step in other:
                values = [
                    tuple(getattr(side, name) for name in METRICS) for side in (record, other[record.global_step])
                ]
                found.append((record.global_step, values[0], values[1]))
    return found


def _largest(pairs: Sequence[tuple[int, tuple[float | None, ...], tuple[float | None, ...]]], place: int) -> float:
    largest = 0.0
    for _, left, right in pairs:
        one, other = left[place], right[place]
        if one is None or other is None or one == other or (math.isnan(one) and math.isnan(other)):
            continue
        scale = max(abs(one), abs(other))
        distance = abs(one - other) / scale if math.isfinite(scale) else math.inf
        largest = max(largest, distance if not math.isnan(distance) else math.inf)
    return largest


def _curves(
    before: Assembled,
    old: Mapping[str, CaseEntry],
    after: Assembled,
    new: Mapping[str, CaseEntry],
    legs: Sequence[LegRow],
) -> tuple[CurvePair, ...]:
    """The curves of the case that differs most (of the longest where none does)."""
    if not legs:
        return ()
    chosen = max(legs, key=lambda row: (row.largest["loss"], row.steps))
    left, right = _reference(before, old[chosen.key]), _reference(after, new[chosen.key])
    assert left is not None  # the row was made from both
    assert right is not None
    rank = min(set(left.ranks) & set(right.ranks), default=None)
    if rank is None:
        return ()
    other = {record.global_step: record for record in right.records[rank]}
    own = [record for record in left.records[rank] if record.global_step in other]
    return tuple(
        CurvePair(
            key=chosen.key,
            metric=name,
            steps=tuple(record.global_step for record in own),
            before=tuple(_number(getattr(record, name)) for record in own),
            after=tuple(_number(getattr(other[record.global_step], name)) for record in own),
        )
        for name in METRICS
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def text_of(found: Comparison) -> str:
    """What the command prints: changed outcomes first, then where uninterrupted legs differ."""
    lines = [
        f"{name:7} {side.run} ({side.platforms}), profile {side.profile}: {side.state}"
        for name, side in (("before:", found.before), ("after:", found.after))
    ]
    lines += [f"  {flip.key}: {flip.before or 'not there'} -> {flip.after or 'not there'}" for flip in found.flips]
    lines.append(f"{len(found.flips)} outcomes changed, {found.same_outcomes} are the same")
    different = [row for row in found.legs if row.first_step is not None]
    for row in different[:20]:
        largest = ", ".join(f"{name} {value:.3g}" for name, value in row.largest.items() if value)
        lines.append(
            f"  {row.key}: first at step {row.first_step} ({row.first}); largest relative: {largest or 'none'}"
        )
    lines.append(f"{len(different)} of {len(found.legs)} uninterrupted legs differ")
    if found.goals:
        lines += [f"  {one.benchmark}, {one.point}: {one.text}: {one.words}" for one in found.worse]
        lines.append(f"{len(found.worse)} of {found.goals} cost figures got worse by more than their spread")
    return "\n".join(lines) + "\n"
