"""Compares two trajectories bit for bit.

There is no tolerance: NaN equals the same NaN, 0.0 differs from -0.0. A comparison that could not have failed is an error,
not a pass.

What is NOT checked here: that sample ids cover an epoch exactly once, and that a random stream which never moves was
restored (such streams are named in the result instead).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

from conformance.records.comparison import ColumnResult, Comparison, Divergence
from conformance.records.trajectory import Trajectory, TrajectoryRecord

Value: TypeAlias = "int | float | str | tuple[int, ...] | tuple[float, ...] | None"
Steps: TypeAlias = "Mapping[int, TrajectoryRecord]"

# In causal order: several columns usually differ from the same step on, and the first one names the bucket. Samples
# and lr are chosen before a step computes anything. A random stream moves by itself: if it differs, it made the loss
# differ, never the other way round. Loss and gradient norm are measured before the optimizer's state is updated, and
# that state moves the weights last: moments lost at a restore leave loss and gradient norm of the first step untouched.
COLUMNS = ("samples", "lr", "rng", "loss", "grad_norm", "optimizer", "model")

# The same with the digests of other stateful objects (a scaler, an average), which only some trainers have.
ALL_COLUMNS = ("samples", "lr", "rng", "extras", "loss", "grad_norm", "optimizer", "model")

# The order in which a verdict lists the columns for a reader.
VERDICT_COLUMNS = ("loss", "lr", "grad_norm", "samples", "model", "optimizer", "rng")

# With the columns before it equal, a loss or gradient norm can differ only through the weights it was computed with.
_BUCKETS = {
    "samples": "train_dataloader",
    "samples.epoch": "progress",
    "lr": "lr_scheduler",
    "rng": "rng_state",
    "extras": "stateful",
    "loss": "model",
    "grad_norm": "model",
    "optimizer": "optimizer",
    "model": "model",
}


# Columns that need digests.
DIGESTED_COLUMNS = {"rng", "extras", "optimizer", "model"}


class ComparisonError(ValueError):
    """The comparison proves nothing: something is missing, or it could not have failed."""


def compare_trajectories(
    reference: Trajectory,
    resumed: Trajectory,
    first_step: int,
    last_step: int,
    *,
    may_be_constant: Collection[str] = (),
    columns: Sequence[str] = COLUMNS,
) -> Comparison:
    """Compare ``resumed`` with ``reference`` on every rank, for every step from ``first_step`` to ``last_step``.

    Args:
        reference: the uninterrupted leg.
        resumed: the leg under test.
        first_step: first global step compared, inclusive.
        last_step: last global step compared, inclusive.
        may_be_constant: columns that need not vary in the reference, as ``lr`` under a constant schedule.
        columns: of :data:`ALL_COLUMNS`; they are compared in that order, whatever order is given.

    Returns:
        The counts by column and the first divergence: the smallest step, then the order of :data:`COLUMNS`, then rank.

    Raises:
        ComparisonError: the range is empty, a rank or step or digest is missing on either side, a column is constant
            over the reference, or all ranks share one Python random stream.
    """
    if first_step > last_step:
        raise ComparisonError(f"no step to compare: {first_step}..{last_step} is empty")
    if reference.ranks != resumed.ranks or not reference.ranks:
        raise ComparisonError(f"ranks differ: reference has {list(reference.ranks)}, resumed {list(resumed.ranks)}")
    steps = range(first_step, last_step + 1)
    chosen = [column for column in ALL_COLUMNS if column in columns]
    if not chosen:
        raise ComparisonError("no column to compare")
    digests = bool(set(chosen) & DIGESTED_COLUMNS)
    expected = {rank: _complete(reference, rank, steps, "reference", digests) for rank in reference.ranks}
    found = {rank: _complete(resumed, rank, steps, "resumed", digests) for rank in reference.ranks}
    window = expected if len(steps) > 1 else {rank: _by_step(reference, rank) for rank in reference.ranks}
    _require_variation(window, chosen, may_be_constant)
    if "rng" in chosen:
        _require_own_streams(expected)
    compared = tuple(_compare_column(column, expected, found, steps) for column in chosen)
    firsts = [column.first for column in compared if column.first is not None]
    return Comparison(
        first_step=first_step,
        last_step=last_step,
        ranks=len(reference.ranks),
        columns=compared,
        # min() keeps the earlier of equals, and the columns come in causal order.
        divergence=min(firsts, key=lambda divergence: divergence.step, default=None),
        unmoved_streams=_unmoved_streams(window) if "rng" in chosen else (),
    )


def bits(value: Value) -> object:
    """A key for ``value`` that is equal if and only if all bits are equal."""
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, tuple):
        return tuple(bits(item) for item in value)
    return value


def show(value: Value) -> str:
    """``value`` in full; a float's text reads back to the same bits."""
    if isinstance(value, tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if value is None:
        return "absent"
    return value if isinstance(value, str) else repr(value)


def cells(record: TrajectoryRecord, column: str) -> dict[str, Value]:
    """The values of one column of a record, by the name shown to readers, in causal order.

    Raises:
        ComparisonError: the record carries no digests and the column needs them.
    """
    if column == "samples":
        return {
            "samples.epoch": record.epoch,
            "samples.batch_index": record.batch_index,
            "samples": record.sample_ids,
        }
    if column == "lr":
        return {"lr": record.lr, "lr.group_lrs": record.group_lrs}
    if column == "loss":
        return {"loss": record.loss}
    if column == "grad_norm":
        return {"grad_norm": record.grad_norm}
    if record.digests is None:
        raise ComparisonError(
            f"rank {record.rank}, step {record.global_step}: no digests, so {column} can't be compared"
        )
    if column == "extras":
        return {f"extras.{name}": value for name, value in record.digests.extras.items()}
    if column == "rng":
        return {f"rng.{name}": value for name, value in record.digests.rng.items()}
    return {column: record.digests.model if column == "model" else record.digests.optimizer}


def _by_step(trajectory: Trajectory, rank: int) -> Steps:
    return {record.global_step: record for record in trajectory.records[rank]}


def _complete(trajectory: Trajectory, rank: int, steps: range, name: str, digests: bool) -> Steps:
    """The rank's records of ``steps``; all must exist, with digests if these are compared."""
    records = _by_step(trajectory, rank)
    missing = [step for step in steps if step not in records]
    if missing:
        raise ComparisonError(f"{name}, rank {rank}: no record of steps {_ranges(missing)}")
    without = [step for step in steps if records[step].digests is None]
    if digests and without:
        raise ComparisonError(f"{name}, rank {rank}: no digests at steps {_ranges(without)}")
    return {step: records[step] for step in steps}


def _ranges(steps: list[int]) -> str:
    return f"{steps[0]}" if len(steps) == 1 else f"{steps[0]}..{steps[-1]} ({len(steps)} of them)"


def _require_variation(window: Mapping[int, Steps], columns: Sequence[str], may_be_constant: Collection[str]) -> None:
    """A column that never changes would pass whatever a restore did with it."""
    for column in columns:
        if column in may_be_constant:
            continue
        for rank, records in window.items():
            seen = {tuple(_flat(record, column)) for record in records.values()}
            if len(seen) < 2:
                raise ComparisonError(
                    f"the reference's {column} is constant over steps {min(records)}..{max(records)} on rank {rank}; "
                    "comparing it could not have failed"
                )


def _flat(record: TrajectoryRecord, column: str) -> Iterator[str]:
    for name, value in cells(record, column).items():
        # Epoch and batch index change even when the data does not.
        if name not in ("samples.epoch", "samples.batch_index"):
            yield f"{name}={show(value)}"


def _require_own_streams(reference: Mapping[int, Steps]) -> None:
    """If all ranks shared one Python stream, a restore of another rank's stream could not be seen."""
    if len(reference) < 2:
        return
    per_rank = [
        tuple(cells(record, "rng").get("rng.python") for record in steps.values()) for steps in reference.values()
    ]
    if len(set(per_rank)) == 1:
        raise ComparisonError(
            "all ranks of the reference have the same Python random stream (rng.python); "
            "a restore that mixes ranks up could not have been seen"
        )


def _unmoved_streams(window: Mapping[int, Steps]) -> tuple[str, ...]:
    seen: dict[str, set[object]] = {}
    for rank, steps in window.items():
        for record in steps.values():
            for name, value in cells(record, "rng").items():
                if value is not None:
                    seen.setdefault(name, set()).add((rank, value))
    return tuple(sorted(name for name, values in seen.items() if len(values) <= len(window)))


def _compare_column(
    column: str, reference: Mapping[int, Steps], resumed: Mapping[int, Steps], steps: range
) -> ColumnResult:
    compared = different = 0
    first: Divergence | None = None
    for step in steps:
        for rank in reference:
            compared += 1
            divergence = first_difference(reference[rank][step], resumed[rank][step], column)
            if divergence is not None:
                different += 1
                first = first or divergence
    return ColumnResult(name=column, compared=compared, different=different, first=first)


def first_difference(reference: TrajectoryRecord, resumed: TrajectoryRecord, column: str) -> Divergence | None:
    """The first cell of a column that differs between two records of one step and rank; None if all are equal."""
    expected, found = cells(reference, column), cells(resumed, column)
    for name in [*expected, *(name for name in found if name not in expected)]:
        if bits(expected.get(name)) != bits(found.get(name)):
            return Divergence(
                step=reference.global_step,
                rank=reference.rank,
                bucket=_BUCKETS.get(name, _BUCKETS[column]),
                column=name,
                reference=show(expected.get(name)),
                resumed=show(found.get(name)),
            )
    return None
