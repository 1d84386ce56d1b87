"""The curves of every case, packed for the page: exact values, thinned only where there are too many, without losing a spike.

A value is stored as the float that it is, in base64: four bytes where a float32 holds it exactly (the values of most tensors),
or eight. A column that equals the reference's bit for bit, or that is contained in another leg's, is not repeated. Thinning
keeps, of each stretch of steps, the smallest and the largest value of every column and of its difference from the reference,
and every step near an event.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.contents.document import CaseEntry, LegEntry
from reports.reading.frames import METRICS

_MOST_RANKS = 8
_MOST_POINTS = 1800  # of one leg and rank, all columns together; a chart is some 800 pixels wide
_FEWEST_POINTS = 60
_BUDGET = 120_000  # points of all legs together
_NEAR = 12  # steps around an event that are all kept
_REFERENCE, _INTERRUPTED = ("reference", "dot"), ("interrupted", "ring")
_RESUMED = (("resumed-a", "cross"), ("resumed-b", "triangle"), ("resumed-c", "square"), ("resumed-d", "plus"))
# (class of the style sheet, marker); a packed leg holds its index in this list.
LOOKS = (_REFERENCE, _INTERRUPTED, *_RESUMED)
_WIDTHS = {"f": 4, "d": 8}
Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
Key = tuple[str, str, int]  # part, folder of the leg, rank


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One leg on one rank: its steps, and the values of each metric at those. ``thinned``: not all steps are here."""

    steps: Whole
    values: Mapping[str, Floats]
    thinned: bool = False

    def at(self, chosen: Whole) -> Curve:
        """The same with only the rows ``chosen``."""
        values = {name: column[chosen] for name, column in self.values.items()}
        return Curve(steps=self.steps[chosen], values=values, thinned=self.thinned or len(chosen) < len(self.steps))


@dataclass(frozen=True, kw_only=True)
class Series:
    """All curves, thinned; ``reference`` is by the key of the leg that is compared with it."""

    curves: Mapping[Key, Curve]
    reference: Mapping[Key, Key]


