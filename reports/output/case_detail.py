"""One case in detail: timeline, curves, first divergence. Made for the few cases that the first screen leads to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from conformance.records.results import LegRecord, ResultRecord
from reports.contents.document import CaseEntry
from reports.judging.cases import reference_of
from reports.judging.differences import GridRow, grid
from reports.output.charts import Band, Chart, Mark, draw, fitted, swatch
from reports.output.charts import Series as ChartSeries
from reports.output.series import Curve, Floats, Series, differences, drawn_legs, looks_of, thin
from reports.output.timeline import Lane, draw_timeline, lanes
from reports.reading.frames import METRICS
from reports.reading.read import Part

_PRINTED_POINTS = 1_800
_TITLES = {"loss": "Loss", "lr": "Learning rate", "grad_norm": "Gradient norm"}


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one leg is drawn."""

    leg: str
    style: str
    marker: str
    swatch: Markup


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The two plots of one metric: values, and below them differences from the reference (empty without one)."""

    metric: str
    values: Markup
    differences: Markup


@dataclass(frozen=True, kw_only=True)
class CaseDetail:
    """A case in detail. ``rank`` is the one that is drawn; ``grid`` compares with the reference, ``ranks`` are its columns."""

    case: CaseEntry
    rank: int
    timeline: Markup
    is_joined: bool
    styles: tuple[Style, ...]
    figures: tuple[Figure, ...]
    grid: tuple[GridRow, ...]
    ranks: tuple[int, ...]
    grid_leg: str


def make_detail(part: Part, case: CaseEntry, series: Series, *, number: int) -> CaseDetail:
    """Collect what the page shows of one case. ``number`` is that of the case on its page, for ids."""
    (result,) = (one for one in part.results.of(ResultRecord) if one.key == case.key)
    legs = part.of(LegRecord, case.key)
    own = [leg for leg in legs if not leg.leg.startswith("reference")]
    rows = lanes(part, own)
    rank = case.divergence.rank if case.divergence else 0
    reference = reference_of(result, legs)
    judged = _judged(result, own)
    table: tuple[GridRow, ...] = ()
    if reference is not None and judged is not None:
        table = grid(part.trajectories[reference.folder], part.trajectories[judged.folder])
    return CaseDetail(
        case=case,
        rank=rank,
        timeline=Markup(_timeline(rows, case, number)),
        is_joined=any(not leg.started_at for leg in own),
        styles=styles_of(case, series, rank),
        figures=_figures(case, series, rank, number),
        grid=table,
        ranks=tuple(cell.rank for cell in table[0].cells) if table else (),
        grid_leg=judged.leg if judged else "",
    )


def _timeline(rows: Sequence[Lane], case: CaseEntry, number: int) -> str:
    title, words = f"Timeline of {case.key}", {"seconds": "seconds", "rank": "rank"}
    broad = draw_timeline(rows, title=title, name=f"time-{number}", words=words)
    return fitted(broad, draw_timeline(rows, title=title, name=f"narrow-time-{number}", words=words, is_narrow=True))


def _judged(result: ResultRecord, legs: Sequence[LegRecord]) -> LegRecord | None:
    """The leg that is compared with the reference: that of a check that failed, or the last one that resumed."""
    checks = sorted(result.checks, key=lambda check: check.status != "failed")
    names = [str(check.parameters["leg"]) for check in checks if {"leg", "against"} <= set(check.parameters)]
    for name in names:
        for leg in legs:
            if leg.leg == name:
                return leg
    return next((leg for leg in reversed(legs) if leg.restore_from is not None), None)


def styles_of(case: CaseEntry, series: Series, rank: int) -> tuple[Style, ...]:
    """The look of each leg that has a curve, in drawing order."""
    return tuple(
        Style(leg=leg.leg, style=style, marker=marker, swatch=Markup(swatch(style, marker)))
        for leg, (style, marker) in zip(drawn_legs(case), looks_of(case), strict=True)
        if (case.part, leg.folder, rank) in series.curves
    )


def _figures(case: CaseEntry, series: Series, rank: int, number: int) -> tuple[Figure, ...]:
    figures = []
    looks = {style.leg: style for style in styles_of(case, series, rank)}
    curves = [
        (looks[leg.leg], series.curves[case.part, leg.folder, rank], (case.part, leg.folder, rank))
        for leg in drawn_legs(case)
        if leg.leg in looks
    ]
    for metric in METRICS:
        if all(np.isnan(curve.values[metric]).all() for _, curve, _ in curves):
            continue
        values = [_chart_series(look, curve, curve.values[metric], look.leg) for look, curve, _ in curves]
        deltas = []
        for look, curve, key in curves:
            if key in series.reference:
                found = differences(series.curves[series.reference[key]], curve)[metric]
                deltas.append(_chart_series(look, curve, found, f"{look.leg} − reference"))
        figures.append(
            Figure(
                metric=metric,
                values=Markup(_draw(case, metric, values, f"curve-{number}-{metric}", has_lower=bool(deltas))),
                differences=Markup(_draw(case, metric, deltas, f"difference-{number}-{metric}", is_difference=True))
                if deltas
                else Markup(""),
            )
        )
    return tuple(figures)


def _chart_series(look: Style, curve: Curve, values: Floats, label: str) -> ChartSeries:
    """One curve for paper: of a thinned one only this metric's own extremes, as many as its width can show."""
    rows = thin([values], _PRINTED_POINTS) if curve.thinned else np.arange(len(values))
    return ChartSeries(
        label=label,
        style=look.style,
        marker=look.marker,
        steps=curve.steps[rows].tolist(),
        values=values[rows].tolist(),
        joined=curve.thinned,
    )


def _draw(
    case: CaseEntry,
    metric: str,
    series: list[ChartSeries],
    name: str,
    *,
    is_difference: bool = False,
    has_lower: bool = False,
) -> str:
    marks, bands = marks_of(case)
    title = (
        f"{_TITLES[metric]} of each leg minus the reference's, by step"
        if is_difference
        else f"{_TITLES[metric]} by step"
    )
    return draw(
        Chart(
            title=title,
            unit="difference" if is_difference else _TITLES[metric].lower(),
            series=series,
            marks=() if is_difference else marks,
            bands=bands,
            height=150 if is_difference else 250,
            differences=is_difference,
            is_upper=has_lower,
        ),
        name=name,
    )


def marks_of(case: CaseEntry) -> tuple[list[Mark], list[Band]]:
    """Kills and the first divergence, and the steps that were lost and trained again."""
    marks, bands = [], []
    kills = [one for one in case.resumes if one.killed_after is not None]
    for number, one in enumerate(kills, start=1):
        assert one.killed_after is not None  # chosen for that
        text = "kill" if len(kills) == 1 else f"kill {number}"
        marks.append(Mark(at=one.killed_after + 0.5, text=text, style="kill"))
        if one.lost_steps:
            bands.append(Band(first=(one.resumed_at or 0) + 1, last=one.killed_after))
    if case.divergence is not None and math.isfinite(case.divergence.step):
        marks.append(Mark(at=case.divergence.step, text="first divergence", style="first-difference"))
    return sorted(marks, key=lambda mark: mark.at), bands
