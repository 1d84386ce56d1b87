"""The costs as the page shows them: each figure with its goal in words, and a curve over the sizes."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from markupsafe import Markup

from benchmarks.reporting import curves, table
from benchmarks.reporting.records import AbsenceRecord, FigureRecord
from reports.contents.text import Text, same, say
from reports.output.charts import fitted
from reports.reading.costs import Cost, CostRun

_FILE = Path(__file__).with_name("costs.yaml")
_COLOURS = 5
# The width of a telephone's screen, of which the labels of the curves take a part.
_NARROW = {"width": 370, "right": 176}
# Status of a record -> state of the page's pills.
STATES = {"met": "pass", "not met": "fail", "not measured": "missing"}
_RELATIONS = {"at least": say("at least", "至少"), "at most": say("at most", "至多")}


@dataclass(frozen=True, kw_only=True)
class Words:
    """The records' own words in Chinese, by the English ones; ``{}`` in ``figures`` matches any text."""

    titles: Mapping[str, str]
    figures: Mapping[str, str]
    axes: Mapping[str, str]

    def title(self, cost: Cost) -> Text:
        """A benchmark's title."""
        return Text(en=cost.title, zh=self.titles.get(cost.name, cost.title))

    def axis(self, axis: str) -> Text:
        """The name of the axis of a chart."""
        return Text(en=axis, zh=self.axes.get(axis, axis))

    def figure(self, text: str) -> Text:
        """What a ratio says."""
        for known, zh in self.figures.items():
            found = re.fullmatch(re.escape(known).replace(r"\{\}", "(.+)"), text)
            if found:
                return Text(en=text, zh=zh.format(*found.groups()))
        return same(text)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A ratio at one point. ``state`` is a state of the page's pills, empty without a goal; ``goal`` is the goal in words."""

    point: str
    measured: str
    quartiles: str
    range: str
    rounds: int
    state: str
    goal: Text


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One ratio at all of its points. ``key`` and ``swatch`` are those of its curve, empty where it has none."""

    key: str
    swatch: Markup
    text: Text
    lines: Sequence[Line]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One benchmark. ``chart`` is empty where no ratio was measured at several places; ``absences`` are by their reason."""

    name: str
    title: Text
    axis: Text
    chart: Markup
    ratios: Sequence[Ratio]
    growths: Sequence[tuple[str, Text, str]]
    absences: Mapping[str, Sequence[AbsenceRecord]]
    failures: Sequence[tuple[str, str]]


def load_words() -> Words:
    """Read ``costs.yaml``."""
    with _FILE.open(encoding="utf-8") as file:
        return Words(**yaml.load(file, Loader=yaml.CSafeLoader))


def show(run: CostRun) -> list[Shown]:
    """Every benchmark of a run, as the template takes it."""
    words = load_words()
    return [_show(cost, words) for cost in run.benchmarks]


def _show(cost: Cost, words: Words) -> Shown:
    drawn = _drawn(cost)
    looks = {text: (f"peer-{number % _COLOURS + 1}", number) for number, text in enumerate(drawn)}
    keys = dict(zip(drawn, _keys(), strict=False))
    absences: dict[str, list[AbsenceRecord]] = {}
    for one in cost.absences:
        absences.setdefault(one.reason, []).append(one)
    return Shown(
        name=cost.name,
        title=words.title(cost),
        axis=words.axis(cost.axis),
        chart=_chart(cost, drawn, looks, keys),
        ratios=[
            Ratio(
                key=keys.get(text, ""),
                swatch=Markup(curves.swatch(*looks[text])) if text in looks else Markup(""),
                text=words.figure(text),
                lines=[_line(one) for one in cost.figures if one.text == text],
            )
            for text in dict.fromkeys(one.text for one in cost.figures)
        ],
        growths=[(one.contender, words.axis(one.axis), f"{one.exponent:.2f}") for one in cost.growths],
        absences=absences,
        failures=[(one.point, one.reason) for one in cost.failures],
    )