def make_series(steps: pd.DataFrame, cases: Sequence[CaseEntry]) -> Series:
    """Take the curves of ``cases`` from the frame of all steps."""
    whole = _split(steps)
    shown = {(case.part, leg.folder) for case in cases for leg in case.legs}
    whole = {key: curve for key, curve in whole.items() if key[:2] in shown and key[2] < _MOST_RANKS}
    reference: dict[Key, Key] = {}
    events: dict[Key, set[int]] = {key: set() for key in whole}
    for case in cases:
        for leg in case.legs:
            for rank in range(leg.ranks):
                key = (case.part, leg.folder, rank)
                if key not in whole:
                    continue
                against = (case.part, case.reference or "", rank)
                if case.reference not in (None, leg.folder) and against in whole:
                    reference[key] = against
                events[key] |= set(_events(case, leg))
                if key in reference:
                    events[against] |= events[key]
    limit = max(_FEWEST_POINTS, min(_MOST_POINTS, _BUDGET // max(len(whole), 1)))
    kept = {key: _kept(whole, reference.get(key), key, events[key], limit) for key in whole}
    # A difference needs both values: what is kept of a leg is kept of its reference.
    for key, against in reference.items():
        kept[against] = np.union1d(kept[against], np.intersect1d(kept[key], whole[against].steps))
    curves = {}
    for key, curve in whole.items():
        curves[key] = curve.at(np.flatnonzero(np.isin(curve.steps, kept[key])))
    return Series(curves=curves, reference=reference)


def _split(steps: pd.DataFrame) -> dict[Key, Curve]:
    found: dict[Key, Curve] = {}
    if steps.empty:
        return found
    columns = {name: steps[name].to_numpy() for name in ("step", *METRICS)}
    # Rows of one leg and rank follow each other in the frame.
    codes = np.stack([steps["part"].cat.codes, steps["folder"].cat.codes, steps["rank"]])
    starts = np.flatnonzero(np.r_[True, np.any(codes[:, 1:] != codes[:, :-1], axis=0)])
    parts, folders, ranks = steps["part"], steps["folder"], steps["rank"].to_numpy()
    for start, end in zip(starts, [*starts[1:], len(steps)], strict=True):
        key = (str(parts.iloc[start]), str(folders.iloc[start]), int(ranks[start]))
        values = {name: columns[name][start:end].astype(np.float64) for name in METRICS}
        found[key] = Curve(steps=columns["step"][start:end].astype(np.int64), values=values)
    return found


def _events(case: CaseEntry, leg: LegEntry) -> Iterable[int]:
    """Steps of a case that a reader wants to see exactly."""
    yield from (step for step in (leg.first_step, leg.last_step) if step is not None)
    for resume in case.resumes:
        yield from (step for step in (resume.killed_after, resume.resumed_at) if step is not None)
    if case.divergence is not None:
        yield case.divergence.step


def _kept(whole: Mapping[Key, Curve], against: Key | None, key: Key, events: set[int], limit: int) -> Whole:
    """The steps of a curve that are kept."""
    curve = whole[key]
    if len(curve.steps) <= limit:
        return curve.steps
    columns = list(curve.values.values())
    if against is not None:
        columns += list(differences(whole[against], curve).values())
    chosen = thin(columns, limit)
    near = np.zeros(len(curve.steps), dtype=bool)
    for event in events:
        near |= np.abs(curve.steps - event) <= _NEAR
    kept: Whole = np.union1d(curve.steps[chosen], curve.steps[near])
    return kept


def thin(columns: Sequence[Floats], limit: int) -> Whole:
    """Row numbers, ascending, about ``limit`` of them at most: the ends, and of each stretch both extremes of every column.

    Values that are not finite count as extremes, and the row on either side of a jump to such a value is kept.
    """
    rows = len(columns[0])
    edges = np.linspace(0, rows, max(limit // 6, 1) + 1).astype(np.int64)[:-1]
    chosen = [np.array([0, rows - 1])]
    for column in columns:
        finite = np.isfinite(column)
        low = np.where(finite, column, np.inf)
        high = np.where(finite, column, -np.inf)
        chosen += [_first(low, np.minimum.reduceat(low, edges), edges, rows)]
        chosen += [_first(high, np.maximum.reduceat(high, edges), edges, rows)]
        turns = np.flatnonzero(finite[1:] != finite[:-1])
        chosen += [turns, turns + 1]
    found: Whole = np.unique(np.concatenate(chosen))
    return found


def _first(values: Floats, extremes: Floats, edges: Whole, rows: int) -> Whole:
    """The first row of each stretch that holds its extreme."""
    stretch = np.repeat(np.arange(len(edges)), np.diff(np.r_[edges, rows]))
    hits = np.flatnonzero(values == extremes[stretch])
    _, first = np.unique(stretch[hits], return_index=True)
    found: Whole = hits[first]
    return found


def differences(reference: Curve, curve: Curve) -> dict[str, Floats]:
    """Each metric minus the reference's at the same step; NaN where the reference has none, 0 where both are the same."""
    place = np.searchsorted(reference.steps, curve.steps)
    place = np.minimum(place, max(len(reference.steps) - 1, 0))
    there = reference.steps[place] == curve.steps if len(reference.steps) else np.zeros(len(curve.steps), dtype=bool)
    found = {}
    for name, column in curve.values.items():
        other = reference.values[name][place]
        with np.errstate(invalid="ignore"):
            difference = column - other
        difference[column.view(np.int64) == other.view(np.int64)] = 0.0
        difference[~there] = np.nan
        found[name] = difference
    return found


def is_identical(reference: Curve, curve: Curve, name: str) -> bool:
    """True when every value of the curve is, bit for bit, the reference's at the same step."""
    place = np.minimum(np.searchsorted(reference.steps, curve.steps), max(len(reference.steps) - 1, 0))
    if not len(reference.steps) or not np.array_equal(reference.steps[place], curve.steps):
        return False
    return np.array_equal(curve.values[name].view(np.int64), reference.values[name][place].view(np.int64))


# ---- for the page's script ------------------------------------------------------------------------------------------


def pack(series: Series, cases: Sequence[CaseEntry]) -> dict[str, Any]:
    """Everything that the page's script draws, as plain data.

    ``legs`` has, by number and rank, ``[steps, loss, lr, grad_norm]`` and a 1 where steps are left out. A column is ``"="``
    (the reference's), ``""`` (none), or a place in ``columns``: a number, or that and the row that it begins with.
    """
    names = {key[:2]: number for number, key in enumerate(dict.fromkeys(key[:2] for key in series.curves))}
    pool = _Pool(
        _bytes_of(column)
        for key, curve in series.curves.items()
        for name, column in curve.values.items()
        if not isinstance(_column(series, key, curve, name), str)
    )
    legs: list[list[Any]] = [[] for _ in names]
    for key, curve in series.curves.items():
        leg = legs[names[key[:2]]]
        leg += [None] * (key[2] + 1 - len(leg))
        leg[key[2]] = _pack_curve(series, key, curve, pool)
    return {
        "looks": [list(look) for look in LOOKS],
        "columns": pool.packed(),
        "legs": legs,
        "cases": {case.anchor: _pack_case(case, names) for case in cases if _drawn(case, names)},
    }


class _Pool:
    """Columns of which none is contained in another one: legs of one training share most of their values."""

    def __init__(self, columns: Iterable[tuple[str, bytes]]) -> None:
        self._columns: list[tuple[str, bytes]] = []
        self._starts: dict[tuple[str, bytes], list[tuple[int, int]]] = {}
        # The longest first, so that what is contained meets what contains it.
        for kind, data in sorted(set(columns), key=lambda one: (-len(one[1]), one)):
            if self.place(kind, data) is None:
                self._add(kind, data)

    def _add(self, kind: str, data: bytes) -> None:
        number, width = len(self._columns), _WIDTHS[kind]
        self._columns.append((kind, data))
        seen = set()
        for row in range(len(data) // width):
            value = data[row * width : (row + 1) * width]
            if value not in seen:
                seen.add(value)
                self._starts.setdefault((kind, value), []).append((number, row))

    def place(self, kind: str, data: bytes) -> int | list[int] | None:
        """Where the column is: a number of a column, and the row if it is not the first; None where it is not there."""
        width = _WIDTHS[kind]
        for number, row in self._starts.get((kind, data[:width]), ()):
            if self._columns[number][1].startswith(data, row * width):
                return [number, row] if row else number
        return None

    def packed(self) -> list[str]:
        """Each column as its kind and base64."""
        return [kind + base64.b64encode(data).decode() for kind, data in self._columns]


def _drawn(case: CaseEntry, names: Mapping[tuple[str, str], int]) -> bool:
    return any((case.part, leg.folder) in names for leg in case.legs)


def _column(series: Series, key: Key, curve: Curve, name: str) -> str | Floats:
    """A column, or a word for one that needs no values."""
    against = series.reference.get(key)
    if against is not None and is_identical(series.curves[against], curve, name):
        return "="
    column = curve.values[name]
    return "" if np.isnan(column).all() else column


def _pack_curve(series: Series, key: Key, curve: Curve, pool: _Pool) -> list[Any]:
    packed: list[Any] = [_pack_steps(curve.steps)]
    for name in METRICS:
        column = _column(series, key, curve, name)
        packed.append(column if isinstance(column, str) else pool.place(*_bytes_of(column)))
    return [*packed, 1] if curve.thinned else packed


def _pack_steps(steps: Whole) -> Any:
    if len(steps) and np.array_equal(steps, np.arange(steps[0], steps[0] + len(steps))):
        return [int(steps[0]), len(steps)]
    return base64.b64encode(steps.astype("<i4").tobytes()).decode()


def _bytes_of(column: Floats) -> tuple[str, bytes]:
    with np.errstate(over="ignore"):
        single = column.astype("<f4")
    if np.array_equal(single.astype(np.float64).view(np.int64), column.view(np.int64)):
        return "f", single.tobytes()
    return "d", column.astype("<f8").tobytes()


def _pack_case(case: CaseEntry, names: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    legs = []
    for leg, look in zip(drawn_legs(case), looks_of(case), strict=True):
        if (case.part, leg.folder) in names:
            legs.append([names[case.part, leg.folder], leg.leg, LOOKS.index(look)])
    packed: dict[str, Any] = {"legs": legs}
    if case.reference and (case.part, case.reference) in names:
        packed["ref"] = names[case.part, case.reference]
    kills = [one for one in case.resumes if one.killed_after is not None]
    if kills:
        packed["kills"] = [one.killed_after for one in kills]
        packed["bands"] = [[(one.resumed_at or 0) + 1, one.killed_after] for one in kills if one.lost_steps]
    if case.divergence is not None:
        packed["difference"] = [case.divergence.step, case.divergence.rank, case.divergence.column]
    return packed


def looks_of(case: CaseEntry) -> list[tuple[str, str]]:
    """(class of the style sheet, marker) of each drawn leg: the reference, those from step 0, those that resumed."""
    found = []
    resumed = 0
    for leg in drawn_legs(case):
        if leg.folder == case.reference:
            found.append(_REFERENCE)
        elif leg.restore_from is None:
            found.append(_INTERRUPTED)
        else:
            found.append(_RESUMED[resumed % len(_RESUMED)])
            resumed += 1
    return found


def drawn_legs(case: CaseEntry) -> list[LegEntry]:
    """The legs of a case as they are drawn: its reference first, each folder once."""
    legs = {leg.folder: leg for leg in sorted(case.legs, key=lambda leg: leg.folder != case.reference)}
    return list(legs.values())
