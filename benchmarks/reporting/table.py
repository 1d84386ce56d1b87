"""The report as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.reporting.records import AbsenceRecord, FailureRecord, FigureRecord, GrowthRecord, Report

_HEAD = ("benchmark", "point", "what", "measured", "quartiles", "range", "of", "goal", "")


def lines(report: Report) -> Iterator[str]:
    """Yield all figures, then what is missing, then the counts."""
    header, footer = report.header, report.footer
    if header.smoke:
        yield "SMOKE: small sizes, to see that everything runs. The figures prove nothing."
    rows = [_HEAD, *(_row(figure) for figure in report.of(FigureRecord))]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_HEAD))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for growth in report.of(GrowthRecord):
        text = f"grows with {growth.axis} to the power of {growth.exponent:.2f}, over {len(growth.points)} points"
        yield f"{growth.benchmark}: {growth.contender} {text}"
    for absence in report.of(AbsenceRecord):
        yield f"absent: {absence.benchmark}, {absence.point}: {absence.contender or 'all'}: {absence.reason}"
    for failure in report.of(FailureRecord):
        yield f"FAILED: {failure.benchmark}, {failure.point}: {failure.reason}"
    counts = ", ".join(f"{name} {count}" for name, count in footer.counts.items())
    yield f"{counts}; {footer.seconds:.0f} s"


def _row(figure: FigureRecord) -> tuple[str, ...]:
    status = (
        "" if figure.status == "no goal" else figure.status.upper() if figure.status == "not met" else figure.status
    )
    return (
        figure.benchmark,
        figure.point,
        figure.text,
        ratio_text(figure.median),
        span_text(figure.lower_quartile, figure.upper_quartile) if figure.samples > 1 else "",
        span_text(figure.least, figure.most) if figure.samples > 1 else "",
        str(figure.samples) if figure.samples else "",
        goal_text(figure),
        status or (figure.reason if figure.median is None else ""),
    )


def ratio_text(value: float | None) -> str:
    """Return a ratio with three digits, or a dash where there is none."""
    if value is None:
        return "–"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if value >= 0.01 else f"{value:.2g}"


def span_text(least: float | None, most: float | None) -> str:
    """Return a range of two ratios."""
    return "" if least is None else f"{ratio_text(least)} to {ratio_text(most)}"


def goal_text(figure: FigureRecord) -> str:
    """Return the goal of a figure, or an empty text."""
    return "" if figure.relation is None else f"{figure.relation} {ratio_text(figure.bound)}"


def seconds_text(values: Sequence[float]) -> str:
    """Return the median of some durations, in a suitable unit."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    if median >= 1:
        return f"{median:.3g} s"
    return f"{median * 1e3:.3g} ms" if median >= 1e-3 else f"{median * 1e6:.3g} µs"