def _line(figure: FigureRecord) -> Line:
    return Line(
        point=figure.point,
        measured=table.ratio_text(figure.median),
        quartiles=_span(figure.lower_quartile, figure.upper_quartile) if figure.samples > 1 else "",
        range=_span(figure.least, figure.most) if figure.samples > 1 else "",
        rounds=figure.samples,
        state=STATES.get(figure.status, ""),
        goal=_goal(figure),
    )


def _span(least: float | None, most: float | None) -> str:
    return f"{table.ratio_text(least)}–{table.ratio_text(most)}"


def _goal(figure: FigureRecord) -> Text:
    """The goal and whether it was met, in words; or why there is no number."""
    if figure.status == "no goal":
        return same(figure.reason)
    asked = say(
        "{relation} {bound}", "{relation} {bound}",
        relation=_RELATIONS[str(figure.relation)], bound=table.ratio_text(figure.bound),
    )  # fmt: skip
    if figure.median is None:
        return say("the goal is {asked}; {reason}", "目标{asked}；{reason}", asked=asked, reason=figure.reason)
    values = {"asked": asked, "measured": table.ratio_text(figure.median)}
    if figure.status == "not met":
        return say("the goal is {asked}, {measured} was measured", "目标{asked}，实测 {measured}", **values)
    if _misses(figure):
        return say(
            "the goal is {asked}; the median meets it, some rounds do not",
            "目标{asked}；中位数达到，部分轮次未达到",
            **values,
        )
    return say("the goal is {asked}, {measured} was measured", "目标{asked}，实测 {measured}", **values)


def _misses(figure: FigureRecord) -> bool:
    """True when the worst round misses the goal."""
    assert figure.bound is not None  # it has a goal and was measured
    assert figure.least is not None
    assert figure.most is not None
    return figure.least < figure.bound if figure.relation == "at least" else figure.most > figure.bound


# ---- the chart --------------------------------------------------------------------------------------------------------


def _drawn(cost: Cost) -> list[str]:
    """The figures that were measured at several places of the axis."""
    places: dict[str, set[float]] = {}
    for one in cost.figures:
        if _is_drawn(one) and one.point in cost.places:
            places.setdefault(one.text, set()).add(cost.places[one.point])
    return [text for text, own in places.items() if len(own) > 1]


def _is_drawn(figure: FigureRecord) -> bool:
    # Both axes are logarithmic.
    return figure.least is not None and figure.least > 0


def _keys() -> Iterator[str]:
    yield from string.ascii_lowercase
    yield from (f"{one}{other}" for one in string.ascii_lowercase for other in string.ascii_lowercase)


def _chart(cost: Cost, drawn: Sequence[str], looks: Mapping[str, tuple[str, int]], keys: Mapping[str, str]) -> Markup:
    """Each figure over the places of its points, with its goal as a dashed line."""
    found = []
    for text in drawn:
        own = [one for one in cost.figures if one.text == text and _is_drawn(one) and one.point in cost.places]
        own.sort(key=lambda one: cost.places[one.point])
        style, number = looks[text]
        dots = [_dot(cost, one, one.median, one.least, one.most) for one in own]
        found.append(curves.Curve(label=keys[text], style=style, number=number, dots=dots))
        asked = [one for one in own if one.bound is not None and one.bound > 0]
        if asked:
            dots = [_dot(cost, one, one.bound, one.bound, one.bound) for one in asked]
            label = f"goal of {keys[text]}, {asked[0].relation}"
            found.append(curves.Curve(label=label, style=f"{style} goal", number=number, dots=dots))
    if not found:
        return Markup("")
    title = f"Ratios by {cost.axis}, median and range"
    broad, narrow = (
        curves.draw_curves(found, x_label=cost.axis, y_label="ratio, median and range", title=title, **size)
        for size in ({}, _NARROW)
    )
    return Markup(fitted(broad, narrow))


def _dot(cost: Cost, figure: FigureRecord, y: float | None, least: float | None, most: float | None) -> curves.Dot:
    assert y is not None  # only what was measured, or is asked for, is drawn
    assert least is not None
    assert most is not None
    return curves.Dot(x=cost.places[figure.point], y=y, least=least, most=most, text=table.ratio_text(y))
