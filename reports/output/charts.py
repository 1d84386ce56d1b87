"""Line charts as inline SVG, made without a library: small, printable, the same bytes for the same data.

Colours come from the page's style sheet through classes, so that a chart follows the light and dark modes. Curves differ in
dash and marker as well as in colour. Nothing is smoothed: a glitch of a single step is what the charts are for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, NARROW = 960, 370
_LEFT, _NARROW_LEFT, _RIGHT, _BOTTOM = 92, 62, 18, 42
_TAG_ROW = 17
_TAG_LETTER = 7.5
_MOST_MARKERS = 90


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve: ``values`` at global steps ``steps``. ``style`` is a class of the style sheet, ``marker`` a name.

    ``joined`` curves are thinned, so steps that are left out are no gap.
    """

    label: str
    style: str
    marker: str
    steps: Sequence[int]
    values: Sequence[float]
    joined: bool = False


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line at a place on the step axis, with a short text above it. ``style`` as for :class:`Series`."""

    at: float
    text: str
    style: str


@dataclass(frozen=True, kw_only=True)
class Band:
    """Shaded steps, ``first`` to ``last`` inclusive."""

    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One plot. ``differences`` draws around zero, on a scale that shows the smallest difference and the largest.

    ``is_upper`` leaves the name of the step axis to the plot right below.
    """

    title: str
    unit: str
    series: Sequence[Series]
    marks: Sequence[Mark]
    bands: Sequence[Band]
    height: int
    differences: bool = False
    is_upper: bool = False


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """The plot area in pixels and the two scales."""

    left: float
    right: float
    top: float
    bottom: float
    x: Callable[[float], float]
    y: Callable[[float], float]


def draw(chart: Chart, *, name: str, is_narrow: bool = False) -> str:
    """The chart as an ``<svg>`` element.

    Args:
        chart: what to draw; values that are not finite leave a gap.
        name: unique within the page; prefix of the ids of title and description.
        is_narrow: for a screen of the width of a telephone's, with letters of the same size.
    """
    steps = [step for series in chart.series for step in series.steps]
    if not steps:
        return ""
    first, last = min(steps), max(max(steps), min(steps) + 1)
    width, left = (NARROW, _NARROW_LEFT) if is_narrow else (WIDTH, _LEFT)
    x = _linear(first, last, left + 12, width - _RIGHT - 12)
    rows = _tag_rows(chart.marks, x)
    top = 12.0 + _TAG_ROW * (max(rows, default=-1) + 1)
    bottom = float(chart.height - (_BOTTOM - 16 if chart.is_upper else _BOTTOM))
    ticks, to_unit = _difference_scale(chart) if chart.differences else _value_scale(chart)
    frame = _Frame(
        left=left,
        right=width - _RIGHT,
        top=top,
        bottom=bottom,
        x=x,
        y=lambda value: bottom - 8 - (bottom - top - 16) * to_unit(value),
    )
    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {chart.height}" role="img" aria-labelledby="{name}-title">',
        f'<title id="{name}-title">{escape(chart.title)}</title>',
        *_bands(chart.bands, frame),
        *_axes(chart, frame, ticks, first, last),
        *_marks(chart.marks, rows, frame),
        *(part for series in chart.series for part in _curve(series, frame)),
        "</svg>",
    ]
    return "\n".join(parts)


def fitted(broad: str, narrow: str) -> str:
    """Two drawings of the same thing, of which the style sheet shows the one that the screen has room for."""
    return f'<div class="broad">{broad}</div><div class="narrow">{narrow}</div>' if broad else ""


def swatch(style: str, marker: str) -> str:
    """A short piece of a curve for the legend."""
    return (
        f'<svg class="swatch" viewBox="0 0 46 16" aria-hidden="true"><path class="curve {style}" d="M1 8H45"/>'
        f"{_marker(marker, style, 23, 8)}</svg>"
    )


def ticks_between(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers that cover ``low`` to ``high`` in about ``wanted`` steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    start, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(start, end + 1)]


