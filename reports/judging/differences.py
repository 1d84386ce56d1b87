"""Where two trajectories differ: every column on every rank, and the distance of two values."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from conformance.checks.compare import ALL_COLUMNS, ComparisonError, bits, cells
from conformance.records.comparison import Divergence
from conformance.records.trajectory import Trajectory, TrajectoryRecord

NUMBERS = ("loss", "lr", "grad_norm")
_BUCKETS = {
    "samples": "train_dataloader",
    "lr": "lr_scheduler",
    "rng": "rng_state",
    "extras": "stateful",
    "optimizer": "optimizer",
    "model": "model",
}


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """One column on one rank: the first step that differs (None: none does) and in which entry; 0 compared: no digests."""

    rank: int
    compared: int
    different: int
    first_step: int | None
    part: str


@dataclass(frozen=True, kw_only=True)
class GridRow:
    """One column of the records. ``bucket`` is the state bucket that it shows directly, empty for a derived column."""

    column: str
    bucket: str
    cells: tuple[GridCell, ...]


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Two numbers that differ: in hexadecimal, their difference, and how many floats lie between them."""

    reference_hex: str
    resumed_hex: str
    difference: float
    ulp: int | None
    ulp_type: str


def grid(reference: Trajectory, leg: Trajectory) -> tuple[GridRow, ...]:
    """All columns, in causal order, over the steps that both have. Ranks that only one of them has are left out."""
    rows = []
    for column in ALL_COLUMNS:
        found = []
        for rank in sorted(set(reference.ranks) & set(leg.ranks)):
            expected = {record.global_step: record for record in reference.records[rank]}
            pairs = [(expected[one.global_step], one) for one in leg.records[rank] if one.global_step in expected]
            found.append(_cell(column, rank, pairs))
        if any(cell.compared for cell in found):
            rows.append(GridRow(column=column, bucket=_BUCKETS.get(column, ""), cells=tuple(found)))
    return tuple(rows)


def _cell(column: str, rank: int, pairs: list[tuple[TrajectoryRecord, TrajectoryRecord]]) -> GridCell:
    compared = different = 0
    first, part = None, ""
    for expected, found in pairs:
        try:
            left, right = cells(expected, column), cells(found, column)
        except ComparisonError:
            continue  # no digests in these records
        if not left and not right:
            continue
        compared += 1
        names = [name for name in dict.fromkeys([*left, *right]) if bits(left.get(name)) != bits(right.get(name))]
        if names:
            different += 1
            if first is None:
                first, part = found.global_step, names[0]
    return GridCell(rank=rank, compared=compared, different=different, first_step=first, part=part)


def distance(divergence: Divergence) -> Distance | None:
    """The distance of the two values; None where they are no finite numbers."""
    if divergence.column not in NUMBERS:
        return None
    try:
        reference, resumed = float(divergence.reference), float(divergence.resumed)
    except ValueError:
        return None
    if not (math.isfinite(reference) and math.isfinite(resumed)):
        return None
    single = all(_is_single(value) for value in (reference, resumed))
    return Distance(
        reference_hex=reference.hex(),
        resumed_hex=resumed.hex(),
        difference=resumed - reference,
        ulp=ulps(reference, resumed, single=single),
        ulp_type="float32" if single else "float64",
    )


def ulps(left: float, right: float, *, single: bool = False) -> int:
    """How many floats lie from ``left`` to ``right``, the last included; signed."""
    return _ordinal(right, single) - _ordinal(left, single)


def _ordinal(value: float, single: bool) -> int:
    """The floats numbered in their order, both zeros as 0."""
    (number,) = struct.unpack("<i" if single else "<q", struct.pack("<f" if single else "<d", value))
    return int(number) if number >= 0 else -(2**31 if single else 2**63) - int(number)


def _is_single(value: float) -> bool:
    """True when a float32 holds the value exactly, as it does every value of a tensor of that type."""
    try:
        (back,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return False
    return bool(back == value)
