"""The life of a case's legs as lanes, one per rank: start, restore, saves, the kill. Drawn as SVG; a table says it in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape

from conformance.records.evidence import Event
from conformance.records.results import LegRecord
from reports.output.charts import NARROW, WIDTH, ticks_between
from reports.reading.read import Part

_LEFT, _NARROW_LEFT, _RIGHT, _TOP, _LANE, _GAP = 176, 64, 18, 26, 22, 12
# On a narrow screen the name of a leg is above its lanes.
_NAME_ROW = 26
_MOST_RANKS = 8
_NAME_WIDTH = 18.0  # of a step number above its save; a number without room is left out
_SAVING = re.compile(r"Saving checkpoint: global_step=(\d+)")


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save on one rank: from its log line (None: there was none) until it was done, in seconds of the leg."""

    step: int
    begun: float | None
    done: float


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One rank of one leg; times are seconds from the first leg's start. ``offset`` is where the leg begins."""

    leg: str
    rank: int
    offset: float
    seconds: float
    restored: float | None
    ready: float | None
    saves: tuple[Save, ...]
    ending: str
    killed: bool


def lanes(part: Part, legs: Sequence[LegRecord]) -> tuple[Lane, ...]:
    """The lanes of legs that follow each other; without the times at which they began, one right after the other."""
    found = []
    offset = 0.0
    starts = [_moment(leg) for leg in legs]
    first = starts[0] if starts else None
    for leg, start in zip(legs, starts, strict=True):
        if start is not None and first is not None:
            offset = max(0.0, (start - first).total_seconds())
        events: dict[int, list[Event]] = {}
        for event in part.events.get(leg.folder, ()):
            events.setdefault(event.rank, []).append(event)
        for rank in range(min(len(leg.ranks), _MOST_RANKS)):
            found.append(_lane(leg, rank, offset, events.get(rank, [])))
        offset += leg.seconds
    return tuple(found)


def _moment(leg: LegRecord) -> datetime | None:
    return datetime.fromisoformat(leg.started_at) if leg.started_at else None


def _lane(leg: LegRecord, rank: int, offset: float, events: Sequence[Event]) -> Lane:
    end = leg.ranks[rank]
    return Lane(
        leg=leg.leg,
        rank=rank,
        offset=offset,
        seconds=leg.seconds,
        restored=next((event.at for event in events if event.kind == "restored"), None),
        ready=next((event.at for event in events if event.kind == "begin"), None),
        saves=_saves(events),
        ending=end.signal or (f"exit {end.exit_code}" if end.exit_code is not None else "?"),
        killed=end.signal is not None,
    )


def _saves(events: Sequence[Event]) -> tuple[Save, ...]:
    begun: dict[int, float] = {}
    found = []
    for event in events:
        if event.kind == "log" and (match := _SAVING.match(str(event.data.get("message", "")))):
            begun[int(match[1])] = event.at
        if event.kind == "saved" and isinstance(event.data.get("global_step"), int):
            step = event.data["global_step"]
            found.append(Save(step=step, begun=begun.get(step), done=event.at))
    return tuple(found)


def draw_timeline(
    rows: Sequence[Lane], *, title: str, name: str, words: Mapping[str, str], is_narrow: bool = False
) -> str:
    """The lanes as an ``<svg>`` element; empty where there is none. ``words`` has ``seconds`` and ``rank``."""
    if not rows:
        return ""
    total = max(lane.offset + lane.seconds for lane in rows) or 1.0
    width, left, name_row = (NARROW, _NARROW_LEFT, _NAME_ROW) if is_narrow else (WIDTH, _LEFT, 0)
    height, places = _places(rows, name_row)

    def x(seconds: float) -> float:
        return left + (width - left - _RIGHT) * min(seconds, total) / total

    parts = [
        f'<svg class="chart timeline" viewBox="0 0 {width} {height}" role="img" aria-labelledby="{name}-title">',
        f'<title id="{name}-title">{escape(title)}</title>',
    ]
    for tick in ticks_between(0, total, 4 if is_narrow else 8):
        if 0 <= tick <= total:
            parts.append(f'<path class="grid" d="M{x(tick):.1f} {_TOP - 8}V{height - 26}"/>')
            parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{height - 10}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text class="tick" x="{left - 12}" y="{height - 10}" text-anchor="end">{words["seconds"]}</text>')
    leg = None
    for lane, y in zip(rows, places, strict=True):
        is_first = lane.leg != leg
        if is_first:
            at = y - _NAME_ROW / 2 if is_narrow else y + _LANE / 2 + 4
            parts.append(f'<text class="lane-name" x="8" y="{at:.1f}">{escape(lane.leg)}</text>')
        text = f"{words['rank']} {lane.rank}"
        parts.append(f'<text class="tick" x="{left - 12}" y="{y + _LANE / 2 + 4:.1f}" text-anchor="end">{text}</text>')
        parts += _draw_lane(lane, y, x, is_first=is_first)
        leg = lane.leg
    return "\n".join([*parts, "</svg>"])


def _places(rows: Sequence[Lane], name_row: int) -> tuple[int, list[int]]:
    """Height of the drawing, and the upper edge of each lane; there is a gap between legs, and a row for a leg's name."""
    y, places = _TOP + name_row, []
    leg = rows[0].leg
    for lane in rows:
        if lane.leg != leg:
            y += _GAP + name_row
            leg = lane.leg
        places.append(y)
        y += _LANE
    return y + 34, places


def _draw_lane(lane: Lane, y: int, x: Callable[[float], float], *, is_first: bool) -> list[str]:
    middle = y + _LANE / 2
    start, end = x(lane.offset), x(lane.offset + lane.seconds)
    parts = [
        f'<rect class="life" x="{start:.1f}" y="{y + 4}" width="{max(end - start, 1):.1f}" height="{_LANE - 8}" rx="2"/>'
    ]
    if lane.ready is not None:
        ready = x(lane.offset + lane.ready)
        tip = f"ready at {lane.ready!r} s"
        parts.append(
            f'<rect class="starting" x="{start:.1f}" y="{y + 4}" width="{max(ready - start, 1):.1f}" '
            f'height="{_LANE - 8}" rx="2"><title>{tip}</title></rect>'
        )
        if lane.restored is not None:
            parts.append(
                f'<path class="resume-mark" d="M{ready:.1f} {y + 4}l8 {_LANE / 2 - 4:.1f}l-8 {_LANE / 2 - 4:.1f}z"/>'
            )
    named = -_NAME_WIDTH
    for save in lane.saves:
        done = x(lane.offset + save.done)
        begun = x(lane.offset + (save.begun if save.begun is not None else save.done))
        tip = f"step {save.step} saved at {save.done!r} s"
        parts.append(
            f'<rect class="save" x="{begun:.1f}" y="{y + 4}" width="{max(done - begun, 2.5):.1f}" height="{_LANE - 8}">'
            f"<title>{tip}</title></rect>"
        )
        if is_first and done - named > _NAME_WIDTH:
            named = done
            parts.append(f'<text class="save-name" x="{done:.1f}" y="{y}" text-anchor="middle">{save.step}</text>')
    if lane.killed:
        parts.append(
            f'<path class="mark kill" d="M{end - 5:.1f} {middle - 5:.1f}l10 10m0 -10l-10 10">'
            f"<title>{escape(lane.ending)}</title></path>"
        )
    return parts
