"""Ratios, medians and verdicts, against values computed by hand or by NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.protocol import PAYLOAD, UNIT, Figure
from benchmarks.reporting.ratios import exponent, judge, spread
from benchmarks.reporting.records import FigureRecord, MeasurementRecord
from tests.benchmarks.made import measurement


def judged(figure: Figure, *measured: MeasurementRecord) -> FigureRecord:
    return judge(figure, {record.contender: record for record in measured}, benchmark="save", point="1 GB")


@pytest.mark.parametrize("count", [1, 2, 5, 6, 9])
def test_median_and_quartiles_are_those_of_numpy(count: int) -> None:
    values = [float(value) for value in np.random.default_rng(count).lognormal(size=count)]
    found = spread(values)
    lower, middle, upper = np.percentile(values, [25, 50, 75])
    assert (found.lower_quartile, found.median, found.upper_quartile) == pytest.approx((lower, middle, upper))
    assert (found.least, found.most, found.samples) == (min(values), max(values), count)


def test_no_value_has_no_median() -> None:
    with pytest.raises(ValueError, match="no value"):
        spread([])


def test_a_ratio_is_taken_within_each_round_and_not_of_two_medians() -> None:
    figure = Figure(text="", above=("a",), below="b")
    # Round by round 1, 10 and 2; the medians alone would give 4 / 1.
    found = judged(figure, measurement("a", (1.0, 10.0, 4.0)), measurement("b", (1.0, 1.0, 2.0)))
    assert (found.median, found.least, found.most, found.samples) == (2.0, 1.0, 10.0, 3)
    assert found.status == "no goal"


def test_several_contenders_above_are_added_up_round_by_round() -> None:
    figure = Figure(text="", above=("a", "b"), below="c")
    measured = [measurement("a", (1.0, 2.0)), measurement("b", (3.0, 6.0)), measurement("c", (2.0, 2.0))]
    found = judged(figure, *measured)
    assert (found.least, found.most) == (2.0, 4.0)


def test_bytes_are_divided_by_the_payload_and_seconds_by_one() -> None:
    one = measurement("a", (0.25, 0.25), payload_bytes=200, peak_bytes=300, disk_bytes=500)
    assert judged(Figure(text="", above=("a",), below=PAYLOAD, quantity="peak_bytes"), one).median == 1.5
    assert judged(Figure(text="", above=("a",), below=PAYLOAD, quantity="disk_bytes"), one).median == 2.5
    assert judged(Figure(text="", above=("a",), below=UNIT), one).median == 0.25


@pytest.mark.parametrize(
    ("relation", "bound", "status"),
    [("at least", 2.0, "met"), ("at least", 2.1, "not met"), ("at most", 2.0, "met"), ("at most", 1.9, "not met")],
)
def test_a_goal_is_judged_by_the_median_and_met_at_its_bound(relation: str, bound: float, status: str) -> None:
    figure = Figure(text="", above=("a",), below="b", relation=relation, bound=bound)  # type: ignore[arg-type]
    found = judged(figure, measurement("a", (1.0, 2.0, 9.0)), measurement("b", (1.0, 1.0, 1.0)))
    assert found.status == status


def test_a_goal_whose_contender_is_missing_is_not_measured_and_never_met() -> None:
    figure = Figure(text="", above=("a",), below="b", relation="at most", bound=100.0)
    found = judged(figure, measurement("a", (1.0,)))
    assert (found.status, found.median, found.samples) == ("not measured", None, 0)
    assert "b was not measured" in found.reason


def test_a_goal_whose_quantity_is_missing_is_not_measured() -> None:
    figure = Figure(text="", above=("a",), below=PAYLOAD, quantity="peak_bytes", relation="at most", bound=1.0)
    assert judged(figure, measurement("a", (1.0,))).status == "not measured"


def test_the_exponent_is_that_of_a_straight_line_through_the_logarithms() -> None:
    places, values = [64.0, 256.0, 1024.0], [0.5, 4.1, 30.0]
    assert exponent(places, values) == pytest.approx(np.polyfit(np.log(places), np.log(values), 1)[0])
    assert exponent([1.0, 2.0, 4.0], [3.0, 12.0, 48.0]) == pytest.approx(2.0)


def test_one_place_has_no_growth() -> None:
    with pytest.raises(ValueError, match="two different places"):
        exponent([4.0, 4.0], [1.0, 2.0])
