"""The page and the table: they hold the figures, need nothing from elsewhere, and take no name for markup."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from benchmarks.reporting import curves, page, table
from benchmarks.reporting.records import AbsenceRecord, FailureRecord, Report
from tests.benchmarks.made import figure, measurement, report, whole_report

HOSTILE = '<script>alert("x")</script>&"\'<b>'


class Elements(HTMLParser):
    """All elements and the text outside of style sheets."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] != ["style"]:
            self.text += data


def test_the_page_holds_every_figure_with_its_goal_and_verdict() -> None:
    text = Elements(page.render(whole_report())).text
    for wanted in ("0.876", "0.801 to 0.903", "0.712 to 0.946", "at least 0.9", "not met", "other is not installed"):
        assert wanted in text, wanted
    assert "process 0 ended with 1" in text
    assert "0.74" in text


def test_a_number_stands_beside_every_curve() -> None:
    found = page.render(whole_report())
    (svg,) = re.findall(r'<svg class="chart".*?</svg>', found, re.DOTALL)
    # 1 GB in a median of 3 s, then 2 GB in 5 s; the limit has one point only.
    assert "ours: 0.4 GB/s" in svg
    assert "raw: 0.5 GB/s" in svg
    assert svg.count('<path class="curve') == 2


def test_speeds_are_the_payload_over_the_median() -> None:
    text = Elements(page.render(report(measurement("a", (2.0, 8.0, 4.0))))).text
    assert "0.25 GB/s" in text


def test_the_page_runs_nothing_and_fetches_nothing() -> None:
    text = page.render(whole_report())
    elements = Elements(text)
    assert not {"script", "iframe", "img", "object"} & set(elements.tags)
    links = [value for name, value in elements.attributes if name in ("href", "src")]
    assert all(value is not None and value.startswith(("#", "data:")) for value in links)
    assert "url(" not in text
    assert "@import" not in text
    assert not [name for name, _ in elements.attributes if name == "style" or name.startswith("on")]


def test_the_page_is_light_and_dark() -> None:
    assert "prefers-color-scheme: dark" in page.render(whole_report())


def named(name: str) -> Report:
    return report(
        measurement(name, (1.0,), point=name, note=name, axis=name, benchmark=name),
        measurement(name, (1.0,), point="2", place=2.0, axis=name, benchmark=name),
        figure(text=name, point=name, benchmark=name),
        AbsenceRecord(benchmark=name, point=name, contender=name, reason=name),
        FailureRecord(benchmark=name, point=name, reason=name),
        benchmarks={name: name},
        argv=(name,),
        machine={name: name},
    )


def test_hostile_names_stay_text() -> None:
    hostile, harmless = Elements(page.render(named(HOSTILE))), Elements(page.render(named("a name")))
    assert hostile.tags == harmless.tags
    assert "script" not in hostile.tags
    assert HOSTILE in hostile.text


def test_the_same_records_give_the_same_page() -> None:
    assert page.render(whole_report()) == page.render(whole_report())


def test_a_smoke_run_says_that_its_figures_prove_nothing() -> None:
    smoke = report(figure(), smoke=True)
    assert "prove nothing" in page.render(smoke)
    assert "prove nothing" in "\n".join(table.lines(smoke))


def test_the_table_holds_goal_ratio_and_verdict_in_one_line() -> None:
    lines = list(table.lines(whole_report()))
    (line,) = [line for line in lines if "raw write speed" in line]
    assert re.search(r"0\.876 .*0\.801 to 0\.903 .*0\.712 to 0\.946 .*at least 0\.9 .*NOT MET", line)
    assert any(line.startswith("FAILED: save, 4 GB") for line in lines)


def test_a_goal_that_was_not_measured_is_called_that() -> None:
    missing = figure(median=None, least=None, most=None, lower_quartile=None, upper_quartile=None, samples=0)
    made = report(replace(missing, status="not measured", reason="raw was not measured"))
    assert "not measured" in next(line for line in table.lines(made) if "raw write speed" in line)
    assert "raw was not measured" in Elements(page.render(made)).text


@pytest.mark.parametrize(("seconds", "told"), [((2.5,), "2.5 s"), ((0.004, 0.002), "3 ms"), ((2e-6,), "2 µs")])
def test_durations_are_told_in_a_unit_that_suits_them(seconds: tuple[float, ...], told: str) -> None:
    assert table.seconds_text(seconds) == told


def test_labels_of_curves_that_end_close_together_do_not_overlap() -> None:
    same = [
        curves.Curve(
            label=str(number),
            style="ours",
            number=number,
            dots=[curves.Dot(x=place, y=1.0, least=1.0, most=1.0, text="1") for place in (1.0, 2.0)],
        )
        for number in range(6)
    ]
    svg = curves.draw_curves(same, x_label="x", y_label="y", title="t")
    heights = sorted(float(found) for found in re.findall(r'<text class="name" x="[\d.]+" y="([\d.]+)"', svg))
    assert len(heights) == 6
    assert all(later - earlier >= 12 for earlier, later in itertools.pairwise(heights))
