"""The page: one self-contained HTML file, made from the records, without scripts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from benchmarks.protocol import GB
from benchmarks.reporting import curves, ratios, table
from benchmarks.reporting.records import (
    AbsenceRecord,
    FailureRecord,
    FigureRecord,
    GrowthRecord,
    MeasurementRecord,
    Report,
)

_TEMPLATES = Path(__file__).parents[1] / "templates"
_PEER_STYLES = 5
# Columns of a row. A column that is empty in a whole section is left out.
_COLUMNS = (
    ("speed", "GB/s"),
    ("settled", "until settled"),
    ("disk", "on disk, MB"),
    ("peak", "peak memory, MB"),
)
_PILLS = {"met": "good", "not met": "bad", "not measured": "open", "no goal": "plain"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement, formatted for the page."""

    point: str
    contender: str
    swatch: Markup
    role: str
    seconds: str
    spread: str
    samples: int
    speed: str
    settled: str
    disk: str
    peak: str
    checked: bool


@dataclass(frozen=True, kw_only=True)
class Section:
    """One benchmark."""

    name: str
    title: str
    plots: Sequence[tuple[str, Markup]]
    rows: Sequence[Row]
    columns: Sequence[tuple[str, str]]
    notes: Mapping[str, str]
    figures: Sequence[FigureRecord]
    growths: Sequence[GrowthRecord]
    absences: Sequence[AbsenceRecord]
    failures: Sequence[FailureRecord]


def render(report: Report) -> str:
    """Return the page's HTML; the same for the same records."""
    style = (_TEMPLATES / "benchmarks.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["ratio"] = table.ratio_text
    environment.globals.update(span=table.span_text, goal=table.goal_text, pill=lambda status: _PILLS[status])
    return environment.get_template("benchmarks.html.j2").render(
        style=Markup(style),
        style_hash="sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        header=report.header,
        footer=report.footer,
        goals=[figure for figure in report.of(FigureRecord) if figure.status != "no goal"],
        sections=[_section(name, report) for name in report.header.benchmarks],
    )


def _section(name: str, report: Report) -> Section:
    measured = [record for record in report.of(MeasurementRecord) if record.benchmark == name]
    styles = _styles(measured)
    rows = [_row(record, *styles[record.contender]) for record in measured]
    return Section(
        name=name,
        title=report.header.benchmarks[name],
        plots=list(_plots(measured, styles)),
        rows=rows,
        columns=[(field, title) for field, title in _COLUMNS if any(getattr(row, field) for row in rows)],
        notes={record.contender: record.note for record in measured if record.note},
        figures=[record for record in report.of(FigureRecord) if record.benchmark == name],
        growths=[record for record in report.of(GrowthRecord) if record.benchmark == name],
        absences=_joined([record for record in report.of(AbsenceRecord) if record.benchmark == name]),
        failures=[record for record in report.of(FailureRecord) if record.benchmark == name],
    )


def _joined(absences: Sequence[AbsenceRecord]) -> list[AbsenceRecord]:
    """Join absences with the same reason at several points."""
    points: dict[tuple[str | None, str], list[str]] = {}
    for record in absences:
        points.setdefault((record.contender, record.reason), []).append(record.point)
    return [
        AbsenceRecord(benchmark=absences[0].benchmark, point=", ".join(found), contender=contender, reason=reason)
        for (contender, reason), found in points.items()
    ]


def _styles(measured: Sequence[MeasurementRecord]) -> dict[str, tuple[str, int]]:
    """Return contender -> class and marker."""
    found: dict[str, tuple[str, int]] = {}
    peers = 0
    for record in measured:
        if record.contender in found:
            continue
        if record.role == "peer":
            peers += 1
            style = f"peer-{(peers - 1) % _PEER_STYLES + 1}"
        else:
            style = record.role
        found[record.contender] = (style, len(found))
    return found


def _plots(measured: Sequence[MeasurementRecord], styles: dict[str, tuple[str, int]]) -> Iterator[tuple[str, Markup]]:
    """Yield a plot of times, or of speeds where the axis counts bytes: curves for several points, bars for a single one."""
    if not measured:
        return
    axis = measured[0].axis
    is_speed = axis.startswith("payload")
    unit = "GB/s, median and range" if is_speed else "seconds, median and range"
    drawn = [
        curves.Curve(
            label=contender,
            style=style,
            number=number,
            dots=[_dot(record, is_speed) for record in measured if record.contender == contender],
        )
        for contender, (style, number) in styles.items()
    ]
    if len({record.place for record in measured}) > 1:
        svg = curves.draw_curves(drawn, x_label=axis, y_label=unit, title=f"{unit}, by {axis}")
    else:
        svg = curves.draw_bars(drawn, y_label=unit, title=unit)
    yield f"{unit}, by {axis}", Markup(svg)


def _dot(record: MeasurementRecord, is_speed: bool) -> curves.Dot:
    found = ratios.spread(record.seconds)
    if not is_speed:
        text = table.seconds_text(record.seconds)
        return curves.Dot(x=record.place, y=found.median, least=found.least, most=found.most, text=text)
    bytes_in_gb = record.payload_bytes / GB
    return curves.Dot(
        x=record.place,
        y=bytes_in_gb / found.median,
        least=bytes_in_gb / found.most,
        most=bytes_in_gb / found.least,
        text=f"{bytes_in_gb / found.median:.3g} GB/s",
    )


def _row(record: MeasurementRecord, style: str, number: int) -> Row:
    found = ratios.spread(record.seconds)
    return Row(
        point=record.point,
        contender=record.contender,
        swatch=Markup(curves.swatch(style, number)),
        role=record.role,
        seconds=table.seconds_text(record.seconds),
        spread=f"{table.seconds_text([found.least])} to {table.seconds_text([found.most])}",
        samples=found.samples,
        speed=f"{record.payload_bytes / GB / found.median:.3g}" if record.payload_bytes else "",
        settled=table.seconds_text(record.settled_seconds) if record.settled_seconds else "",
        disk=_mb(record.disk_bytes),
        peak=_mb(record.peak_bytes),
        checked=record.checked,
    )


def _mb(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:,.1f}"
