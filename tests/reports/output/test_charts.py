"""Charts: round ticks, no lost spikes, and labels that do not write over each other."""

from __future__ import annotations

import re

import pytest

from reports.output.charts import Chart, Mark, Series, draw, ticks_between


def series(values: list[float]) -> Series:
    return Series(label="leg", style="resumed-a", marker="cross", steps=range(1, len(values) + 1), values=values)


def chart(values: list[float], *, differences: bool = False, marks: tuple[Mark, ...] = ()) -> str:
    picture = Chart(
        title="t", unit="u", series=[series(values)], marks=marks, bands=(), height=300, differences=differences
    )
    return draw(picture, name="c")


def points(svg: str) -> list[tuple[float, float]]:
    (path,) = re.findall(r'<path class="curve resumed-a" d="([^"]+)"', svg)
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([0-9.]+) ([0-9.]+)", path)]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, [0.0, 5.0, 10.0]),
        (1.3, 5.9, [0.0, 2.0, 4.0, 6.0]),
        (0.0, 1e-4, [0.0, 5e-5, 1e-4]),
        (-3.0, 3.0, [-4.0, -2.0, 0.0, 2.0, 4.0]),
    ],
)
def test_ticks_are_round_and_cover_the_values(low: float, high: float, expected: list[float]) -> None:
    assert ticks_between(low, high, 3) == pytest.approx(expected)


def test_a_spike_of_one_step_among_ten_thousand_is_drawn() -> None:
    values = [1.0] * 10_000
    values[4321] = 2.0
    drawn = points(chart(values))
    assert len(drawn) == 10_000
    assert min(drawn, key=lambda point: point[1]) == drawn[4321]


def test_a_constant_curve_is_drawn_in_the_middle() -> None:
    heights = {y for _, y in points(chart([5.0, 5.0, 5.0]))}
    assert len(heights) == 1
    assert 50 < heights.pop() < 250


def test_a_tiny_difference_is_clear_of_zero_next_to_a_huge_one() -> None:
    zero, tiny, huge = (y for _, y in points(chart([0.0, 1e-9, 10.0], differences=True)))
    assert zero - tiny > 30
    assert tiny - huge > 30


def test_marks_close_together_are_written_in_rows_of_their_own() -> None:
    marks = (Mark(at=5.5, text="kill 1", style="kill"), Mark(at=6.5, text="kill 2", style="kill"))
    rows = re.findall(
        r'<text class="tag kill" x="[0-9.]+" y="([0-9.]+)"', chart([1.0 * x for x in range(40)], marks=marks)
    )
    assert len(set(rows)) == 2


def test_a_chart_without_points_is_nothing() -> None:
    assert chart([]) == ""
