"""Turns rounds into figures: the ratio within each round, its median and its spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.protocol import PAYLOAD, UNIT, Figure, Quantity
from benchmarks.reporting.records import FigureRecord, MeasurementRecord, Status


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, extremes and quartiles (interpolated, ends included) of ``samples`` values."""

    median: float
    least: float
    most: float
    lower_quartile: float
    upper_quartile: float
    samples: int


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("no value to take a median of")
    if len(values) == 1:
        lower = upper = values[0]
    else:
        lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(
        median=statistics.median(values),
        least=min(values),
        most=max(values),
        lower_quartile=lower,
        upper_quartile=upper,
        samples=len(values),
    )


def judge(figure: Figure, measured: Mapping[str, MeasurementRecord], *, benchmark: str, point: str) -> FigureRecord:
    """Return the figure with its ratio, or with the reason why there is none.

    Args:
        figure: what to compare.
        measured: contender -> its measurement at this point.
        benchmark: name of the benchmark, for the record.
        point: label of the point, for the record.
    """
    ratios, reason = _ratios(figure, measured)
    found = spread(ratios) if ratios else None
    return FigureRecord(
        benchmark=benchmark,
        point=point,
        text=figure.text,
        quantity=figure.quantity,
        above=figure.above,
        below=figure.below,
        median=None if found is None else found.median,
        least=None if found is None else found.least,
        most=None if found is None else found.most,
        lower_quartile=None if found is None else found.lower_quartile,
        upper_quartile=None if found is None else found.upper_quartile,
        samples=0 if found is None else found.samples,
        relation=figure.relation,
        bound=figure.bound,
        status=_status(figure, found),
        reason=reason,
    )


def exponent(places: Sequence[float], values: Sequence[float]) -> float:
    """Return b of the least-squares fit ``value = a * place ** b``; 1 is growth in proportion.

    Raises:
        ValueError: fewer than two different places, or a value that is not positive.
    """
    xs, ys = [math.log(place) for place in places], [math.log(value) for value in values]
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    width = sum((x - mean_x) ** 2 for x in xs)
    if width == 0:
        raise ValueError("growth needs two different places")
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / width


def _status(figure: Figure, found: Spread | None) -> Status:
    if figure.relation is None or figure.bound is None:
        return "no goal"
    if found is None:
        return "not measured"
    is_met = found.median >= figure.bound if figure.relation == "at least" else found.median <= figure.bound
    return "met" if is_met else "not met"


def _ratios(figure: Figure, measured: Mapping[str, MeasurementRecord]) -> tuple[list[float], str]:
    names = [*figure.above, *([] if figure.below in (PAYLOAD, UNIT) else [figure.below])]
    rows: dict[str, Sequence[float]] = {}
    for name in names:
        if name not in measured:
            return [], f"{name} was not measured"
        rows[name] = values_of(measured[name], figure.quantity)
        if not rows[name]:
            return [], f"{figure.quantity} of {name} was not measured"
    if figure.below == UNIT:
        denominators: Sequence[float] = [1.0] * len(rows[names[0]])
    elif figure.below == PAYLOAD:
        denominators = [float(measured[names[0]].payload_bytes)] * len(rows[names[0]])
    else:
        denominators = rows[figure.below]
    sums = [sum(values) for values in zip(*(rows[name] for name in figure.above), strict=True)]
    if any(value <= 0 for value in denominators):
        return [], f"{figure.quantity} of {figure.below} is not above 0"
    return [above / below for above, below in zip(sums, denominators, strict=True)], ""


def values_of(measurement: MeasurementRecord, quantity: Quantity) -> Sequence[float]:
    """Return one value per round for times, a single value for bytes, and nothing where it was not measured."""
    if quantity == "seconds":
        return measurement.seconds
    if quantity == "settled_seconds":
        return measurement.settled_seconds
    value = measurement.disk_bytes if quantity == "disk_bytes" else measurement.peak_bytes
    return () if value is None else (float(value),)
