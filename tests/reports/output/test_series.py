"""Curves stay exact and keep every spike, however many steps there are."""

from __future__ import annotations

import base64
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reports.judging.assemble import Assembled, assemble
from reports.output.case_detail import make_detail
from reports.output.series import make_series, pack, thin
from reports.reading.read import read_run
from tests.reports.formulas import loss, lr, single
from tests.reports.run_folder import RunFolder

STEPS = 10_000
SPIKE = 4_321


def assembled(run: RunFolder) -> Assembled:
    return assemble(read_run([run.finish()]))


def packed(made: Assembled) -> dict[str, Any]:
    data = pack(make_series(made.frames.steps, made.report.cases), made.report.cases)
    assert json.loads(json.dumps(data)) == data
    return data


def floats(text: str) -> list[float]:
    raw = base64.b64decode(text[1:])
    kind, size = ("<f", 4) if text[0] == "f" else ("<d", 8)
    return [struct.unpack_from(kind, raw, place)[0] for place in range(0, len(raw), size)]


def steps(packed_steps: Any) -> list[int]:
    if isinstance(packed_steps, str):
        return [int(step) for step in np.frombuffer(base64.b64decode(packed_steps), dtype="<i4")]
    return list(range(packed_steps[0], packed_steps[0] + packed_steps[1]))


def legs_of(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (case,) = data["cases"].values()
    return {label: unpacked(data, data["legs"][number][0]) for number, label, _ in case["legs"]}


def unpacked(data: dict[str, Any], curve: list[Any]) -> dict[str, Any]:
    """One leg's columns by name, each as its kind and base64 of just its own rows."""
    found = {"s": curve[0], "t": curve[4] if len(curve) > 4 else 0}
    for name, place in zip(("loss", "lr", "grad_norm"), curve[1:4], strict=True):
        if isinstance(place, str):
            found[name] = place
            continue
        column, first = place if isinstance(place, list) else (place, 0)
        text = data["columns"][column]
        width = {"f": 4, "d": 8}[text[0]]
        rows = base64.b64decode(text[1:])[first * width : (first + len(steps(curve[0]))) * width]
        found[name] = text[0] + base64.b64encode(rows).decode()
    return found


def test_every_value_travels_as_the_float_it_is(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.resumed_case("C9")
    legs = legs_of(packed(assembled(run)))
    assert legs["reference"]["s"] == [1, 12]
    assert floats(legs["reference"]["loss"]) == [loss(step) for step in range(1, 13)]
    assert floats(legs["reference"]["lr"]) == [lr(step) for step in range(1, 13)]
    assert (legs["reference"]["loss"][0], legs["reference"]["lr"][0]) == ("f", "d")


def test_a_column_that_is_the_references_is_not_repeated(tmp_path: Path) -> None:
    def change(row: dict[str, Any], rank: int) -> None:
        if row["global_step"] == 9:
            row["loss"] = -0.0

    run = RunFolder(tmp_path / "run")
    run.resumed_case("C9", change=change)
    legs = legs_of(packed(assembled(run)))
    assert legs["interrupted"]["loss"] == "="
    assert legs["resumed"]["lr"] == "="
    assert floats(legs["resumed"]["loss"])[3] == 0.0


def test_legs_of_one_training_share_their_values_even_where_a_case_has_no_reference(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.resumed_case("C9")
    run.resumed_case("C8", last=9, kill=7, resume=5)
    run.lines = [line for line in run.lines if (line.get("key"), line.get("leg")) != ("C8", "reference")]
    for line in run.lines:
        if line["record"] == "result" and line["key"] == "C8":
            line["checks"] = []
    data = packed(assembled(run))
    assert len(data["columns"]) == 3  # C9's reference, whose formulas are those of all
    alone = {label: data["legs"][number][0] for number, label, _ in data["cases"]["case-conformance-all-C8"]["legs"]}
    assert set(alone) == {"interrupted", "resumed"}
    for label, first, last in (("interrupted", 1, 7), ("resumed", 6, 9)):
        assert floats(unpacked(data, alone[label])["loss"]) == [loss(step) for step in range(first, last + 1)]
        assert floats(unpacked(data, alone[label])["lr"]) == [lr(step) for step in range(first, last + 1)]
    assert [place[1] for place in alone["resumed"][1:4]] == [5, 5, 5]


def spiked(row: dict[str, Any], rank: int) -> None:
    if row["global_step"] == SPIKE:
        row["loss"] = single(row["loss"] + 2**-18)


def long_run(folder: Path) -> RunFolder:
    run = RunFolder(folder)
    run.resumed_case("C9", last=STEPS, kill=3_000, resume=2_000, change=spiked)
    return run


def test_of_ten_thousand_steps_few_are_kept_and_the_one_that_differs_is_among_them(tmp_path: Path) -> None:
    legs = legs_of(packed(assembled(long_run(tmp_path / "run"))))
    kept = steps(legs["resumed"]["s"])
    assert legs["resumed"]["t"] == 1
    assert len(kept) < 2_500
    assert SPIKE in kept
    reference = dict(zip(steps(legs["reference"]["s"]), floats(legs["reference"]["loss"]), strict=True))
    resumed = dict(zip(kept, floats(legs["resumed"]["loss"]), strict=True))
    assert {step for step in kept if resumed[step] != reference[step]} == {SPIKE}
    assert {2_000, 2_001, 3_000, 3_005, STEPS} <= set(steps(legs["reference"]["s"]))


def test_the_printed_curves_of_ten_thousand_steps_are_short_and_show_the_spike(tmp_path: Path) -> None:
    made = assembled(long_run(tmp_path / "run"))
    series = make_series(made.frames.steps, made.report.cases)
    detail = make_detail(made.run.parts[0], made.report.cases[0], series, number=1)
    assert [figure.metric for figure in detail.figures] == ["loss", "lr", "grad_norm"]
    assert len(detail.figures[0].values) + len(detail.figures[0].differences) < 200_000
    path = detail.figures[0].differences
    start = path.index('<path class="curve resumed-a" d="') + len('<path class="curve resumed-a" d="')
    heights = {part.split()[1] for part in path[start : path.index('"', start)].replace("M", "L").split("L")[1:]}
    assert len(heights) == 2


@pytest.mark.parametrize("limit", [60, 600, 1800])
def test_thinning_keeps_the_extremes_of_every_stretch_of_noise(limit: int) -> None:
    noise = np.random.default_rng(3).normal(size=STEPS)
    noise[7_777] = 1e6
    noise[123] = -1e6
    noise[500] = np.nan
    kept = thin([noise], limit)
    assert {0, 123, 499, 500, 501, 7_777, STEPS - 1} <= set(kept.tolist())
    assert len(kept) <= limit
    edges = np.linspace(0, STEPS, limit // 6 + 1).astype(int)
    for start, end in itertools.pairwise(edges):
        stretch = noise[start:end]
        inside = noise[kept[(kept >= start) & (kept < end)]]
        assert np.nanmax(stretch) == np.nanmax(inside)
        assert np.nanmin(stretch) == np.nanmin(inside)


def test_a_trainer_without_gradient_norms_has_no_curve_of_them(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.resumed_case("C9")
    for path in (tmp_path / "run").rglob("trajectory_rank_0.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**row, "grad_norm": None}) + "\n" for row in rows))
    made = assembled(run)
    assert {leg["grad_norm"] for leg in legs_of(packed(made)).values()} <= {"", "="}
    series = make_series(made.frames.steps, made.report.cases)
    detail = make_detail(made.run.parts[0], made.report.cases[0], series, number=1)
    assert [figure.metric for figure in detail.figures] == ["loss", "lr"]
