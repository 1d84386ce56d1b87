"""Curves and bars as inline SVG. The same records give the same bytes; classes choose the colours, for light and dark pages.

Curves differ in marker as well as in colour, and are labelled with their last value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 940, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 330, 14, 44
_BAR_ROW, _BAR_LEFT, _BAR_RIGHT = 26, 250, 110
_LABEL_GAP = 15
_MARKERS = ("circle", "square", "diamond", "triangle", "ring", "cross")


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One measured point: the median ``y``, the extremes, and a label."""

    x: float
    y: float
    least: float
    most: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One contender. ``style`` is a class of the style sheet; ``number`` selects the marker."""

    label: str
    style: str
    number: int
    dots: Sequence[Dot]


def draw_curves(
    curves: Sequence[Curve], *, x_label: str, y_label: str, title: str, width: int = WIDTH, right: int = _RIGHT
) -> str:
    """Return an ``<svg>`` with both axes logarithmic; values must be above 0.

    Args:
        curves: what to draw.
        x_label: the name of the horizontal axis.
        y_label: the name of the vertical axis.
        title: what a reader hears who does not see the drawing.
        width: of the drawing, in pixels; letters have the same size at any width.
        right: of it, the room for the labels at the right.
    """
    dots = [dot for curve in curves for dot in curve.dots]
    if not dots:
        return ""
    edge = width - right
    x = _log_scale([dot.x for dot in dots], _LEFT + 14, edge - 14)
    values = [value for dot in dots for value in (dot.least, dot.most)]
    y = _log_scale(values, HEIGHT - _BOTTOM - 10, _TOP + 10)
    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<text class="unit" x="{_LEFT}" y="{HEIGHT - 6}">{escape(x_label)}</text>',
        f'<text class="unit" x="6" y="{_TOP}">{escape(y_label)}</text>',
        f'<path class="axis" d="M{_LEFT} {HEIGHT - _BOTTOM}H{edge}"/>',
    ]
    for value in sorted({dot.x for dot in dots}):
        parts.append(f'<text class="tick middle" x="{x(value):.1f}" y="{HEIGHT - _BOTTOM + 18}">{value:g}</text>')
    for value in _ticks(min(values), max(values)):
        parts.append(f'<path class="grid" d="M{_LEFT} {y(value):.1f}H{edge}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 8}" y="{y(value) + 4:.1f}">{value:g}</text>')
    places = _apart([y(curve.dots[-1].y) for curve in curves])
    for curve, place in zip(curves, places, strict=True):
        parts += _curve(curve, x, y, edge, place)
    return "\n".join([*parts, "</svg>"])


def draw_bars(curves: Sequence[Curve], *, y_label: str, title: str) -> str:
    """Return an ``<svg>`` with one bar per contender, from 0 to the value of its only dot."""
    if not curves:
        return ""
    most = max(dot.most for curve in curves for dot in curve.dots) or 1.0
    height = _BAR_ROW * len(curves) + 30
    room = WIDTH - _BAR_LEFT - _BAR_RIGHT
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img">', f"<title>{escape(title)}</title>"]
    for row, curve in enumerate(curves):
        dot, top = curve.dots[0], row * _BAR_ROW + 5
        left, right = _BAR_LEFT + room * dot.least / most, _BAR_LEFT + room * dot.most / most
        middle = top + 8
        parts += [
            f'<text class="name end" x="{_BAR_LEFT - 10}" y="{top + 13}">{escape(curve.label)}</text>',
            f'<rect class="bar {curve.style}" x="{_BAR_LEFT}" y="{top}" width="{room * dot.y / most:.1f}" height="16"/>',
            f'<path class="whisker" d="M{left:.1f} {middle}H{right:.1f}M{left:.1f} {top + 3}v10M{right:.1f} {top + 3}v10"/>',
            f'<text class="name" x="{right + 8:.1f}" y="{top + 13}">{escape(dot.text)}</text>',
        ]
    parts.append(f'<text class="unit" x="{_BAR_LEFT}" y="{height - 8}">{escape(y_label)}</text>')
    return "\n".join([*parts, "</svg>"])


def swatch(style: str, number: int) -> str:
    """Return a short piece of the curve, for a table."""
    inner = f'<path class="curve {style}" d="M1 8H33"/>{_marker(number, style, 17, 8)}'
    return f'<svg class="swatch" viewBox="0 0 34 16" aria-hidden="true">{inner}</svg>'


def _curve(
    curve: Curve, x: Callable[[float], float], y: Callable[[float], float], edge: int, place: float
) -> list[str]:
    path = "L".join(f"{x(dot.x):.1f} {y(dot.y):.1f}" for dot in curve.dots)
    last = curve.dots[-1]
    end = f"M{x(last.x) + 6:.1f} {y(last.y):.1f}L{edge + 8} {place:.1f}"
    parts = [f'<path class="curve {curve.style}" d="M{path}"/>', f'<path class="leader {curve.style}" d="{end}"/>']
    for dot in curve.dots:
        spread = f"M{x(dot.x):.1f} {y(dot.least):.1f}V{y(dot.most):.1f}"
        parts.append(f'<path class="range {curve.style}" d="{spread}"/>')
        title = f"<title>{escape(curve.label)}: {escape(dot.text)}</title>"
        parts.append(f"<g>{title}{_marker(curve.number, curve.style, x(dot.x), y(dot.y))}</g>")
    text = f"{curve.label}: {last.text}"
    parts.append(f'<text class="name" x="{edge + 12}" y="{place + 4:.1f}">{escape(text)}</text>')
    return parts


def _marker(number: int, style: str, x: float, y: float) -> str:
    kind = _MARKERS[number % len(_MARKERS)]
    if kind in ("circle", "ring"):
        hollow = " hollow" if kind == "ring" else ""
        return f'<circle class="marker {style}{hollow}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    shapes = {
        "square": "m-4 -4h8v8h-8z",
        "diamond": "m0 -5l5 5l-5 5l-5 -5z",
        "triangle": "m0 -5l5 9h-10z",
        "cross": "m-4 -4l8 8m0 -8l-8 8",
    }
    hollow = " hollow" if kind == "cross" else ""
    return f'<path class="marker {style}{hollow}" d="M{x:.1f} {y:.1f}{shapes[kind]}"/>'


def _log_scale(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    low, high = math.log10(min(values)), math.log10(max(values))
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    return lambda value: start + (end - start) * (math.log10(value) - low) / (high - low)


def _ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten between the two, or the powers alone when there are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]


def _apart(wanted: Sequence[float]) -> list[float]:
    """Return heights for labels near the wanted ones and in their order, without overlap and within the plot."""
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    found = list(wanted)
    below = -math.inf
    for place in order:
        below = found[place] = max(wanted[place], below + _LABEL_GAP)
    overshoot = max(0.0, below - (HEIGHT - 8)) if order else 0.0
    return [height - overshoot for height in found]