def _linear(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (end - start) * (value - low) / (high - low)


def _finite(chart: Chart) -> list[float]:
    return [value for series in chart.series for value in series.values if math.isfinite(value)]


def _value_scale(chart: Chart) -> tuple[list[tuple[float, str]], Callable[[float], float]]:
    """Ticks and a map of values to 0..1 for a plain plot."""
    values = _finite(chart) or [0.0]
    low, high = min(values), max(values)
    if low == high:
        spread = abs(low) or 1.0
        low, high = low - spread / 2, high + spread / 2
    ticks = ticks_between(low, high, 4)
    return [(tick, _tick_text(tick, ticks[1] - ticks[0])) for tick in ticks], _linear(ticks[0], ticks[-1], 0, 1)


def _tick_text(tick: float, step: float) -> str:
    if tick == 0:
        return "0"
    if abs(step) < 1e-3 or abs(tick) >= 1e6:
        return f"{tick:.3g}"
    return f"{tick:.{max(0, -math.floor(math.log10(step)))}f}"


def _difference_scale(chart: Chart) -> tuple[list[tuple[float, str]], Callable[[float], float]]:
    """Symmetric logarithmic: zero in the middle, the smallest difference clearly off it, the largest at the edge."""
    sizes = [abs(value) for value in _finite(chart) if value != 0]
    if not sizes:
        return [(0.0, "0")], lambda value: 0.5
    smallest = math.floor(math.log10(min(sizes)))
    largest = max(math.ceil(math.log10(max(sizes))), smallest + 1)

    def to_unit(value: float) -> float:
        if value == 0:
            return 0.5
        share = 0.4 + 0.6 * (math.log10(abs(value)) - smallest) / (largest - smallest)
        return 0.5 + math.copysign(0.5 * min(max(share, 0.0), 1.0), value)

    edges = sorted({smallest, largest})
    ticks = [(0.0, "0")]
    ticks += [(sign * 10.0**edge, f"{'−' if sign < 0 else '+'}1e{edge}") for edge in edges for sign in (-1.0, 1.0)]
    return ticks, to_unit


def _tag_rows(marks: Sequence[Mark], x: Callable[[float], float]) -> list[int]:
    """A row for each mark's text, so that neighbours do not write over each other."""
    ends: list[float] = []
    rows: list[int] = []
    for mark in marks:
        width = _TAG_LETTER * (len(mark.text) + 1)
        left = x(mark.at) - width / 2
        row = next((index for index, end in enumerate(ends) if end <= left), len(ends))
        ends[row : row + 1] = [left + width]
        rows.append(row)
    return rows


def _bands(bands: Sequence[Band], frame: _Frame) -> list[str]:
    return [
        f'<rect class="band" x="{frame.x(band.first - 0.5):.1f}" y="{frame.top:.1f}" '
        f'width="{frame.x(band.last + 0.5) - frame.x(band.first - 0.5):.1f}" height="{frame.bottom - frame.top:.1f}"/>'
        for band in bands
    ]


def _axes(chart: Chart, frame: _Frame, ticks: Sequence[tuple[float, str]], first: int, last: int) -> list[str]:
    left, right = frame.left, frame.right
    parts = [f'<path class="axis" d="M{left} {frame.bottom:.1f}H{right}"/>']
    for value, text in ticks:
        y = frame.y(value)
        style = "zero" if chart.differences and value == 0 else "grid"
        parts.append(f'<path class="{style}" d="M{left} {y:.1f}H{right}"/>')
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for step in ticks_between(first, last, round((right - left) / 70)):
        if step == int(step) and first <= step <= last:
            x = frame.x(step)
            parts.append(f'<path class="axis" d="M{x:.1f} {frame.bottom:.1f}v5"/>')
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{frame.bottom + 19:.1f}" text-anchor="middle">{int(step)}</text>'
            )
    middle = (frame.top + frame.bottom) / 2
    parts.append(f'<text class="label" transform="translate(16 {middle:.1f}) rotate(-90)">{escape(chart.unit)}</text>')
    if not chart.is_upper:
        parts.append(f'<text class="label" x="{(left + right) / 2}" y="{frame.bottom + 36:.1f}">global step</text>')
    return parts


def _marks(marks: Sequence[Mark], rows: Sequence[int], frame: _Frame) -> list[str]:
    parts = []
    for mark, row in zip(marks, rows, strict=True):
        x, y = frame.x(mark.at), 13 + _TAG_ROW * row
        parts.append(f'<path class="mark {mark.style}" d="M{x:.1f} {y + 4}V{frame.bottom:.1f}"/>')
        parts.append(
            f'<text class="tag {mark.style}" x="{x:.1f}" y="{y}" text-anchor="middle">{escape(mark.text)}</text>'
        )
    return parts


def _curve(series: Series, frame: _Frame) -> list[str]:
    points = [
        (step, value, frame.x(step), frame.y(value)) if math.isfinite(value) else None
        for step, value in zip(series.steps, series.values, strict=True)
    ]
    path, previous = "", None
    for point in points:
        if point is not None:
            is_next = previous is not None and (series.joined or previous == point[0] - 1)
            path += f"{'L' if is_next else 'M'}{point[2]:.1f} {point[3]:.1f}"
        previous = point[0] if point is not None else None
    parts = [f'<path class="curve {series.style}" d="{path}"/>'] if path else []
    drawn = [point for point in points if point is not None]
    every = math.ceil(len(drawn) / _MOST_MARKERS)
    for step, value, x, y in drawn[::every] if every else []:
        tip = f"<title>{escape(series.label)}, step {step}: {value!r}</title>"
        parts.append(f"<g>{tip}{_marker(series.marker, series.style, x, y)}</g>")
    return parts


def _marker(name: str, style: str, x: float, y: float) -> str:
    shapes = {
        "dot": "m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0",
        "ring": "m-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0",
        "cross": "m-4 -4l8 8m0 -8l-8 8",
        "triangle": "m0 -5l5 9h-10z",
        "square": "m-4 -4h8v8h-8z",
        "plus": "m-5 0h10m-5 -5v10",
    }
    return f'<path class="marker {style}" d="M{x:.1f} {y:.1f}{shapes[name]}"/>'
